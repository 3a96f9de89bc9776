"""Dropout."""

from __future__ import annotations

from tparmpi.errors import UsageError
from tparmpi.nn.module import Module
from tparmpi.ops import dropout
from tparmpi.tensors import Tensor


class Dropout(Module):
    """Zero elements with probability `p` while training, and scale up the others.

    The mask is drawn from a stream named by the module's path: the same on every layout
    (see `tpm.random.scope`).

    Raises
    ------
    UsageError
        If `p` is not in [0, 1).
    """

    def __init__(self, p: float) -> None:
        if not 0 <= p < 1:
            raise UsageError(f"Dropout: p must be at least 0 and below 1, it is {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, thinned out while training. Local; passes pending sums."""
        if not self.training or self.p == 0:
            return x
        if self.path is None:
            raise UsageError(
                "Dropout: the module has no path to name its random numbers by; call "
                "initialize(seed) or assign_paths() on the model"
            )
        return dropout(x, self.p, stream=self.path)
