"""Pictures of a simulated schedule, as text and as a PNG file."""

from __future__ import annotations

import os
from typing import Any

from tparmpi.errors import UsageError
from tparmpi.parallel.schedules import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Instruction,
)
from tparmpi.parallel.simulation import Timeline

LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "B", WEIGHT_GRADIENT: "W"}
COLOURS = {
    FORWARD: "tab:blue",
    BACKWARD: "tab:green",
    INPUT_GRADIENT: "tab:green",
    WEIGHT_GRADIENT: "tab:orange",
}


def as_text(timeline: Timeline) -> str:
    """Return one line for each stage, a column for each unit of time.

    All times must be whole numbers, as `SECONDS` are.

    ``F3`` is the forward of microbatch 3, ``B`` a backward or input gradient, ``W`` a
    weight gradient, ``F3.1`` that of chunk 1; ``=`` goes on, ``.`` waits.
    """
    chunks = 1 + max(
        (event.work.chunk for events in timeline.events for event in events), default=0
    )
    labels = [
        [(_label(event.work, chunks), event) for event in events]
        for events in timeline.events
    ]
    width = max((len(label) for row in labels for label, _ in row), default=1)
    columns = round(timeline.seconds)
    lines = []
    for stage, row in enumerate(labels):
        cells = ["."] * columns
        for label, event in row:
            first, end = round(event.begin), round(event.end)
            cells[first:end] = [label, *["=" * width] * (end - first - 1)][
                : end - first
            ]
        text = " ".join(cell.ljust(width) for cell in cells)
        lines.append(f"stage {stage}  {text}".rstrip())
    return "\n".join(lines)


def save_png(timeline: Timeline, path: str | os.PathLike[str], title: str) -> None:
    """Write the picture to `path` as PNG. Local.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "a PNG picture needs matplotlib: pip install 'tparmpi[plot]'"
        ) from None
    stages = len(timeline.events)
    figure = Figure(figsize=(12, 1 + 0.6 * stages), layout="constrained")
    axes: Any = figure.subplots()
    for stage, events in enumerate(timeline.events):
        for work, begin, end in events:
            axes.barh(
                stage,
                end - begin,
                left=begin,
                color=COLOURS[work.kind],
                alpha=1 / (1 + work.chunk / 2),
                edgecolor="white",
            )
            axes.text(
                (begin + end) / 2, stage, work.microbatch, ha="center", va="center"
            )
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.invert_yaxis()
    axes.set_xlabel("time")
    axes.set_title(title)
    figure.savefig(path, format="png", dpi=150)


def _label(work: Instruction, chunks: int) -> str:
    chunk = f".{work.chunk}" if chunks > 1 else ""
    return f"{LETTERS[work.kind]}{work.microbatch}{chunk}"
