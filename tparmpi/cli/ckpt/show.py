"""`tparmpi ckpt show`: what one checkpoint holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tparmpi.cli.ckpt.table import count, rows, size

SUMMARY = "show what a checkpoint holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Shows what a checkpoint records and its tensors, by its index alone; of a run "
        "the newest one's."
    )
    parser.add_argument("path", metavar="PATH", help="run folder or checkpoint")


def run(arguments: argparse.Namespace) -> tuple[int, list[str], Any]:
    """Exit code, lines to print, the same for programs. Local."""
    from tparmpi.io import inspection

    found = inspection.inspect(inspection.find(arguments.path)[-1])
    header = {
        name: getattr(found, name)
        for name in ("save_id", "step", "seed", "position", "optimizer_steps", "extra")
    }
    facts = {
        "path": str(found.path),
        **header,
        "bytes": found.nbytes,
        "parameters": found.parameters,
        "files": found.files,
        "tensors": {
            name: {"shape": t.shape, "dtype": t.dtype, "bytes": t.nbytes}
            for name, t in found.tensors.items()
        },
    }
    lines = [
        str(found.path),
        f"{count(found.parameters, 'parameter')}, "
        f"{count(len(found.tensors), 'tensor')}, {size(found.nbytes)} in "
        f"{count(len(found.files), 'data file')}",
        *rows(
            [
                (name, value if isinstance(value, str) else json.dumps(value))
                for name, value in header.items()
                if value is not None
            ]
        ),
        "",
        *rows(
            [
                (name, t.dtype, "x".join(map(str, t.shape)) or "scalar", size(t.nbytes))
                for name, t in found.tensors.items()
            ],
            right=(3,),
        ),
    ]
    return 0, lines, facts
