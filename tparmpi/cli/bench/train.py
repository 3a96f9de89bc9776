"""`tparmpi bench train`: steps of training beside the rate of matrix products."""

from __future__ import annotations

import argparse
import json
from typing import Any

SUMMARY = "measure steps of training beside the rate of matrix products"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Measures steps of training of a GPT in float32 with AdamW, after two that do "
        "not count, and in the same process the rate of matrix products of the "
        "same shapes. Start it as the job would be: mpirun -n 2 tparmpi bench train."
    )
    parser.add_argument(
        "--config",
        default="small",
        metavar="NAME",
        help="small (d 384, 6 layers, 256 positions, batch 8, vocabulary 4,096), "
        "medium (d 1024, 4 layers, 512 positions, batch 4, vocabulary 16,384) or tiny; "
        "%(default)s",
    )
    for axis, what in (
        ("tp", "ranks that layers are split over"),
        ("dp", "ranks that the batch is split over"),
    ):
        parser.add_argument(f"--{axis}", type=int, metavar="N", help=what)
    parser.add_argument(
        "--pp", type=int, default=1, metavar="N", help="pipeline stages (%(default)s)"
    )
    parser.add_argument(
        "--sequence",
        action="store_true",
        help="the tp ranks split norms and residuals too, by tokens",
    )
    parser.add_argument(
        "--batch", type=int, metavar="ROWS", help="of a step; the configuration's"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="of a step; 8 with stages, else 1",
    )
    parser.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="of stages: gpipe, 1f1b or zero_bubble (%(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="steps that count (%(default)s)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--forward", action="store_true", help="forwards alone, with no tape"
    )
    instead.add_argument(
        "--memory",
        action="store_true",
        help="the memory of arrays, not the time, beside the least there can be",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    from tparmpi.comm.runtime import library, world
    from tparmpi.errors import UsageError
    from tparmpi.train import measure
    from tparmpi.train.layout import choose_layout

    size = measure.SIZES.get(arguments.config)
    if size is None:
        raise UsageError(
            f"bench: there is no configuration {arguments.config!r}; there are "
            f"{', '.join(measure.SIZES)}"
        )
    numbers = {
        key: getattr(arguments, key)
        for key in ("tp", "dp", "pp", "batch", "microbatches", "steps")
    }
    for key, number in numbers.items():
        if number is not None and number < 1:
            raise UsageError(f"bench: --{key} must be at least 1, not {number}")
    layout = choose_layout(
        world().size,
        size.model.n_head,
        tp=arguments.tp,
        dp=arguments.dp,
        pp=arguments.pp,
    )
    job = measure.Job(
        size.model,
        arguments.batch or size.batch,
        layout,
        arguments.microbatches or (8 if layout.pp > 1 else 1),
        arguments.schedule,
        arguments.sequence,
    )
    if job.batch < layout.dp * job.microbatches:
        raise UsageError(
            f"bench: a batch of {job.batch} has no row for each of {layout.dp} times "
            f"{job.microbatches} microbatches; give a larger --batch"
        )
    report: dict[str, Any] = {
        "config": arguments.config,
        "ranks": world().size,
        "library": library(),
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "sequence": job.sequence,
        "batch": job.batch,
        "microbatches": job.microbatches,
        "steps": arguments.steps,
        "threads": _threads(),
    }
    if arguments.memory:
        report |= measure.memory(job, arguments.steps)
    else:
        report |= measure.measure(job, arguments.steps, forward=arguments.forward)
    if world().rank == 0:
        if arguments.json:
            print(json.dumps(report), flush=True)
        else:
            _show(report)
    return 0


def _threads() -> int:
    """The threads that BLAS has."""
    from threadpoolctl import threadpool_info

    counts = [pool["num_threads"] for pool in threadpool_info()]
    return max(counts, default=1)


def _show(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    layout = " ".join(f"{axis}={report[axis]}" for axis in ("pp", "dp", "tp"))
    table = Table(
        "what",
        title=f"{report['config']}, {layout}, batch {report['batch']}",
        box=SIMPLE_HEAD,
    )
    table.add_column("", justify="right")
    for key, value in report.items():
        table.add_row(key, _text(value))
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:,.4g}" if isinstance(value, float) else f"{value}"
