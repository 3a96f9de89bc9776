"""The feed-forward part of a transformer's layer."""

from __future__ import annotations

from typing import Any

from tparmpi.comm import Place
from tparmpi.nn import init
from tparmpi.nn.init import Initializer
from tparmpi.nn.linear import Linear
from tparmpi.nn.module import Module
from tparmpi.nn.splitting import check_split
from tparmpi.tensors import Tensor


class MLP(Module):
    """``gelu(x U + b) W + c``.

    Parameters
    ----------
    d_model, d_ff
        Width outside and inside.
    place
        Where the parameters live.
    split : {"hidden", None}
        Whether each member along `axis` holds some of the inner features, in any
        chunks.
    axis
        Name of the axis; see `tparmpi.nn.splitting.axis_number`.
    other_axis
        Name of another axis of the mesh, which splits the width D of every weight. The
        result is then `Shard` of its last dim along it.
    output_initializer
        Of the second weight.
    dtype
        The place's default floating dtype if None.

    Attributes
    ----------
    up : Linear, weight (D, F)
    down : Linear, weight (F, D)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        place: Place,
        *,
        split: str | None = None,
        axis: str = "tp",
        other_axis: str | None = None,
        output_initializer: Initializer = init.DEFAULT,
        dtype: Any = None,
    ) -> None:
        check_split("MLP", split, ("hidden",))
        columns, rows = ("columns", "rows") if split else (None, None)
        self.up = Linear(
            d_model,
            d_ff,
            place,
            split=columns,
            axis=axis,
            other_axis=other_axis,
            dtype=dtype,
        )
        self.down = Linear(
            d_ff,
            d_model,
            place,
            split=rows,
            axis=axis,
            other_axis=other_axis,
            initializer=output_initializer,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the map of `x` (..., D), a pending sum over `axis` if split."""
        return self.down(self.up(x).gelu())
