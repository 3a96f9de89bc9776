"""`tparmpi bench checkpoint`: saves and loads beside plain files of the same bytes."""

from __future__ import annotations

import argparse
import json
from typing import Any

SUMMARY = "measure saves and loads beside plain files of the same bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Measures, in turns in one folder, synced saves beside synced writes of the "
        "same bytes by the same ranks; loads beside plain reads, with the page cache "
        "warm; what checksums cost; what a load reads for tensors that are split by "
        "columns; and how long a background save keeps the program. Start it as the "
        "job would be: mpirun -n 2 tparmpi bench checkpoint."
    )
    parser.add_argument(
        "--folder",
        default=".",
        metavar="DIR",
        help="where to write, in a folder that is removed at the end (%(default)s)",
    )
    parser.add_argument(
        "--mib",
        type=int,
        default=1024,
        metavar="N",
        help="MiB of all ranks together (%(default)s); the disk needs room for three "
        "times as many, and each rank's memory for three times its part",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="of each, of which the fastest counts (%(default)s)",
    )
    parser.add_argument(
        "--peers",
        metavar="COMMAND",
        help="measure another library too: a program started on each rank, such as "
        "tests/peers/dcp.py",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    from tparmpi.comm.runtime import library, world
    from tparmpi.errors import UsageError

    if arguments.mib < 1 or arguments.rounds < 1:
        raise UsageError("bench: --mib and --rounds must be at least 1")
    from tparmpi.io import checksums, measure

    everyone = world()
    nbytes = arguments.mib << 20
    report: dict[str, Any] = {
        "ranks": everyone.size,
        "library": library(),
        "bytes": nbytes,
        "checksums": checksums.MADE_BY,
    }
    with measure.scratch(arguments.folder, 3 * nbytes) as folder:
        state = measure.State(everyone, nbytes)
        report["save"] = measure.saves(folder, state, arguments.rounds)
        report["load"] = measure.loads(folder, state, arguments.rounds)
        split = measure.State(everyone, nbytes, dim=1)
        report["columns"] = measure.columns(folder, split, arguments.rounds)
        del split
        report["pause"] = measure.pauses(folder, state, arguments.rounds)
        if arguments.peers:
            report["peers"] = measure.beside(
                folder, state, arguments.peers, arguments.rounds
            )
    if everyone.rank == 0:
        if arguments.json:
            print(json.dumps(report), flush=True)
        else:
            _show(report)
    return 0


def _show(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    ranks = report["ranks"]
    title = f"{report['bytes'] >> 20} MiB over {ranks} rank{'s' * (ranks > 1)}"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("s", "GB/s", "beside", "s", "times as fast"):
        table.add_column(name, justify="right")
    sides = {"save": "write and sync", "load": "read"}
    rows = [(name, sides[name], report[name]) for name in sides]
    for name, side, row in rows:
        figures = (row["s"], row["gbytes_per_s"])
        table.add_row(
            name,
            *(f"{number:.3f}" for number in figures),
            side,
            f"{row['plain_s']:.3f}",
            f"{row['ratio']:.2f}",
        )
    peer = report.get("peers", {})
    for name in sides if peer else ():
        row = peer[name]
        rate = report["bytes"] / row["s"] / 1e9
        table.add_row(
            name,
            f"{row['s']:.3f}",
            f"{rate:.3f}",
            peer["name"],
            f"{row['peer_s']:.3f}",
            f"{row['ratio']:.2f}",
        )
    console.print(table)
    pause = report["pause"]
    console.print(
        f"a background save keeps the program {pause['s']:.3f} s, {pause['ratio']:.2f} "
        f"times as long as a copy in memory ({pause['copy_s']:.3f} s)"
    )
    split = report["columns"]
    console.print(
        f"split by columns: {split['s']:.3f} s, {split['gbytes_per_s']:.3f} GB/s, "
        f"{split['amplification']:.2f} bytes read for each needed"
    )
    console.print(
        f"checksums ({report['checksums']}) add "
        f"{report['load']['verification']:.0%} to the reads of a load"
    )
