"""`tparmpi bench`: measure this cluster, beside what MPI and NumPy do in turns."""

from __future__ import annotations

import argparse

from tparmpi.cli.bench import (
    checkpoint,
    collectives,
    compare,
    dispatch,
    pipeline,
    train,
)

SUMMARY = "measure collectives, operators, training and checkpoints"

_WHAT = {
    "checkpoint": checkpoint,
    "collectives": collectives,
    "dispatch": dispatch,
    "pipeline": pipeline,
    "train": train,
    "compare": compare,
}
# How long these take is for the number of their steps or rounds to say.
_BY_STEPS = (checkpoint, train, compare)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Measures this cluster, and beside it, in turns in the same run, what the "
        "library rests on. Start it as the job would be: mpirun -n 2 tparmpi bench "
        "collectives."
    )
    choices = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, command in _WHAT.items():
        chosen = choices.add_parser(name, help=command.SUMMARY, allow_abbrev=False)
        if command not in _BY_STEPS:
            chosen.add_argument(
                "--seconds",
                type=float,
                default=1.0,
                metavar="S",
                help="time for each measurement, about (%(default)s)",
            )
        chosen.add_argument(
            "--json", action="store_true", help="print one line of JSON, not tables"
        )
        command.add_arguments(chosen)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    from tparmpi.errors import UsageError

    if getattr(arguments, "seconds", 1.0) <= 0:
        raise UsageError(f"bench: --seconds must be positive, not {arguments.seconds}")
    return _WHAT[arguments.what].run(arguments)
