"""Saving and loading models: plain HDF5, any layout to any other, whole or not at all.

Rank 0 alone looks at the folder; every decision is told to all ranks, and every error
of one rank is raised on all. ``docs/checkpoint-format.md`` describes the files.
"""

from __future__ import annotations

from pathlib import Path

from tparmpi.io import publish
from tparmpi.io.agreement import on_rank_zero
from tparmpi.io.background import BackgroundSaver
from tparmpi.io.copies import convert, export
from tparmpi.io.inspection import (
    Difference,
    Summary,
    TensorSummary,
    ValueDifference,
    diff,
    inspect,
    verify,
)
from tparmpi.io.loading import load
from tparmpi.io.mapping import WeightMapping, read_mapping
from tparmpi.io.pruning import best, prune
from tparmpi.io.report import LoadReport
from tparmpi.io.saving import save
from tparmpi.io.state import HasState, HasSteps
from tparmpi.io.transforms import Drop, Interleave, Merge, Split, Transpose, Unflatten

__all__ = [
    "BackgroundSaver",
    "Difference",
    "Drop",
    "HasState",
    "HasSteps",
    "Interleave",
    "LoadReport",
    "Merge",
    "Split",
    "Summary",
    "TensorSummary",
    "Transpose",
    "Unflatten",
    "ValueDifference",
    "WeightMapping",
    "best",
    "checkpoints",
    "convert",
    "diff",
    "export",
    "inspect",
    "latest",
    "load",
    "prune",
    "read_mapping",
    "save",
    "step_path",
    "verify",
]


def latest(folder: str | Path) -> Path | None:
    """The published checkpoint of the highest step in a folder, None if there is none.

    Collective over all ranks: rank 0 looks, the others are told.
    """
    found = checkpoints(folder)
    return found[-1] if found else None


def checkpoints(folder: str | Path) -> list[Path]:
    """All published checkpoints in a folder, by rising step. Collective over all ranks.

    One that an interrupted save of the same step has moved aside is among them.
    """
    found = on_rank_zero(
        f"list the checkpoints in {folder}", lambda: publish.published(Path(folder))
    )
    return [path for _, path in found]


def step_path(folder: str | Path, step: int) -> Path:
    """Where a step's checkpoint lies in a folder: ``folder/step-00001000``. Local.

    Raises
    ------
    CheckpointError
        The step is negative or no integer.
    """
    return Path(folder) / publish.step_name(step)
