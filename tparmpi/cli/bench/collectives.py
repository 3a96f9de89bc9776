"""`tparmpi bench collectives`: measure each collective beside MPI's own call."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tparmpi.comm.measure import Row

SUMMARY = "measure collectives beside MPI's own"

_SIZES = "8,4K,64K,1M,4M,32M,64M"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SMALL_BYTES = 8
_OVERLAP_BYTES = 64 * 2**20
_OVERLAP_SECONDS = 0.3
_OVERLAP_TIMES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Measures each collective at several sizes, and MPI's own call of the same "
        "effect in turns with it; what non-blocking calls, call checking and the "
        "ledger cost and gain. Start it as the job would be: mpirun -n 2 tparmpi "
        "bench collectives."
    )
    parser.add_argument(
        "--sizes",
        default=_SIZES,
        metavar="BYTES,…",
        help="bytes of a member's array; K, M and G are powers of 1024 (%(default)s)",
    )
    parser.add_argument(
        "--calls", metavar="NAME,…", help="only these calls; all if not given"
    )
    parser.add_argument(
        "--only-calls",
        action="store_true",
        help="leave out overlap, call checking and ledger",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="find the fastest way of sums for groups of 2 to all ranks, and write the "
        "table that later runs read (see TPARMPI_TUNING)",
    )
    parser.add_argument(
        "--largest",
        default="256M",
        metavar="BYTES",
        help="largest array that --tune measures (%(default)s)",
    )
    parser.add_argument(
        "--peers",
        metavar="COMMAND",
        help="measure all_reduce of another library too: a program started on each "
        "rank, such as tests/peers/gloo.py",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    from tparmpi.errors import UsageError

    sizes = [_bytes(size) for size in arguments.sizes.split(",")]
    largest = _bytes(arguments.largest)

    from tparmpi.comm import measure
    from tparmpi.comm.runtime import library, world

    group = world()
    if group.size == 1:
        raise UsageError(
            "bench: one rank has nobody to send to; start it with mpirun -n 2"
        )
    calls = arguments.calls.split(",") if arguments.calls else measure.CALLS
    for call in calls:
        if call not in measure.CALLS:
            choices = ", ".join(measure.CALLS)
            raise UsageError(f"bench: there is no call {call!r}; there are {choices}")
    report: dict[str, Any] = {
        "ranks": group.size,
        "nodes": len({device.host for device in group.devices}),
        "library": library(),
    }
    if arguments.tune:
        report |= _tune(largest, arguments.seconds)
    else:
        found = list(measure.rows(group, calls, sizes, arguments.seconds))
        report["calls"] = [_entry(row) for row in found]
        if not arguments.only_calls:
            report["ledger"] = measure.ledger_cost(group, arguments.seconds)
            report["overlap"] = measure.overlap(
                group, _OVERLAP_BYTES, _OVERLAP_SECONDS, _OVERLAP_TIMES
            )
            report["check"] = measure.check_cost(group, arguments.seconds)
        if arguments.peers:
            from tparmpi.comm.peers import measured

            report["peers"] = measured(group, arguments.peers, sizes)
    if group.rank == 0:
        if arguments.json:
            print(json.dumps(report), flush=True)
        else:
            _show(report)
    return 0


def _bytes(text: str) -> int:
    from tparmpi.errors import UsageError

    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    if match is None or not int(match[1]):
        raise UsageError(
            f"bench: {text!r} is no number of bytes; write such as 8, 64K or 32M"
        )
    return int(match[1]) * _UNITS[match[2]]


def _tune(largest: int, seconds: float) -> dict[str, Any]:
    """Measure groups of each size, and write the table. Collective over all ranks."""
    from dataclasses import asdict

    from tparmpi.comm import agree, measure, tuning
    from tparmpi.comm.group import group as make
    from tparmpi.comm.runtime import devices, library, world

    ways = []
    for members in range(2, world().size + 1):
        group = make(devices()[:members])
        if group.is_member:
            ways.append(measure.tune(group, largest, seconds))
        group.close()
        # Those who measure have the cores to themselves.
        world().barrier()
    error: Exception | None = None
    file = None
    if world().rank == 0:
        try:
            file = str(tuning.write(library(), ways))
        except Exception as caught:
            error = caught
    agree(error)
    return {"table": file, "ways": [asdict(way) for way in ways]}


def _entry(row: Row) -> dict[str, Any]:
    return {
        "call": row.call,
        "bytes": row.bytes,
        "transport": row.transport,
        "us": round(row.us, 2),
        "raw_us": round(row.raw_us, 2),
        "median_us": round(row.median_us, 2),
        "raw_median_us": round(row.raw_median_us, 2),
        "ratio": round(row.ratio, 3),
        "added_us": round(row.us - row.raw_us, 2),
        "gbytes_per_s": round(row.gbytes_per_s, 3),
    }


def _show(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{report['ranks']} ranks on {report['nodes']} nodes, {report['library']}"
    if "ways" in report:
        table = Table("members", "nodes", "whole up to", "pieces of", title=title)
        for way in report["ways"]:
            table.add_row(*map(str, way.values()))
        console.print(table)
        console.print(f"written to {report['table']}")
        return
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("call", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("transport", no_wrap=True)
    for name in ("µs", "MPI µs", "ratio", "added µs", "GB/s"):
        table.add_column(name, justify="right")
    for row in report["calls"]:
        table.add_row(
            row["call"],
            str(row["bytes"]),
            row["transport"],
            f"{row['us']:.1f}",
            f"{row['raw_us']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['added_us']:.1f}",
            f"{row['gbytes_per_s']:.2f}",
        )
    console.print(table)
    for name in ("ledger", "overlap", "check"):
        if name in report:
            values = ", ".join(f"{k} {v:.3f}" for k, v in report[name].items())
            console.print(f"{name}: {values}")
    for peer in report.get("peers", {}).get("calls", ()):
        console.print(
            f"{report['peers']['name']}: all_reduce of {peer['bytes']} bytes "
            f"{peer['peer_us']:.1f} µs, ours {peer['us']:.1f} µs: "
            f"{peer['ratio']:.1f} times as fast"
        )
