"""An argument parser whose help and errors appear once on any number of ranks."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from tparmpi.comm.launcher import launched
from tparmpi.errors import UsageError
from tparmpi.train import output


def folder(text: str) -> str:
    """An argument that names a folder. Local."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return text


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of leaving the process, and prints on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        # MPI does not run yet, and help need not wait for it.
        if launched().rank == 0 and message:
            output.write(file or sys.stderr, message)
