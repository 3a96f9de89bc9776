"""`tparmpi ckpt`: look at checkpoints, check them and copy them to other forms."""

from __future__ import annotations

import argparse

from tparmpi.cli.ckpt import diff, export, import_, ls, reshard, show, verify

SUMMARY = "list, show, verify, compare and copy checkpoints"

_WHAT = {
    "ls": ls,
    "show": show,
    "verify": verify,
    "diff": diff,
    "export": export,
    "import": import_,
    "reshard": reshard,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Looks at checkpoints. PATH is a run's folder or one checkpoint's. One process "
        "is enough: under mpirun the first rank does the work."
    )
    choices = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, command in _WHAT.items():
        chosen = choices.add_parser(name, help=command.SUMMARY, allow_abbrev=False)
        command.add_arguments(chosen)
        chosen.add_argument(
            "--json", action="store_true", help="print one line of JSON instead"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    import json
    import sys

    from tparmpi.comm.launcher import launched
    from tparmpi.train import output
    from tparmpi.train.ranks import from_rank_zero

    command = _WHAT[arguments.what]
    # Alone it needs no MPI, which takes its time to start.
    alone = launched().size == 1
    code, lines, facts = (
        command.run(arguments)
        if alone
        else from_rank_zero(lambda: command.run(arguments))
    )
    if launched().rank == 0:
        lines = [json.dumps(facts)] if arguments.json else lines
        output.write(sys.stdout, "".join(f"{line}\n" for line in lines))
    return int(code)
