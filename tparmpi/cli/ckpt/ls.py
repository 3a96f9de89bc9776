"""`tparmpi ckpt ls`: the checkpoints of a run."""

from __future__ import annotations

import argparse
from typing import Any

from tparmpi.cli.ckpt.table import rows, size

SUMMARY = "list a run's checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Lists the checkpoints of a run, oldest first, without reading their tensors. "
        "One with a damaged index or a missing or cut file is said so; exit code 1 "
        "then."
    )
    parser.add_argument("path", metavar="PATH", help="run folder")


def run(arguments: argparse.Namespace) -> tuple[int, list[str], Any]:
    """Exit code, lines to print, the same for programs. Local."""
    from tparmpi.io import inspection
    from tparmpi.io.pruning import finite

    cells = [("step", "val_loss", "tensors", "bytes", "files", "path")]
    facts: list[dict[str, Any]] = []
    code = 0
    for path in inspection.find(arguments.path):
        problem = inspection.flaw(path)
        if problem is not None:
            code = 1
            cells.append(("-", "-", "-", "-", "-", f"{path} (damaged: {problem})"))
            facts.append({"path": str(path), "error": problem})
            continue
        found = inspection.inspect(path)
        tensors, files = len(found.tensors), len(found.files)
        loss = finite(found.extra.get("val_loss"))
        cells.append(
            (
                str(found.step),
                "" if loss is None else f"{loss:.4f}",
                str(tensors),
                size(found.nbytes),
                str(files),
                str(path),
            )
        )
        facts.append(
            {
                "path": str(path),
                "step": found.step,
                "val_loss": loss,
                "tensors": tensors,
                "bytes": found.nbytes,
                "files": files,
            }
        )
    return code, rows(cells, right=(0, 1, 2, 3, 4)), facts
