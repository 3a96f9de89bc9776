"""`tparmpi generate`: print text that a trained model writes."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from functools import partial

from tparmpi.cli.parser import folder
from tparmpi.train import output

SUMMARY = "print text from a run's newest checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Continues a prompt with the newest checkpoint of a run, on any number of "
        "ranks, whatever number it was trained on; each gives the same text."
    )
    parser.add_argument("run", metavar="RUN", type=folder, help="run folder")
    parser.add_argument(
        "--prompt", default="\n", help="text to go on from (a line break)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=200,
        metavar="N",
        help="tokens to write (%(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0 always takes the likeliest token, 1 the model's odds (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed, another text (%(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON, not the text"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    from pathlib import Path

    from tparmpi import comm
    from tparmpi.train import sources
    from tparmpi.train.generate import Sampling, generate
    from tparmpi.train.ranks import from_rank_zero

    from_rank_zero(lambda: sources.check_environment(os.environ))

    def note(text: str) -> None:
        if comm.world().rank == 0:
            output.write(sys.stderr, f"tparmpi: {text}\n")

    pieces = generate(
        Path(arguments.run),
        arguments.prompt,
        Sampling(arguments.max_tokens, arguments.temperature, arguments.seed),
        note,
    )
    if not arguments.json:
        for piece in itertools.chain(pieces, ["\n"]):
            # All ranks end when nobody reads on.
            if not from_rank_zero(partial(output.write, sys.stdout, piece)):
                break
        return 0
    line = {
        "run": arguments.run,
        "prompt": arguments.prompt,
        "text": "".join(pieces),
    }
    if comm.world().rank == 0:
        output.write(sys.stdout, json.dumps(line) + "\n")
    return 0
