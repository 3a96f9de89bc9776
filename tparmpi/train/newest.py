"""Loading a run's newest checkpoint, or the newest before it that is whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tparmpi.errors import CheckpointError, DamagedCheckpointError, reason
from tparmpi.io import checkpoint, publish
from tparmpi.nn import Module
from tparmpi.optim import Optimizer
from tparmpi.train.ranks import from_rank_zero


@dataclass
class Newest:
    """What was loaded, and which newer checkpoints could not be.

    Attributes
    ----------
    report : LoadReport or None
        None if there is no checkpoint.
    damaged : list of Path
        Newer ones than that which was loaded, newest first.
    notes : list of str
        A sentence for each of them, to be shown to who started the program.
    """

    report: checkpoint.LoadReport | None = None
    damaged: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load_newest(
    folder: Path, model: Module, optimizer: Optimizer | None = None
) -> Newest:
    """Load the newest checkpoint in `folder` that is whole. Collective over all ranks.

    Nothing is done to damaged ones.

    Raises
    ------
    DamagedCheckpointError
        There are checkpoints, but none is whole.
    CheckpointError
        One is whole as far as can be seen but cannot be loaded.
    """
    newest = Newest()
    problems: list[str] = []
    for path in reversed(from_rank_zero(lambda: _candidates(folder))):
        try:
            newest.report = checkpoint.load(path, model, optimizer)
        except DamagedCheckpointError as error:
            newest.damaged.append(path)
            problems.append(str(error))
        else:
            step = newest.report.step
            newest.notes = [
                f"{path} is damaged and left as it is ({problem}); going on from "
                f"step {step}"
                for path, problem in zip(newest.damaged, problems, strict=True)
            ]
            return newest
    if problems:
        raise DamagedCheckpointError(
            f"{problems[0]}; there is no whole checkpoint before it: bring "
            f"{newest.damaged[0]} back from a copy, or begin another run with --run"
        )
    return newest


def _candidates(folder: Path) -> list[Path]:
    """By rising step; one that has lost its index is not passed over in silence."""
    try:
        found = [*publish.published(folder), *publish.headless(folder)]
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {reason(error)}") from error
    return [path for _, path in sorted(found)]
