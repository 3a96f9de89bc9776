"""Normalisation."""

from __future__ import annotations

from typing import Any

from tparmpi.comm import Place
from tparmpi.nn import init
from tparmpi.nn.module import Module
from tparmpi.nn.parameter import Parameter
from tparmpi.ops import layer_norm
from tparmpi.tensors import Tensor


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last dim, times a gain, plus a bias.

    Ba et al., "Layer Normalization" (2016).

    Parameters
    ----------
    d_model
        Size of the last dim.
    place
        Where the parameters live, whole on every member.
    eps
        Added to the variance.
    dtype
        The place's default floating dtype if None.

    Attributes
    ----------
    gain, bias : Parameter, (D,)
    """

    def __init__(
        self, d_model: int, place: Place, *, eps: float = 1e-5, dtype: Any = None
    ) -> None:
        self.eps = eps
        self.gain = Parameter(
            (d_model,), place, initializer=init.ones, kind="norm", dtype=dtype
        )
        self.bias = Parameter(
            (d_model,), place, initializer=init.zeros, kind="norm", dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x` (..., D). Local, unless `x` is a pending sum."""
        return layer_norm(x, self.gain, self.bias, eps=self.eps)
