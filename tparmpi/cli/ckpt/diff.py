"""`tparmpi ckpt diff`: how two checkpoints differ."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import Any

from tparmpi.cli.ckpt.table import count, rows

SUMMARY = "compare two checkpoints, whatever layouts they were saved from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Compares two checkpoints byte for byte: names, shapes, dtypes, values, and "
        "what is recorded beside them. Exit code 1 if they differ. Of a run the newest "
        "counts."
    )
    parser.add_argument("first", metavar="PATH", help="run folder or checkpoint")
    parser.add_argument("second", metavar="PATH", help="the other")


def run(arguments: argparse.Namespace) -> tuple[int, list[str], Any]:
    """Exit code, lines to print, the same for programs. Local."""
    from tparmpi.io import inspection

    first, second = (
        inspection.find(path)[-1] for path in (arguments.first, arguments.second)
    )
    found = inspection.diff(first, second)
    lines = [f"only in {first}: {name}" for name in found.only_first]
    lines += [f"only in {second}: {name}" for name in found.only_second]
    lines += found.other
    if found.values:
        cells = [("tensor", "elements that differ", "of", "by at most")]
        for one in found.values:
            gap = f"{one.largest:.3g}"
            cells.append((one.name, f"{one.count:,}", f"{one.size:,}", gap))
        lines += rows(cells, right=(1, 2, 3))
    lines.append(f"{count(found.same, 'tensor')} equal")
    facts = {"first": str(first), "second": str(second), **asdict(found)}
    for value in facts["values"]:
        # JSON has no infinities and no NaN.
        if not math.isfinite(value["largest"]):
            value["largest"] = None
    return int(bool(found)), lines, facts
