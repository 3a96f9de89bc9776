"""Positions as rotations of features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops.combiners import widened
from tparmpi.tensors import Plan, Tensor, method, operator


def _rotary_rule(x: tuple[int, ...], *positions: tuple[int, ...]) -> str:
    if len(x) < 3 or x[-1] % 2:
        raise ShapeError(
            f"rotary: x must be (B, T, ..., E) with E even, its shape is {x}"
        )
    left = "bt...[e]"
    for shape in positions:
        if shape not in ((x[1],), (1, x[1]), x[:2]):
            raise ShapeError(
                f"rotary: positions must be (T,) or (B, T), here {x[1:2]} or {x[:2]}; "
                f"their shape is {shape}"
            )
        batch = "" if len(shape) == 1 else "b" if shape[0] == x[0] else "1"
        left += f",{batch}t"
    return f"{left}->bt...[e]"


def _rotary_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    dtype = operands[0]
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


@operator(_rotary_rule, name="rotary", linear=(0,), dtype=_rotary_dtype, cast=False)
def _rotary(
    plan: Plan,
    x: Any,
    *positions: Any,
    offset: int,
    base: float,
    interleaved: bool,
) -> Any:
    """Return `x` with its features turned by angles that grow with the position."""
    xp = plan.xp
    shard = plan.factors["t"]
    if positions:
        (where,) = positions
        where = where + offset
    else:
        where = xp.arange(shard.offset, shard.offset + shard.length) + offset
    pairs = x.shape[-1] // 2
    # In float64: late positions times the first frequencies are large angles.
    frequencies = base ** (-xp.arange(pairs, dtype=np.float64) / max(pairs, 1))
    angles = where[..., None] * frequencies
    batch = angles.shape[0] if angles.ndim == 3 else 1
    angles = angles.reshape(batch, shard.length, *[1] * (x.ndim - 3), pairs)
    dtype = plan.outputs[0].dtype
    wide = dtypes.accumulation_dtype(dtype)
    turn = (xp.cos(angles).astype(wide), xp.sin(angles).astype(wide))
    y = _turned(xp, x.astype(wide, copy=False), *turn, interleaved)
    return y.astype(dtype, copy=False), (*turn, interleaved)


@_rotary.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    cosine, sine, interleaved = saved
    dx = _turned(plan.xp, widened(grad), cosine, -sine, interleaved)
    return (dx.astype(plan.inputs[0].dtype, copy=False), None)[: len(wanted)]


def _turned(xp: Any, x: Any, cosine: Any, sine: Any, interleaved: bool) -> Any:
    """`x` with each pair (a, b) of features turned."""
    half = x.shape[-1] // 2
    if interleaved:
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        first, second = slice(0, half), slice(half, None)
    a, b = x[..., first], x[..., second]
    y = xp.empty(x.shape, x.dtype)
    y[..., first] = a * cosine - b * sine
    y[..., second] = b * cosine + a * sine
    return y


@method
def rotary(
    x: Tensor,
    positions: Tensor | None = None,
    *,
    offset: int = 0,
    base: float = 10000.0,
    interleaved: bool = False,
) -> Tensor:
    """Return queries or keys turned by angles that grow with their positions.

    Su et al., "RoFormer" (2021): feature pair i of position p turns by
    ``p base^(-2i/E)``. Local, on any layout of batch, positions and heads: a member
    counts its positions from the first of all. A pending sum stays pending.

    Parameters
    ----------
    x : (B, T, ..., E)
    positions : (T,) or (B, T), integers
        0, 1, ..., T-1 if None.
    offset
        Added to the positions, such as the number of those cached.
    base
        Of the geometric row of wavelengths.
    interleaved
        Whether features 2i and 2i+1 are a pair, as in the paper; else i and i + E/2, as
        in Llama's published weights for other libraries.

    Raises
    ------
    ShapeError
        If the shapes do not fit, or E is odd.
    UsageError
        If the positions are no integers, or `base` is not positive.
    """
    if base <= 0:
        raise UsageError(f"rotary: base must be positive, it is {base}")
    operands = [x]
    if positions is not None:
        if isinstance(positions, Tensor) and positions.dtype.kind not in "iu":
            raise UsageError(
                f"rotary: positions must be integers, they are {positions.dtype}"
            )
        operands.append(positions)
    result: Tensor = _rotary(
        *operands, offset=offset, base=float(base), interleaved=interleaved
    )
    return result
