"""`tparmpi ckpt ls`: the checkpoints of a run."""

from __future__ import annotations

import argparse
from typing import Any

from tparmpi.cli.ckpt.table import rows, size

SUMMARY = "list a run's checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Lists the checkpoints of a run, oldest first, by their indexes alone. One "
        "whose index is damaged is said so; exit code 1 then."
    )
    parser.add_argument("path", metavar="PATH", help="run folder")


def run(arguments: argparse.Namespace) -> tuple[int, list[str], Any]:
    """Exit code, lines to print, the same for programs. Local."""
    from tparmpi.errors import CheckpointError
    from tparmpi.io import inspection

    cells = [("step", "tensors", "bytes", "files", "path")]
    facts: list[dict[str, Any]] = []
    code = 0
    for path in inspection.find(arguments.path):
        try:
            found = inspection.inspect(path)
        except CheckpointError as error:
            code = 1
            cells.append(("-", "-", "-", "-", f"{path} (damaged: {error})"))
            facts.append({"path": str(path), "error": str(error)})
            continue
        tensors, files = len(found.tensors), len(found.files)
        cells.append(
            (str(found.step), str(tensors), size(found.nbytes), str(files), str(path))
        )
        facts.append(
            {
                "path": str(path),
                "step": found.step,
                "tensors": tensors,
                "bytes": found.nbytes,
                "files": files,
            }
        )
    return code, rows(cells, right=(0, 1, 2, 3)), facts
