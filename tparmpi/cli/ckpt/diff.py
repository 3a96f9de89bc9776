"""`tparmpi ckpt diff`: how two checkpoints differ."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Collection
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
    lines = [
        f"only in {folder}: {what}"
        for folder, names, other in (
            (first, found.only_first, second),
            (second, found.only_second, first),
        )
        if names
        for what in _listed(names, inspection.inspect(other).tensors)
    ]
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


def _listed(names: Collection[str], others: Collection[str]) -> list[str]:
    """What is only in one: tensors, and as one item the kinds that `others` lacks."""
    kept = set(map(_kind, others))
    counts = Counter(kind for kind in map(_kind, names) if kind not in kept)
    whole = {kind: number for kind, number in counts.items() if number > 1}
    listed = [name for name in names if _kind(name) not in whole]
    for section in dict.fromkeys(section for section, _ in whole):
        moments = {last: n for (part, last), n in whole.items() if part == section}
        total = count(sum(moments.values()), "tensor")
        if len(moments) > 1 and len(set(moments.values())) == 1:
            (each,) = set(moments.values())
            total = f"{len(moments)} x {count(each, 'tensor')}"
        which = f" ({', '.join(moments)})" if any(moments) else ""
        listed.append(f"{section}, {total}{which}")
    return listed


def _kind(name: str) -> tuple[str, str]:
    """The part of a checkpoint that a tensor is of, and which moment it is if one."""
    from tparmpi.io.format import OPTIMIZER

    section, _, path = name.partition("/")
    return section, path.rpartition("/")[2] if section == OPTIMIZER else ""
