"""What a checkpoint is made of and loaded into: named tensors. Local."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.sharding import Partial
from tparmpi.tensors import Tensor


class HasState(Protocol):
    """A model: named tensors, the same names in the same order on every rank."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the tensors by name."""


class HasSteps(HasState, Protocol):
    """An optimizer: named tensors and a count of steps."""

    steps: int


def state_of(model: HasState, optimizer: HasState | None) -> dict[str, Tensor]:
    """All tensors of a model and its optimizer by their paths in a checkpoint.

    Raises
    ------
    CheckpointError
        One cannot be stored: it is no tensor, a pending sum, or its name is no path.
    """
    named = fmt.dataset_names(fmt.MODEL, model.state_dict())
    if optimizer is not None:
        named |= fmt.dataset_names(fmt.OPTIMIZER, optimizer.state_dict())
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"'{name}' is a {type(tensor).__name__}; a checkpoint holds tensors"
            )
        if any(isinstance(placement, Partial) for placement in tensor.layout):
            raise CheckpointError(
                f"'{name}' is a pending sum (Partial), whose value no rank has yet; "
                "call with_sharding(Replicate()) on it first"
            )
    return named


def path_of(path: str | Path) -> Path:
    """A path that a program gave.

    Raises
    ------
    CheckpointError
        It is neither a text nor a path.
    """
    try:
        return Path(path)
    except TypeError as error:
        raise CheckpointError(
            f"a checkpoint's path must be a text or a Path, it is {path!r}"
        ) from error
