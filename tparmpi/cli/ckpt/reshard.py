"""`tparmpi ckpt reshard`: copy a checkpoint to another number of files."""

from __future__ import annotations

import argparse
from typing import Any

SUMMARY = "copy a checkpoint to another number of data files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Copies a checkpoint, of a run the newest, to one with another number of data "
        "files, compressed if asked, byte for byte the same tensors. Loading needs no "
        "such copy: any checkpoint loads into any layout."
    )
    parser.add_argument("source", metavar="PATH", help="run folder or checkpoint")
    parser.add_argument("target", metavar="NEW", help="folder of the new checkpoint")
    parser.add_argument(
        "--files", type=int, default=1, metavar="N", help="data files (%(default)s)"
    )
    parser.add_argument(
        "--compression",
        type=lambda text: int(text) if text.isdecimal() else text,
        choices=("gzip", *range(1, 10)),
        help="compress every tensor, gzip being its level 4; without it none is",
    )


def run(arguments: argparse.Namespace) -> tuple[int, list[str], Any]:
    """Exit code, lines to print, the same for programs. Local."""
    from tparmpi.io import copies, inspection

    source = inspection.find(arguments.source)[-1]
    path = copies.convert(
        source,
        arguments.target,
        files=arguments.files,
        compression=arguments.compression,
    )
    facts = {"source": str(source), "path": str(path)}
    return 0, [f"{source}: copied to {path}"], facts
