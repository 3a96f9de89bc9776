"""Loading a run's newest checkpoint, or saying how to go on from an older one."""

from __future__ import annotations

from pathlib import Path

from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint
from tparmpi.nn import Module
from tparmpi.optim import Optimizer


def load_newest(
    folder: Path, model: Module, optimizer: Optimizer | None = None, *, aim: str
) -> checkpoint.LoadReport | None:
    """Load the newest checkpoint in `folder`; None if there is none.

    A damaged one is never passed over in silence: who started the run would not know
    that steps were lost. Collective over all ranks.

    Parameters
    ----------
    aim
        What is to be done from the checkpoint, for the message: ``"resume"``.

    Raises
    ------
    CheckpointError
        It cannot be loaded; the message says what to do to go on from the newest one
        before it that can.
    """
    found = checkpoint.checkpoints(folder)
    if not found:
        return None
    *older, newest = found
    try:
        return checkpoint.load(newest, model, optimizer)
    except CheckpointError as error:
        damaged = [newest]
        for path in reversed(older):
            try:
                whole = checkpoint.load(path, model, optimizer)
            except CheckpointError:
                damaged.append(path)
                continue
            names = " and ".join(map(str, damaged))
            raise CheckpointError(
                f"{error}; the newest whole checkpoint before it is {path}: remove or "
                f"move away {names} to {aim} from step {whole.step}"
            ) from error
        raise CheckpointError(
            f"{error}; there is no whole checkpoint before it: bring {newest} back "
            "from a copy, or begin another run with --run"
        ) from error
