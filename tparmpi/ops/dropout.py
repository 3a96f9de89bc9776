"""Dropout."""

from __future__ import annotations

from typing import Any

from tparmpi.errors import UsageError
from tparmpi.ops.arithmetic import floating
from tparmpi.tensors import Plan, Tensor, method, operator, random


@operator("...->...", name="dropout", linear=(0,), dtype=floating)
def _dropout(
    plan: Plan, x: Any, *, key: tuple[int, int], p: float, rows: random.Rows | None
) -> Any:
    """Return `x` with elements zeroed with probability `p`, the others scaled up."""
    mask = random.keep_mask(key, plan.outputs[0], p, rows)
    factor = x.dtype.type(1 / (1 - p))
    return x * mask * factor, (mask, factor)


@_dropout.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    mask, factor = saved
    return (grad * mask * factor,)


@method
def dropout(x: Tensor, p: float, stream: str = "") -> Tensor:
    """Return `x` with elements zeroed with probability `p`, the others scaled. Local.

    The mask is a function of (seed, stream, call, step, index in the global batch), see
    `tpm.random.scope`: the same on every layout.

    Parameters
    ----------
    p
        In [0, 1).
    stream
        Name of the stream of random numbers, such as a module's path.

    Raises
    ------
    UsageError
        If `p` is out of range.
    """
    if not 0 <= p < 1:
        raise UsageError(f"dropout: p must be at least 0 and below 1, it is {p}")
    if p == 0:
        return x
    now = random.current()
    result: Tensor = _dropout(x, key=now.next_key(stream), p=p, rows=now.rows)
    return result
