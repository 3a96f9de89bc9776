"""`tparmpi train`: train a model, or go on with a run that was begun."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from tparmpi.cli.parser import folder
from tparmpi.train import output

if TYPE_CHECKING:
    from tparmpi.train.config import RunConfig

SUMMARY = "train a model on text; the same command again resumes"

_FLAGS = {
    "parallel.tp": "--tp",
    "parallel.dp": "--dp",
    "parallel.pp": "--pp",
    "train.steps": "--steps",
    "data.train": "--data",
}

_ABOUT = """\
Trains under mpirun or srun on all ranks, or alone on one. Every key has a default; its
value comes from the first of: command line, environment (TPARMPI_<SECTION>_<KEY>),
CONFIG.toml. The run's configuration, metrics and checkpoints are kept in the run
folder; the same command again goes on from the newest checkpoint.

exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped early with a checkpoint (by
SIGUSR1, SIGTERM or Ctrl-C): start it again"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _ABOUT
    parser.epilog = _keys_table()
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="give a key of the configuration, model.n_layer=4; may be repeated",
    )
    parser.add_argument(
        "--run",
        type=folder,
        default="runs/default",
        metavar="DIR",
        help="run folder (%(default)s)",
    )
    parser.add_argument("--tp", type=int, help="short for --set parallel.tp=N")
    parser.add_argument("--dp", type=int, help="short for --set parallel.dp=N")
    parser.add_argument("--pp", type=int, help="short for --set parallel.pp=N")
    parser.add_argument("--steps", type=int, help="short for --set train.steps=N")
    parser.add_argument(
        "--data", metavar="PATH", help="short for --set data.train=PATH"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON, last"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    from pathlib import Path

    from tparmpi import comm
    from tparmpi.train.loop import train
    from tparmpi.train.ranks import from_rank_zero
    from tparmpi.train.signals import StopSignals

    with StopSignals() as signals:
        config = from_rank_zero(lambda: _resolve(arguments))
        outcome = train(
            config,
            Path(arguments.run),
            signals=signals,
            stream=sys.stderr if arguments.json else sys.stdout,
        )
        signals.ignore()
    if arguments.json and comm.world().rank == 0:
        output.write(sys.stdout, json.dumps(outcome.as_dict()) + "\n")
    return os.EX_TEMPFAIL if outcome.stopped else os.EX_OK


def _resolve(arguments: argparse.Namespace) -> RunConfig:
    from tparmpi.errors import UsageError, reason
    from tparmpi.train import sources

    toml = None
    if arguments.config is not None:
        try:
            with open(arguments.config, encoding="utf-8") as file:
                toml = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read the configuration {os.path.abspath(arguments.config)}: "
                f"{reason(error)}"
            ) from error
    given = {name: getattr(arguments, flag[2:]) for name, flag in _FLAGS.items()}
    return sources.resolve(
        toml=toml,
        toml_name=arguments.config,
        environment=os.environ,
        settings=arguments.set,
        flags={
            name: (_FLAGS[name], value)
            for name, value in given.items()
            if value is not None
        },
    )


def _keys_table() -> str:
    from tparmpi.train.config import KEYS

    width = max(map(len, KEYS)) + 2
    lines = ["keys of the configuration:"]
    for key in KEYS.values():
        default = "" if key.default is None else f" ({key.default})"
        lines.append(f"  {key.name:{width}}{key.about}{default}")
    return "\n".join(lines)
