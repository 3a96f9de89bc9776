"""Linear maps, whole or split by columns or rows."""

from __future__ import annotations

import string
from functools import lru_cache
from typing import Any

from tparmpi.comm import Place
from tparmpi.nn import init
from tparmpi.nn.init import Initializer
from tparmpi.nn.module import Module
from tparmpi.nn.parameter import Parameter
from tparmpi.nn.splitting import check_split, layout_over
from tparmpi.ops import linear
from tparmpi.sharding import REPLICATE, Placement, Shard
from tparmpi.tensors import Tensor


class Linear(Module):
    """``x W + b``, where the input and output features may be several dims.

    Shoeybi et al., "Megatron-LM" (2019), for the two splits: with ``"columns"`` each
    member holds some output features, and a whole input gives a sharded output without
    communication; with ``"rows"`` each member holds some input features, and a sharded
    input gives a pending sum, to which the bias is added once. With `other_axis` both
    dims of the weight are split, the "2D weight-stationary" layout of Pope et al.,
    "Efficiently Scaling Transformer Inference" (2022).

    Parameters
    ----------
    d_in, d_out
        Sizes of the input's last dims and of the output's, such as ``(n_head,
        d_head)``.
    place
        Where the parameters live.
    split : {"columns", "rows", None}
        Split of the first output dim, or of the first input dim, over `axis`.
    axis
        Name of the axis; see `tparmpi.nn.splitting.axis_number`.
    other_axis
        Name of another axis of the mesh, which splits the other side's first dim: the
        input's with ``"columns"``, the output's with ``"rows"``.
    bias
        Whether there is a bias.
    initializer
        Of the weight; the bias starts at zero.
    dtype
        The place's default floating dtype if None.

    Attributes
    ----------
    weight : Parameter, ``(*d_in, *d_out)``
    bias : Parameter, ``(*d_out)``, or None
    """

    def __init__(
        self,
        d_in: int | tuple[int, ...],
        d_out: int | tuple[int, ...],
        place: Place,
        *,
        split: str | None = None,
        axis: str = "tp",
        other_axis: str | None = None,
        bias: bool = True,
        initializer: Initializer = init.DEFAULT,
        dtype: Any = None,
    ) -> None:
        check_split("Linear", split, ("columns", "rows"))
        inputs = d_in if isinstance(d_in, tuple) else (d_in,)
        outputs = d_out if isinstance(d_out, tuple) else (d_out,)
        dims: dict[str | None, tuple[Placement, Placement]] = {
            "columns": (Shard(len(inputs)), Shard(0)),
            "rows": (Shard(0), Shard(len(inputs))),
            None: (REPLICATE, REPLICATE),
        }
        one, other = dims[split]
        self.weight = Parameter(
            inputs + outputs,
            place,
            layout_over(place, axis, one, other_axis, other),
            initializer=initializer,
            dtype=dtype,
        )
        self.bias = None
        if bias:
            self.bias = Parameter(
                outputs,
                place,
                layout_over(
                    place,
                    axis,
                    Shard(0) if split == "columns" else REPLICATE,
                    other_axis,
                    Shard(0) if split == "rows" else REPLICATE,
                ),
                initializer=init.zeros,
                kind="bias",
                dtype=dtype,
            )
        self._dims = (len(inputs), len(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the map of `x`.

        Parameters
        ----------
        x : ``(..., *d_in)``

        Returns
        -------
        Tensor : ``(..., *d_out)``
            `Shard` of its first feature dim along the axis that splits the outputs,
            `Partial` along the one that splits the inputs.
        """
        return linear(
            x, self.weight.gathered(), self.bias, rule=_rule(x.ndim, *self._dims)
        )


@lru_cache(maxsize=256)
def _rule(ndim: int, inputs: int, outputs: int) -> str:
    letters = iter(string.ascii_letters)
    batch, x, y = (
        "".join(next(letters) for _ in range(count))
        for count in (max(ndim - inputs, 0), inputs, outputs)
    )
    return f"{batch}{x},{x}{y}->{batch}{y}"
