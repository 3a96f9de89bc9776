"""The entry point of the `tparmpi` command."""

from __future__ import annotations

from collections.abc import Sequence

from tparmpi import __version__, comm
from tparmpi.cli import bench, ckpt, generate, plan, train
from tparmpi.cli.parser import Parser

COMMANDS = {
    "train": train,
    "generate": generate,
    "plan": plan,
    "ckpt": ckpt,
    "bench": bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, the same on every rank.

    0 done, 1 failed, 2 wrong usage, 75 stopped early with a checkpoint.
    """
    return comm.run_main(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parsed = parser().parse_args(arguments)
    return COMMANDS[parsed.command].run(parsed)


def parser() -> Parser:
    """The parser of the whole command line. Local."""
    whole = Parser(
        prog="tparmpi",
        description="Train and run models across MPI ranks, split over GPUs or CPUs.",
        epilog="Each command works alone and under mpirun or srun.",
    )
    whole.add_argument("--version", action="version", version=f"tparmpi {__version__}")
    commands = whole.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.SUMMARY, allow_abbrev=False)
        )
    return whole
