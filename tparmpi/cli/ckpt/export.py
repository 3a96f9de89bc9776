"""`tparmpi ckpt export`: copy a checkpoint's model to safetensors."""

from __future__ import annotations

import argparse
from typing import Any

SUMMARY = "copy a checkpoint's model to safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Copies the model of a checkpoint, of a run the newest, to a safetensors file, "
        "or with --max-file-bytes to a folder of several with an index. Holds 16 MiB "
        "at a time. Needs the extra tparmpi[safetensors]."
    )
    parser.add_argument("source", metavar="PATH", help="run folder or checkpoint")
    parser.add_argument(
        "target", metavar="NEW", help="new file, model.safetensors, or new folder"
    )
    parser.add_argument(
        "--max-file-bytes", type=int, metavar="N", help="most bytes of one file"
    )


def run(arguments: argparse.Namespace) -> tuple[int, list[str], Any]:
    """Exit code, lines to print, the same for programs. Local."""
    from tparmpi.io import copies, inspection

    source = inspection.find(arguments.source)[-1]
    path = copies.export(
        source, arguments.target, max_file_bytes=arguments.max_file_bytes
    )
    facts = {"source": str(source), "path": str(path)}
    return 0, [f"{source}: exported to {path}"], facts
