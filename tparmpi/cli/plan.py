"""`tparmpi plan`: look at a layout before anything runs."""

from __future__ import annotations

import argparse
import json

from tparmpi.errors import UsageError

SUMMARY = "show what a layout will do, without running it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Shows the order in which pipeline stages work, and how much of the time they "
        "wait, if a backward takes twice as long as a forward."
    )
    parser.add_argument(
        "--show-schedule", action="store_true", required=True, help="draw the schedule"
    )
    parser.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved or zero_bubble (%(default)s)",
    )
    parser.add_argument(
        "--pp", type=int, default=4, metavar="N", help="pipeline stages (%(default)s)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=8,
        metavar="N",
        help="microbatches of a step (%(default)s)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="chunks of layers a stage; 2 for interleaved, else 1",
    )
    parser.add_argument(
        "--png", metavar="FILE", help="draw it as a picture too (needs matplotlib)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the picture of the schedule on the first rank; returns the exit code."""
    # Imported when asked for: `tparmpi --help` needs none of it.
    from tparmpi.comm.launcher import launched
    from tparmpi.parallel import picture
    from tparmpi.parallel.schedules import schedule_of
    from tparmpi.parallel.simulation import simulate

    for key in ("pp", "microbatches", "chunks"):
        value = getattr(arguments, key)
        if value is not None and value < 1:
            raise UsageError(f"--{key} must be at least 1, it is {value}")
    schedule = schedule_of(arguments.schedule)
    chunks = arguments.chunks or (2 if arguments.schedule == "interleaved" else 1)
    timeline = simulate(schedule, arguments.pp, arguments.microbatches, chunks)
    if launched().rank:
        return 0
    share = timeline.bubble / timeline.seconds
    title = (
        f"{arguments.schedule}, {arguments.pp} stages, {arguments.microbatches} "
        f"microbatches" + (f", {chunks} chunks a stage" if chunks > 1 else "")
    )
    if arguments.png:
        picture.save_png(timeline, arguments.png, title)
    if arguments.json:
        print(
            json.dumps(
                {
                    "schedule": arguments.schedule,
                    "pp": arguments.pp,
                    "microbatches": arguments.microbatches,
                    "chunks": chunks,
                    "waiting": round(share, 4),
                    "live": list(timeline.live),
                }
            )
        )
        return 0
    print(title)
    print(picture.as_text(timeline))
    print(f"waiting: {share:.0%} of the step")
    live = ", ".join(map(str, timeline.live))
    print(f"live at most, by stage: {live} microbatches of a chunk's layers")
    return 0
