"""`tparmpi ckpt verify`: read every byte of checkpoints."""

from __future__ import annotations

import argparse
from typing import Any

SUMMARY = "read every byte of a run's checkpoints, or of one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Reads every byte of a checkpoint, or of all of a run, and compares it with "
        "its checksum. Names what is damaged; exit code 1 then."
    )
    parser.add_argument("path", metavar="PATH", help="run folder or checkpoint")


def run(arguments: argparse.Namespace) -> tuple[int, list[str], Any]:
    """Exit code, lines to print, the same for programs. Local."""
    from tparmpi.io import inspection

    lines: list[str] = []
    facts = []
    for path in inspection.find(arguments.path):
        problems = inspection.verify(path)
        facts.append({"path": str(path), "problems": problems})
        lines.append(f"{path}: {'damaged' if problems else 'whole'}")
        lines += [f"  {problem}" for problem in problems]
    return int(any(fact["problems"] for fact in facts)), lines, facts
