"""`tparmpi bench compare`: steps of training beside PyTorch's, and beside our own."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tparmpi.cli.bench import jobs
from tparmpi.errors import TparmpiError, UsageError

SUMMARY = "measure steps of training beside PyTorch's, in turns"

_PROGRAM = "gpt.py"
_PIPELINE = ("--pp=2", "--batch=16", "--microbatches=8")

# What each job is started with: ranks, and arguments of `bench train`.
_OURS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "tp=2": (2, ("--tp=2",)),
    "one rank": (1, ()),
    "dp=2": (2, ("--dp=2",)),
    "pp=2": (2, _PIPELINE),
    "forward, tp=2": (2, ("--tp=2", "--forward")),
    "memory, tp=2": (2, ("--tp=2", "--memory")),
}
_PEERS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "peer, tp=2": (2, ()),
    "peer, one rank": (1, ()),
    "peer, forward, tp=2": (2, ("--forward",)),
}

Reports = Mapping[str, Mapping[str, Any]]
"""What the jobs of one round said, by name; nothing of those that failed."""


@dataclass(frozen=True)
class Row:
    """A ratio, of which more is better.

    Attributes
    ----------
    part
        What `--only` chooses it by.
    what
        What it is.
    needs
        The jobs that it is computed from.
    value
        How.
    bars
        By configuration, what it should be at least, and the goal.
    """

    part: str
    what: str
    needs: tuple[str, ...]
    value: Callable[[Reports], float]
    bars: Mapping[str, tuple[float, float]]


_SPREAD = ("least", "median", "most")
"""What is said of the rounds' ratios."""


def _faster(ours: str, theirs: str) -> Callable[[Reports], float]:
    return lambda said: said[theirs]["s_per_step"] / said[ours]["s_per_step"]


def _smaller(ours: str, theirs: str) -> Callable[[Reports], float]:
    return lambda said: (
        max(said[theirs]["peak_rss_bytes"]) / max(said[ours]["peak_rss_bytes"])
    )


def _given(job: str, key: str) -> Callable[[Reports], float]:
    return lambda said: float(said[job][key])


def _beside(
    part: str,
    what: str,
    ours: str,
    theirs: str,
    bars: Mapping[str, tuple[float, float]],
    how: Callable[[str, str], Callable[[Reports], float]] = _faster,
) -> Row:
    return Row(part, what, (ours, theirs), how(ours, theirs), bars)


def _both(bar: float, goal: float | None = None) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(("small", "medium"), (bar, goal or bar))


ROWS: Sequence[Row] = (
    _beside(
        "tensor",
        "tokens/s of tp=2 over the peer's",
        "tp=2",
        "peer, tp=2",
        {"small": (1.2, 1.4), "medium": (1.2, 1.35)},
    ),
    Row(
        "tensor",
        "time of the products over that of a step, tp=2",
        ("tp=2",),
        _given("tp=2", "gemm_fraction"),
        {"small": (0.60, 0.70), "medium": (0.75, 0.85)},
    ),
    _beside(
        "tensor",
        "peak memory of the peer over ours, tp=2",
        "tp=2",
        "peer, tp=2",
        _both(1.0),
        _smaller,
    ),
    _beside(
        "one",
        "tokens/s of one rank over the peer's",
        "one rank",
        "peer, one rank",
        _both(1.0, 1.1),
    ),
    _beside(
        "one",
        "peak memory of the peer over ours, one rank",
        "one rank",
        "peer, one rank",
        _both(1.0),
        _smaller,
    ),
    _beside(
        "forward",
        "forwards of tp=2 over the peer's",
        "forward, tp=2",
        "peer, forward, tp=2",
        _both(1.3),
    ),
    _beside(
        "scaling",
        "tokens/s of tp=2 over one rank",
        "tp=2",
        "one rank",
        {"small": (1.6, 1.6), "medium": (1.9, 1.9)},
    ),
    _beside(
        "scaling",
        "tokens/s of dp=2 over one rank",
        "dp=2",
        "one rank",
        _both(1.9),
    ),
    Row(
        "pipeline",
        "the simulated schedule's time over that of pp=2",
        ("pp=2",),
        _given("pp=2", "pipeline_ratio"),
        _both(0.95),
    ),
    Row(
        "memory",
        "1.15 times the formula over memory of arrays, tp=2",
        ("memory, tp=2",),
        lambda said: 1.15 / said["memory, tp=2"]["ratio"],
        _both(1.0),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Runs `tparmpi bench train` in several layouts on two ranks of this machine, "
        "and PyTorch's training of the same model, one after the other in rounds, and "
        "prints ratios. Start it alone: it starts mpirun itself."
    )
    parser.add_argument(
        "--peers", metavar="DIR", help=f"folder with {_PROGRAM}, such as tests/peers"
    )
    parser.add_argument(
        "--python", metavar="EXE", help="a Python that has torch, for the peers"
    )
    parser.add_argument(
        "--config",
        default="small",
        metavar="NAME",
        help="small or medium (%(default)s)",
    )
    parser.add_argument(
        "--only",
        metavar="NAME,…",
        help=f"of {', '.join(_parts())}; all if not given, without peers those that "
        "need none",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="rounds (%(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="steps of each job that count, after two (%(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=600.0,
        metavar="S",
        help="time after which a job counts as hanging (%(default)s)",
    )
    parser.add_argument("--mpirun", metavar="EXE", help="the launcher")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Local: one process, which starts jobs."""
    from tparmpi.comm.launcher import launched
    from tparmpi.train.measure import SIZES

    if launched().size > 1:
        raise UsageError("bench: compare starts its own ranks; start it without mpirun")
    if arguments.config not in SIZES:
        raise UsageError(
            f"bench: there is no configuration {arguments.config!r}; there are "
            f"{', '.join(SIZES)}"
        )
    if arguments.rounds < 1 or arguments.steps < 1:
        raise UsageError("bench: --rounds and --steps must be at least 1")
    rows = _chosen(arguments)
    names = dict.fromkeys(name for row in rows for name in row.needs)
    start = _starter(arguments)
    rounds: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        # Every other round the other way around, so that nobody is always the first.
        order = list(names)[:: 1 if number % 2 == 0 else -1]
        rounds.append({})
        for name in order:
            try:
                rounds[-1][name] = start(name)
            except jobs.JobError as error:
                failures.append({"round": number + 1, "job": name, "why": str(error)})
                _tell(failures[-1])
    report = {
        "config": arguments.config,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "rows": [_entry(row, rounds, arguments.config) for row in rows],
        "jobs": {name: [said.get(name) for said in rounds] for name in names},
        "failures": failures,
    }
    if arguments.json:
        print(json.dumps(report), flush=True)
    else:
        _show(report)
    missing = [row["what"] for row in report["rows"] if not row["rounds"]]
    if missing:
        raise TparmpiError(f"bench: no round gave {'; '.join(missing)}")
    return 0


def _tell(failure: Mapping[str, Any]) -> None:
    """Say at once what failed: rounds take minutes."""
    print(
        f"round {failure['round']}: the job '{failure['job']}' failed and is left out: "
        f"{failure['why']}",
        file=sys.stderr,
        flush=True,
    )


def _parts() -> list[str]:
    return list(dict.fromkeys(row.part for row in ROWS))


def _chosen(arguments: argparse.Namespace) -> list[Row]:
    """The rows that are asked for."""
    has_peers = bool(arguments.peers and arguments.python)
    wanted = arguments.only.split(",") if arguments.only else None
    for part in wanted or ():
        if part not in _parts():
            raise UsageError(
                f"bench: there is no part {part!r}; there are {', '.join(_parts())}"
            )
    rows = [row for row in ROWS if wanted is None or row.part in wanted]
    if has_peers:
        return rows
    alone = [row for row in rows if not set(row.needs) & set(_PEERS)]
    if wanted is not None and len(alone) < len(rows):
        raise UsageError(
            f"bench: {arguments.only} is measured beside a peer; name the folder of "
            "its program with --peers and a Python that has torch with --python"
        )
    return alone


def _starter(arguments: argparse.Namespace) -> Callable[[str], Any]:
    """What runs a job, given its name."""
    from tparmpi.train.measure import SIZES

    mpirun = jobs.launcher(arguments.mpirun)
    steps, limit = f"--steps={arguments.steps}", arguments.limit
    size = SIZES[arguments.config]
    sizes = {
        key: getattr(size.model, key)
        for key in ("n_layer", "d_model", "n_head", "seq_len", "vocab_size")
    }
    model = [
        f"--{key}={value}" for key, value in {**sizes, "batch": size.batch}.items()
    ]

    def start(name: str) -> Any:
        if name in _OURS:
            ranks, more = _OURS[name]
            command = ["bench", "train", f"--config={arguments.config}", steps, *more]
            return jobs.ours(mpirun, ranks, command, limit)
        ranks, more = _PEERS[name]
        program = Path(arguments.peers, _PROGRAM).resolve()
        return jobs.peer(
            arguments.python, program, ranks, [*model, steps, *more], limit
        )

    return start


def _entry(row: Row, rounds: Sequence[Reports], config: str) -> dict[str, Any]:
    whole = [said for said in rounds if said.keys() >= set(row.needs)]
    values = sorted(row.value(said) for said in whole)
    found = (values[0], statistics.median(values), values[-1]) if values else ()
    bar, goal = row.bars.get(config, (None, None))
    return {
        "part": row.part,
        "what": row.what,
        "rounds": len(values),
        **dict.fromkeys(_SPREAD),
        **{name: round(n, 4) for name, n in zip(_SPREAD, found, strict=False)},
        "bar": bar,
        "goal": goal,
    }


def _show(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{report['config']}, {report['rounds']} rounds of {report['steps']} steps; "
        "more is better"
    )
    names = (*_SPREAD, "bar", "goal")
    table = Table("what", title=title, box=SIMPLE_HEAD)
    for name in ("rounds", *names):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        figures = ("-" if row[name] is None else f"{row[name]:.2f}" for name in names)
        table.add_row(row["what"], str(row["rounds"]), *figures)
    console = Console()
    console.print(table)
    table = Table("job", box=SIMPLE_HEAD)
    for name in ("s/step", "tokens/s", "MB"):
        table.add_column(name, justify="right")
    for name, reports in report["jobs"].items():
        timed = [said for said in reports if said and "s_per_step" in said]
        if timed:
            best = min(timed, key=lambda said: said["s_per_step"])
            table.add_row(
                name,
                f"{best['s_per_step']:.3f}",
                f"{best['tokens_per_s']:,.0f}",
                f"{max(best['peak_rss_bytes']) / 1e6:,.0f}",
            )
    console.print(table)
