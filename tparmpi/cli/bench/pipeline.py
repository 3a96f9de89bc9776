"""`tparmpi bench pipeline`: steps, signals and memory of pipelines beside theory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

SUMMARY = "measure pipelines beside the time that theory gives"

_SIGNAL_BYTES = 4 * 2**20
_CHUNKS = 2
_FEW, _MANY = 8, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Measures a step of each schedule on 2 to all ranks as stages, whose layers "
        "sleep 20 ms in a forward and 40 ms in a backward, beside the time of theory, "
        "and on 2 with layers that compute for so long; signals of 4 MiB beside MPI's "
        "own blocking sends of the same array; and the peak memory of 1f1b's first "
        "stage for 8 and 32 microbatches. Start it with mpirun -n 4 tparmpi bench "
        "pipeline."
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=8,
        metavar="N",
        help="of a step, at least as many as ranks (%(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="steps of which the fastest counts (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    from tparmpi.comm.runtime import library, world
    from tparmpi.errors import UsageError

    everyone = world()
    if everyone.size == 1:
        raise UsageError("bench: a pipeline needs two ranks; start it with mpirun -n 2")
    if arguments.microbatches < everyone.size or arguments.steps < 1:
        raise UsageError(
            "bench: --microbatches must be at least the number of ranks, --steps at "
            "least 1"
        )
    import time

    from tparmpi.comm.measure import compute
    from tparmpi.parallel import measure

    report: dict[str, Any] = {
        "ranks": everyone.size,
        "library": library(),
        "microbatches": arguments.microbatches,
        "steps": _steps(everyone.size, arguments, time.sleep),
        "busy_steps": _steps(2, arguments, compute),
        "signal": _signal(arguments.seconds),
        "peak_bytes": {
            str(number): measure.peak_bytes(everyone, "1f1b", number)
            for number in (_FEW, _MANY)
        },
    }
    if everyone.rank == 0:
        if arguments.json:
            print(json.dumps(report), flush=True)
        else:
            _show(report)
    return 0


def _signal(seconds: float) -> dict[str, float]:
    from tparmpi.comm.group import group
    from tparmpi.comm.runtime import devices, world
    from tparmpi.parallel import measure

    pair = group(devices()[:2])
    found = {}
    if pair.is_member:
        found = measure.signal_rate(pair, _SIGNAL_BYTES, seconds)
    # Those who wait leave the cores to the others.
    world().barrier()
    pair.close()
    return found


def _steps(
    most: int, arguments: argparse.Namespace, spend: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Times of all schedules on 2 to `most` stages whose layers `spend` theirs."""
    from tparmpi.comm.group import group
    from tparmpi.comm.runtime import devices, world
    from tparmpi.parallel import measure
    from tparmpi.parallel.schedules import SCHEDULES

    rows = []
    microbatches = arguments.microbatches
    for stages in range(2, most + 1):
        places = group(devices()[:stages])
        for schedule in SCHEDULES:
            chunks = _CHUNKS if schedule == "interleaved" else 1
            # Theory is for groups of microbatches that are all whole.
            count = microbatches // stages * stages if chunks > 1 else microbatches
            if places.is_member:
                took = measure.step_seconds(
                    places,
                    schedule,
                    count,
                    chunks,
                    steps=arguments.steps,
                    spend=spend,
                )
                wanted = measure.theory(schedule, stages, count, chunks)
                rows.append(
                    {
                        "schedule": schedule,
                        "stages": stages,
                        "microbatches": count,
                        "chunks": chunks,
                        "ms": round(took * 1e3, 2),
                        "theory_ms": round(wanted * 1e3, 2),
                        "ratio": round(took / wanted, 4),
                    }
                )
            # Those who wait leave the cores to the others.
            world().barrier()
        places.close()
    return rows


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    titles = {"steps": "layers that sleep", "busy_steps": "layers that compute"}
    for name, title in titles.items():
        console.print(_table(f"{report['ranks']} ranks, {title}", report[name]))
    signal = report["signal"]
    console.print(
        f"signals of {signal['bytes']} bytes: {signal['gbytes_per_s']:.2f} GB/s, MPI's "
        f"sends {signal['raw_gbytes_per_s']:.2f} GB/s: {signal['ratio']:.2f} of them"
    )
    peaks = ", ".join(
        f"{peak / 1e6:.2f} MB for {number}"
        for number, peak in report["peak_bytes"].items()
    )
    console.print(f"1f1b's first stage holds at most, by microbatches: {peaks}")


def _table(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("schedule", no_wrap=True)
    for name in ("stages", "microbatches", "chunks", "ms", "theory ms", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row["ms"], row["theory_ms"])
        table.add_row(
            row["schedule"],
            *(str(row[name]) for name in ("stages", "microbatches", "chunks")),
            *(f"{ms:.1f}" for ms in figures),
            f"{row['ratio']:.3f}",
        )
    return table
