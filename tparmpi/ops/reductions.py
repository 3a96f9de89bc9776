"""Sums, means and running sums; truth of any and of all."""

from __future__ import annotations

import string
from operator import index
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops.casting import cast
from tparmpi.ops.combiners import (
    combine,
    combined_rule,
    finished,
    narrowed,
    reduced_rule,
    refuse_empty,
    sum_dtype,
)
from tparmpi.tensors import Plan, Tensor, method, operator


def _sum_rule(
    x: tuple[int, ...], *, dims: tuple[int, ...], keepdims: bool = False
) -> str:
    return reduced_rule(x, dims, keepdims)


@operator(_sum_rule, name="sum", linear=(0,), dtype=sum_dtype, cast=False)
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
    if grad.ndim and not plan.attributes["keepdims"]:
        grad = xp.expand_dims(grad, plan.attributes["dims"])
    return (xp.broadcast_to(grad, plan.inputs[0].local_shape),)


@method
def sum(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the sum over `dim`, or over all dims; 0 where there is nothing to sum.

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

    Means of integers are float64. Over a sharded dim it stays pending (`Partial`);
    nothing is communicated.

    Raises
    ------
    ShapeError
        If a dim does not exist, or there is nothing to take the mean of.
    """
    dims = normalize_dims(x, dim, "mean")
    count = refuse_empty("mean", x, dims)
    whole = x.dtype.kind in "biu"
    wide = cast(x, np.float64 if whole else dtypes.accumulation_dtype(x.dtype))
    result = sum(wide, dims, keepdims) / count
    return result if whole else cast(result, x.dtype)


def _cumsum_rule(x: tuple[int, ...], *, dims: tuple[int, ...]) -> str:
    rule = combined_rule(x, dims=dims)
    operand = rule.partition("->")[0]
    return f"{operand}->{operand}"


def _running(plan: Plan, x: Any, dtype: Any, reverse: bool) -> Any:
    """Return sums of `x` up to each element, or from it on.

    Members that split the dim exchange their totals.
    """
    xp = plan.xp
    (dim,) = plan.attributes["dims"]
    factor = string.ascii_letters[dim]
    if reverse:
        x = xp.flip(x, dim)
    sums = xp.cumsum(x, axis=dim, dtype=dtype)
    if plan.factors[factor].axes:
        total = x.sum(axis=dim, keepdims=True, dtype=dtype)
        totals, number = plan.collect(factor, total)
        others = totals[number + 1 :] if reverse else totals[:number]
        sums += others.sum(axis=0)
    return xp.flip(sums, dim) if reverse else sums


@operator(_cumsum_rule, name="cumsum", linear=(0,), dtype=sum_dtype, cast=False)
def _cumsum(plan: Plan, x: Any) -> Any:
    """Return the running sum of `x` along the one of the attribute `dims`."""
    dtype = plan.outputs[0].dtype
    sums = _running(plan, x, dtypes.accumulation_dtype(dtype), reverse=False)
    return sums.astype(dtype, copy=False), None


@_cumsum.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    wide = dtypes.accumulation_dtype(grad.dtype)
    return (narrowed(plan, _running(plan, grad, wide, reverse=True)),)


@method
def cumsum(x: Tensor, dim: int) -> Tensor:
    """Return the running sum along `dim`: of all elements up to each, itself included.

    The layout stays. If `dim` is sharded, members exchange their totals only, once
    forward and once backward. Narrow integers are summed in the widest.

    Raises
    ------
    ShapeError
        If the dim does not exist.
    """
    result: Tensor = _cumsum(x, dims=(normalize_dim(x, dim, "cumsum"),))
    return result


def _truth_dtype(operands: Any, attributes: dict[str, Any]) -> np.dtype[Any]:
    return np.dtype(bool)


@operator(combined_rule, name="any", dtype=_truth_dtype, cast=False)
def _any(plan: Plan, x: Any) -> Any:
    """Return whether any element of `x` over the attribute `dims` is not 0."""
    found = (x != 0).any(axis=plan.attributes["dims"], keepdims=True)
    return finished(plan, combine(plan, found, "max")), None


@operator(combined_rule, name="all", dtype=_truth_dtype, cast=False)
def _all(plan: Plan, x: Any) -> Any:
    """Return whether every element of `x` over the attribute `dims` is not 0."""
    found = (x != 0).all(axis=plan.attributes["dims"], keepdims=True)
    return finished(plan, combine(plan, found, "min")), None


@method
def any(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return whether any element over `dim`, or over all dims, is not 0.

    False where there are none; not-a-numbers are not 0. Not reduced dims keep their
    sharding. If a reduced one is sharded, members exchange one truth value for each.

    Raises
    ------
    ShapeError
        If a dim does not exist.
    """
    result: Tensor = _any(x, dims=normalize_dims(x, dim, "any"), keepdims=keepdims)
    return result


@method
def all(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return whether every element over `dim`, or over all dims, is not 0.

    True where there are none; see `any`.

    Raises
    ------
    ShapeError
        If a dim does not exist.
    """
    result: Tensor = _all(x, dims=normalize_dims(x, dim, "all"), keepdims=keepdims)
    return result


def normalize_dims(
    x: Tensor, dim: int | tuple[int, ...] | None, name: str
) -> tuple[int, ...]:
    """Return `dim` as sorted numbers from 0; all dims for None."""
    if dim is None:
        return tuple(range(x.ndim))
    dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    found = sorted(normalize_dim(x, i, name) for i in dims)
    if len(set(found)) != len(found):
        raise ShapeError(f"{name}: a dim stands twice in {dims}")
    return tuple(found)


def normalize_dim(x: Tensor, dim: int, name: str) -> int:
    """Return one `dim` as a number from 0."""
    try:
        number = index(dim)
    except TypeError:
        raise UsageError(
            f"{name}: a dim is given by its number, not by {dim!r}"
        ) from None
    if not -x.ndim <= number < x.ndim:
        raise ShapeError(f"{name}: a tensor of shape {x.shape} has no dim {number}")
    return number % x.ndim
