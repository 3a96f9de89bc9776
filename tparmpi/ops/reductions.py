"""Sums and means."""

from __future__ import annotations

import string
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import ShapeError
from tparmpi.ops.arithmetic import cast
from tparmpi.tensors import Plan, Tensor, method, operator


def _sum_rule(
    x: tuple[int, ...], *, dims: tuple[int, ...], keepdims: bool = False
) -> str:
    letters = string.ascii_letters[: len(x)]
    kept = "".join(
        ("1" if keepdims else "") if i in dims else letter
        for i, letter in enumerate(letters)
    )
    return f"{letters}->{kept}"


def _sum_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    """Narrow integers are summed in the widest, as NumPy does."""
    (dtype,) = operands
    if dtype.kind in "bi":
        return np.result_type(dtype, np.int64)
    return np.result_type(dtype, np.uint64) if dtype.kind == "u" else dtype


@operator(_sum_rule, name="sum", linear=(0,), dtype=_sum_dtype, cast=False)
def _sum(plan: Plan, x: Any) -> Any:
    """Return the sum of `x` over the attribute `dims`."""
    attributes, dtype = plan.attributes, plan.outputs[0].dtype
    total = x.sum(
        axis=attributes["dims"],
        keepdims=attributes["keepdims"],
        dtype=dtypes.accumulation_dtype(dtype),
    )
    return total.astype(dtype, copy=False), None


@_sum.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    xp = plan.xp
    if not plan.attributes["keepdims"]:
        grad = xp.expand_dims(grad, plan.attributes["dims"])
    return (xp.broadcast_to(grad, plan.inputs[0].local_shape),)


@method
def sum(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the sum over `dim`, or over all dims.

    Over a sharded dim it stays pending (`Partial`); nothing is communicated.

    Raises
    ------
    ShapeError
        If a dim does not exist.
    """
    result: Tensor = _sum(x, dims=normalize_dims(x, dim, "sum"), keepdims=keepdims)
    return result


@method
def mean(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the mean over `dim`, or over all dims: the sum over the global count.

    Raises
    ------
    ShapeError
        If a dim does not exist, or there is nothing to take the mean of.
    """
    dims = normalize_dims(x, dim, "mean")
    count = prod(x.shape[i] for i in dims)
    if count == 0:
        raise ShapeError(
            f"mean: a tensor of shape {x.shape} has no elements over {dim}"
        )
    wide = cast(x, dtypes.accumulation_dtype(x.dtype))
    result = sum(wide, dims, keepdims) / count
    return cast(result, x.dtype) if x.dtype.kind not in "biu" else result


def normalize_dims(
    x: Tensor, dim: int | tuple[int, ...] | None, name: str
) -> tuple[int, ...]:
    """Return `dim` as sorted numbers from 0; all dims for None."""
    if dim is None:
        return tuple(range(x.ndim))
    dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    for i in dims:
        if not -x.ndim <= i < x.ndim:
            raise ShapeError(f"{name}: a tensor of shape {x.shape} has no dim {i}")
    found = sorted(i % x.ndim for i in dims)
    if len(set(found)) != len(found):
        raise ShapeError(f"{name}: a dim stands twice in {dims}")
    return tuple(found)
