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
from tparmpi.sharding import REPLICATE, Shard
from tparmpi.tensors import Tensor


class Linear(Module):
    """``x W + b``, where the input and output features may be several dims.

    Shoeybi et al., "Megatron-LM" (2019), for the two splits: with ``"columns"`` each
    member holds some output features, and a whole input gives a sharded output without
    communication; with ``"rows"`` each member holds some input features, and a sharded
    input gives a pending sum, to which the bias is added once.

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
        bias: bool = True,
        initializer: Initializer = init.DEFAULT,
        dtype: Any = None,
    ) -> None:
        check_split("Linear", split, ("columns", "rows"))
        inputs = d_in if isinstance(d_in, tuple) else (d_in,)
        outputs = d_out if isinstance(d_out, tuple) else (d_out,)
        dims = {"columns": len(inputs), "rows": 0}
        placement = REPLICATE if split is None else Shard(dims[split])
        self.weight = Parameter(
            inputs + outputs,
            place,
            layout_over(place, axis, placement),
            initializer=initializer,
            dtype=dtype,
        )
        self.bias = None
        if bias:
            self.bias = Parameter(
                outputs,
                place,
                layout_over(place, axis, Shard(0) if split == "columns" else REPLICATE),
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
            With split columns, `Shard` of its first feature dim; with split rows,
            `Partial`.
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
