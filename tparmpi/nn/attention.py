"""Self-attention with heads as a dim of the weights."""

from __future__ import annotations

from typing import Any

from tparmpi.comm import Place
from tparmpi.errors import ShardingError, UsageError
from tparmpi.nn import init
from tparmpi.nn.init import Initializer
from tparmpi.nn.linear import Linear
from tparmpi.nn.module import Module
from tparmpi.nn.splitting import axis_number, axis_size, check_split
from tparmpi.ops import attention
from tparmpi.tensors import Tensor


class CausalSelfAttention(Module):
    """Multi-head attention of each position to itself and those before.

    Vaswani et al., "Attention Is All You Need" (2017). Heads are never merged with
    another dim, so that any number of heads not below the members can be split.

    Parameters
    ----------
    d_model, n_head
        Width D and number of heads H; each head has E = D / H dims.
    place
        Where the parameters live.
    split : {"heads", None}
        Whether each member along `axis` holds some heads.
    axis
        Name of the axis; see `tparmpi.nn.splitting.axis_number`.
    other_axis
        Name of another axis of the mesh, which splits the width D of every weight. The
        result is then `Shard` of its last dim along it.
    output_initializer
        Of the output projection's weight.
    dtype
        The place's default floating dtype if None.

    Attributes
    ----------
    q, k, v : Linear, weight (D, H, E)
    out : Linear, weight (H, E, D)

    Raises
    ------
    UsageError
        If the heads do not divide the width.
    ShardingError
        If there are fewer heads than members.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        place: Place,
        *,
        split: str | None = None,
        axis: str = "tp",
        other_axis: str | None = None,
        output_initializer: Initializer = init.DEFAULT,
        dtype: Any = None,
    ) -> None:
        check_split("CausalSelfAttention", split, ("heads",))
        if n_head < 1 or d_model % n_head:
            raise UsageError(
                f"CausalSelfAttention: d_model ({d_model}) must be a multiple of "
                f"n_head ({n_head})"
            )
        if split is not None:
            _check_heads(n_head, place, axis)
        heads = (n_head, d_model // n_head)
        columns, rows = ("columns", "rows") if split else (None, None)
        self.q, self.k, self.v = (
            Linear(
                d_model,
                heads,
                place,
                split=columns,
                axis=axis,
                other_axis=other_axis,
                dtype=dtype,
            )
            for _ in range(3)
        )
        self.out = Linear(
            heads,
            d_model,
            place,
            split=rows,
            axis=axis,
            other_axis=other_axis,
            initializer=output_initializer,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position gathers from those it sees.

        Parameters
        ----------
        x : (B, T, D)

        Returns
        -------
        Tensor : (B, T, D)
            A pending sum over `axis` if heads are split.
        """
        return self.out(attention(self.q(x), self.k(x), self.v(x)))


def _check_heads(n_head: int, place: Place, axis: str) -> None:
    members = axis_size(place, axis)
    if n_head < members:
        number = axis_number(place, axis)
        name = axis if number is None else place.axes[number]
        raise ShardingError(
            f"CausalSelfAttention: {n_head} heads cannot be split over the {members} "
            f"members of axis '{name}', each of which needs a head; use at most "
            f"{n_head} members there, or more heads"
        )
