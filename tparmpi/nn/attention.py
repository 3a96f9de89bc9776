"""Self-attention with heads as a dim of the weights."""

from __future__ import annotations

from typing import Any

from tparmpi.comm import Place
from tparmpi.errors import ShardingError, UsageError
from tparmpi.nn import init
from tparmpi.nn.init import Initializer
from tparmpi.nn.linear import Linear
from tparmpi.nn.module import Module
from tparmpi.nn.splitting import (
    axis_number,
    axis_size,
    check_split,
    with_placement,
)
from tparmpi.ops import attention, stack
from tparmpi.sharding import Shard
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
    context : {"heads", "ring"}
        How positions that are split over `context_axis` meet. ``"heads"``: members
        exchange their positions for heads and back, two all_to_alls (Jacobs et al.,
        "DeepSpeed Ulysses", 2023); each needs a head. ``"ring"``: keys and values are
        passed round, see `tpm.attention`.
    context_axis
        Name of that axis of the mesh; nothing happens where there is none.
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
        If the heads do not divide the width, or heads are to be exchanged along an axis
        that stands before `axis` in the mesh.
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
        context: str = "heads",
        context_axis: str = "cp",
        output_initializer: Initializer = init.DEFAULT,
        dtype: Any = None,
    ) -> None:
        check_split("CausalSelfAttention", split, ("heads",))
        if n_head < 1 or d_model % n_head:
            raise UsageError(
                f"CausalSelfAttention: d_model ({d_model}) must be a multiple of "
                f"n_head ({n_head})"
            )
        check_split("CausalSelfAttention", context, ("heads", "ring"), "context")
        self.context = context if context_axis in place.axes else None
        self.context_axis = context_axis
        if self.context == "heads":
            _check_exchange(n_head, place, axis if split else None, context_axis)
        elif split is not None:
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
            Its positions may be split over `context_axis`.

        Returns
        -------
        Tensor : (B, T, D)
            A pending sum over `axis` if heads are split.
        """
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.context != "heads":
            return self.out(attention(q, k, v, ring=self.context == "ring"))
        # All three in one exchange of (3, B, T, H, E).
        three = with_placement(stack((q, k, v)), self.context_axis, Shard(3)).split(3)
        y = attention(*(part.squeeze(0) for part in three))
        return self.out(with_placement(y, self.context_axis, Shard(1)))


def _check_exchange(
    n_head: int, place: Place, axis: str | None, context_axis: str
) -> None:
    """Refuse what the exchange of heads cannot do, or only with detours."""
    context = place.axes.index(context_axis)
    number = None if axis is None else axis_number(place, axis)
    if number is not None and number > context and place.shape[context] > 1:
        raise UsageError(
            f"CausalSelfAttention: axis '{context_axis}' stands before "
            f"'{place.axes[number]}' in the mesh, so that heads split over both cannot "
            f"be exchanged along it; make the mesh with '{context_axis}' after "
            f"'{place.axes[number]}', or give context=\"ring\""
        )
    tensor = 1 if number is None else place.shape[number]
    members = tensor * place.shape[context]
    if n_head < members:
        raise ShardingError(
            f"CausalSelfAttention: {n_head} heads cannot be exchanged over "
            f"{place.shape[context]} members of axis '{context_axis}' where {tensor} "
            f"members split them, which takes {members}; use fewer members or more "
            'heads, or give context="ring"'
        )


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
