"""`tparmpi bench dispatch`: what an operator costs above the NumPy calls it makes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tparmpi.comm import Group

SUMMARY = "measure what operators cost above NumPy's calls"

_SIZE = 64
_ADD = "a + b"
_RECORDED = "a + b, recorded"
_PRODUCT = "(a @ w).sum().backward()"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        f"Measures small operators on float32 matrices of {_SIZE} × {_SIZE}, split by "
        "rows over all ranks, and in turns with them the NumPy calls that they make on "
        "each rank: median microseconds, and how many ours take above those."
    )
    parser.add_argument(
        "--peers",
        metavar="COMMAND",
        help="measure another library too: a program started on each rank, such as "
        "tests/peers/dtensor.py",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective over all ranks."""
    from tparmpi.comm.runtime import library, world

    group = world()
    rows = measured(group, arguments.seconds)
    report: dict[str, Any] = {"ranks": group.size, "library": library(), "calls": rows}
    if arguments.peers:
        from tparmpi.comm.peers import ask

        report["peers"] = ask(group, arguments.peers)
    if group.rank == 0:
        if arguments.json:
            print(json.dumps(report), flush=True)
        else:
            _show(report)
    return 0


def measured(group: Group, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each call: median microseconds, NumPy's, and what is above them.

    Collective over `group`; a time is that of the slowest member.
    """
    from tparmpi.comm.measure import in_turns

    rows = []
    for call, (ours, numpys) in _works(group).items():
        found = in_turns(group.comm, {"us": ours, "numpy_us": numpys}, seconds)
        us, numpy_us = found["us"][1], found["numpy_us"][1]
        rows.append(
            {
                "call": call,
                "us": round(us, 2),
                "numpy_us": round(numpy_us, 2),
                "added_us": round(us - numpy_us, 2),
            }
        )
    return rows


def _works(
    group: Group,
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """For each call ours, and the NumPy calls that it makes on this rank's blocks."""
    import numpy as np

    from tparmpi import ops  # noqa: F401  (fills the registry)
    from tparmpi.sharding import Shard
    from tparmpi.tensors import tensor

    numbers = np.sin(np.arange(_SIZE * _SIZE, dtype="f4")).reshape(_SIZE, _SIZE)
    b = tensor(numbers, group).with_sharding(Shard(0))
    a = tensor(numbers, group).with_sharding(Shard(0))
    taped = tensor(numbers, group.autodiff()).with_sharding(Shard(0)).require_grad()
    w = tensor(numbers, group.autodiff()).require_grad()
    a_local, b_local, w_local = a.local, b.local, w.local

    def product() -> None:
        (taped @ w).sum().backward()
        taped.zero_grad()
        w.zero_grad()

    def product_by_numpy() -> None:
        y = a_local @ w_local
        y.sum()
        grad = np.broadcast_to(np.ones((), "f4"), y.shape)
        grad @ w_local.T
        a_local.T @ grad

    add = lambda: a_local + b_local  # noqa: E731
    return {
        _ADD: (lambda: a + b, add),
        _RECORDED: (lambda: taped + b, add),
        _PRODUCT: (product, product_by_numpy),
    }


def _show(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    ranks = report["ranks"]
    table = Table(title=f"{ranks} rank{'s' * (ranks > 1)}", box=SIMPLE_HEAD)
    table.add_column("call", no_wrap=True)
    for name in ("µs", "NumPy µs", "above µs"):
        table.add_column(name, justify="right")
    for row in report["calls"]:
        figures = (row["us"], row["numpy_us"], row["added_us"])
        table.add_row(row["call"], *(f"{us:.2f}" for us in figures))
    console = Console()
    console.print(table)
    if "peers" in report:
        peer = report["peers"]
        for row, us in zip(report["calls"], peer["us"], strict=True):
            console.print(f"{peer['name']}: {row['call']} {us:.1f} µs")
