"""`tparmpi generate`: print text that a trained model writes."""

from __future__ import annotations

import argparse
import json
import sys

SUMMARY = "print text from a run's newest checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Continues a prompt with the newest checkpoint of a run, on any number of "
        "ranks, whatever number it was trained on; each gives the same text."
    )
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--prompt", default="\n", help="text to go on from")
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
    from tparmpi.train.generate import Sampling, generate

    text = ""
    for piece in generate(
        Path(arguments.run),
        arguments.prompt,
        Sampling(arguments.max_tokens, arguments.temperature, arguments.seed),
    ):
        text += piece
        if comm.world().rank == 0 and not arguments.json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if comm.world().rank == 0:
        line = {"run": arguments.run, "prompt": arguments.prompt, "text": text}
        print(json.dumps(line) if arguments.json else "", flush=True)
    return 0
