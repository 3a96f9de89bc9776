"""Variances, norms, products and log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops.arithmetic import floating
from tparmpi.ops.combiners import (
    collect,
    combine,
    combined_rule,
    counts,
    finished,
    kept_shape,
    local_count,
    narrowed,
    refuse_complex,
    refuse_empty,
    spread,
    sum_dtype,
    widened,
)
from tparmpi.ops.extrema import extreme, shared_by_ties
from tparmpi.ops.reductions import normalize_dims
from tparmpi.tensors import Plan, Tensor, method, operator


def _moments(plan: Plan, x: Any) -> tuple[Any, Any]:
    """Return the mean of `x` over the attribute `dims` and the sum of the squares of
    what deviates from it.

    The members' are merged pairwise, in member order: Chan, Golub and LeVeque,
    "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """
    xp, dims, count = plan.xp, plan.attributes["dims"], local_count(plan)
    if count:
        mean = x.sum(axis=dims, keepdims=True) / x.dtype.type(count)
        square = xp.square(x - mean).sum(axis=dims, keepdims=True)
    else:
        mean = square = xp.zeros(kept_shape(plan), x.dtype)
    pieces, _ = collect(plan, xp.stack((mean, square)))
    whole = 0
    for members, (mean_b, square_b) in zip(counts(plan), pieces, strict=True):
        if not members:
            continue
        if not whole:
            whole, mean, square = members, mean_b, square_b
            continue
        total = whole + members
        delta = mean_b - mean
        mean = mean + delta * x.dtype.type(members / total)
        weight = x.dtype.type(whole * members / total)
        square = square + square_b + delta * delta * weight
        whole = total
    return mean, square


def _degrees(plan: Plan, correction: float) -> float:
    """How many numbers are reduced to one, less `correction`."""
    shape = plan.inputs[0].shape
    return math.prod(shape[dim] for dim in plan.attributes["dims"]) - correction


@operator(combined_rule, name="var", dtype=floating)
def _var(plan: Plan, x: Any, *, correction: float = 0) -> Any:
    """Return the variance of `x` over the attribute `dims`."""
    x = widened(x)
    mean, square = _moments(plan, x)
    degrees = x.dtype.type(_degrees(plan, correction))
    return finished(plan, square / degrees), (x, mean, degrees)


@_var.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, mean, degrees = saved
    return (narrowed(plan, spread(plan, grad) * (2 / degrees) * (x - mean)),)


@operator(combined_rule, name="std", dtype=floating)
def _std(plan: Plan, x: Any, *, correction: float = 0) -> Any:
    """Return the standard deviation of `x` over the attribute `dims`."""
    x = widened(x)
    mean, square = _moments(plan, x)
    degrees = x.dtype.type(_degrees(plan, correction))
    y = plan.xp.sqrt(square / degrees)
    return finished(plan, y), (x, mean, degrees, y)


@_std.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, mean, degrees, y = saved
    slope = spread(plan, grad) / (_nonzero(plan, y) * degrees)
    return (narrowed(plan, slope * (x - mean)),)


def _nonzero(plan: Plan, y: Any) -> Any:
    """`y` with 1 in place of 0, for a division of what is 0 there."""
    return plan.xp.where(y == 0, y.dtype.type(1), y)


@method
def var(
    x: Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    correction: float = 0,
) -> Tensor:
    """Return the variance over `dim`, or over all dims.

    The sum of the squared deviations from the mean, over the count less `correction`.
    Variances of integers are float64. Not reduced dims keep their sharding. If a
    reduced one is sharded, members exchange their own means and sums of squared
    deviations, which are merged without loss; the backward is local.

    Parameters
    ----------
    correction
        0 for the variance of the numbers given, 1 for the unbiased estimate of the
        variance of what they were drawn from (NumPy's ``ddof``).

    Raises
    ------
    ShapeError
        If a dim does not exist, or there are no more than `correction` elements.
    UsageError
        If the tensor is complex.
    """
    dims = _enough(x, dim, correction, "var")
    result: Tensor = _var(x, dims=dims, keepdims=keepdims, correction=correction)
    return result


@method
def std(
    x: Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    correction: float = 0,
) -> Tensor:
    """Return the standard deviation over `dim`: the root of the variance; see `var`.

    The gradient is 0 where all elements are equal.

    Raises
    ------
    ShapeError
        If a dim does not exist, or there are no more than `correction` elements.
    UsageError
        If the tensor is complex.
    """
    dims = _enough(x, dim, correction, "std")
    result: Tensor = _std(x, dims=dims, keepdims=keepdims, correction=correction)
    return result


def _enough(
    x: Tensor, dim: int | tuple[int, ...] | None, correction: float, name: str
) -> tuple[int, ...]:
    refuse_complex(name, x)
    dims = normalize_dims(x, dim, name)
    count = refuse_empty(name, x, dims)
    if count <= correction:
        raise ShapeError(
            f"{name}: more than {correction} elements are needed over the dims {dims} "
            f"of a tensor of shape {x.shape}, there are {count}; give correction=0"
        )
    return dims


@operator(combined_rule, name="logsumexp", dtype=floating)
def _logsumexp(plan: Plan, x: Any) -> Any:
    """Return the logarithm of the sum of ``exp(x)`` over the attribute `dims`."""
    xp = plan.xp
    x = widened(x)
    peak = combine(plan, extreme(plan, x, "max"), "max")
    peak = xp.where(xp.isfinite(peak), peak, x.dtype.type(0))
    # an infinity among the elements, or nothing but zeros in the sum, is an answer
    with np.errstate(over="ignore", divide="ignore"):
        total = xp.exp(x - peak).sum(axis=plan.attributes["dims"], keepdims=True)
        y = xp.log(combine(plan, total)) + peak
    return finished(plan, y), (x, y)


@_logsumexp.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, y = saved
    y = plan.xp.where(y == -inf, y.dtype.type(0), y)
    with np.errstate(invalid="ignore"):
        return (narrowed(plan, spread(plan, grad) * plan.xp.exp(x - y)),)


@method
def logsumexp(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return ``log(sum(exp(x)))`` over `dim`, or over all dims, without overflow.

    Minus infinity where all elements are, or there are none; the gradient is 0 there.
    Not reduced dims keep their sharding. If a reduced one is sharded, members exchange
    its maximum and sum; the backward is local.

    Raises
    ------
    ShapeError
        If a dim does not exist.
    UsageError
        If the tensor is complex.
    """
    refuse_complex("logsumexp", x)
    dims = normalize_dims(x, dim, "logsumexp")
    result: Tensor = _logsumexp(x, dims=dims, keepdims=keepdims)
    return result


def _euclidean(xp: Any, x: Any, axes: Sequence[int]) -> Any:
    """Return the root of the sum of squares of `x`, its dims kept with size 1.

    What is squared was brought near 1 by a power of two: it does not overflow.
    """
    limits = np.finfo(x.dtype)
    peak = abs(x).max(axis=axes, keepdims=True)
    exponent = xp.frexp(peak)[1].clip(1 - limits.maxexp, -limits.minexp)
    exponent = xp.where(xp.isfinite(peak), exponent, 0)
    scale = xp.ldexp(xp.ones_like(peak), -exponent)
    return xp.sqrt(xp.square(x * scale).sum(axis=axes, keepdims=True)) / scale


@operator(combined_rule, name="norm", dtype=floating)
def _norm(plan: Plan, x: Any, *, ord: float = 2) -> Any:
    """Return the norm of `x` over the attribute `dims`."""
    xp, dims = plan.xp, plan.attributes["dims"]
    x = widened(x)
    if ord == 1:
        y = combine(plan, abs(x).sum(axis=dims, keepdims=True))
    elif local_count(plan) == 0:
        y = xp.zeros(kept_shape(plan), x.dtype)
    elif ord == 2:
        y = _euclidean(xp, x, dims)
    else:
        y = abs(x).max(axis=dims, keepdims=True)
    if ord == 2:
        pieces, _ = collect(plan, y)
        y = _euclidean(xp, pieces, (0,))[0] if len(pieces) > 1 else y
    elif ord == inf:
        y = combine(plan, y, "max")
    return finished(plan, y), (x, y, ord)


@_norm.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, y, ord = saved
    xp, grad = plan.xp, spread(plan, grad)
    if ord == 2:
        return (narrowed(plan, grad * (x / _nonzero(plan, y))),)
    if ord == inf:
        grad = shared_by_ties(plan, abs(x), y, grad)
    return (narrowed(plan, grad * xp.sign(x)),)


@method
def norm(
    x: Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    ord: float = 2,
) -> Tensor:
    """Return the norm of the vectors along `dim`, or of all elements as one vector.

    Norms of integers are float64; the squares do not overflow. Where the vector is 0
    the gradient is 0. Not reduced dims keep their sharding. If a reduced one is
    sharded, members exchange their own norms; only the backward of the largest
    absolute value communicates again, how many of them there are.

    Parameters
    ----------
    dim
        Several dims count as one flattened: this is never a matrix norm.
    ord
        2 for the root of the sum of squares, 1 for the sum of absolute values,
        ``math.inf`` for the largest absolute value (which share the gradient equally).

    Raises
    ------
    ShapeError
        If a dim does not exist.
    UsageError
        If there is no such norm, or the tensor is complex.
    """
    refuse_complex("norm", x)
    if ord not in (1, 2, inf):
        raise UsageError(f"norm: ord must be 1, 2 or math.inf, it is {ord!r}")
    dims = normalize_dims(x, dim, "norm")
    result: Tensor = _norm(x, dims=dims, keepdims=keepdims, ord=ord)
    return result


@operator(combined_rule, name="prod", dtype=sum_dtype, cast=False)
def _prod(plan: Plan, x: Any) -> Any:
    """Return the product of `x` over the attribute `dims`."""
    dtype = dtypes.accumulation_dtype(plan.outputs[0].dtype)
    own = x.prod(axis=plan.attributes["dims"], keepdims=True, dtype=dtype)
    pieces, number = collect(plan, own)
    return finished(plan, pieces.prod(axis=0, dtype=dtype)), (x, pieces, number)


@_prod.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, pieces, number = saved
    grad = spread(plan, grad)
    grad = grad * pieces[:number].prod(axis=0) * pieces[number + 1 :].prod(axis=0)
    others = _product_of_others(plan.xp, widened(x), plan.attributes["dims"])
    return (narrowed(plan, grad * others),)


def _product_of_others(xp: Any, x: Any, dims: tuple[int, ...]) -> Any:
    """Return for each element of `x` the product of the others over `dims`.

    Without a division, so that zeros may be among them.
    """
    order = [dim for dim in range(x.ndim) if dim not in dims] + list(dims)
    moved = x.transpose(order)
    kept = moved.shape[: x.ndim - len(dims)]
    rows = moved.reshape(*kept, math.prod(x.shape[dim] for dim in dims))
    before, after = xp.ones_like(rows), xp.ones_like(rows)
    before[..., 1:] = xp.cumprod(rows[..., :-1], axis=-1)
    after[..., -2::-1] = xp.cumprod(rows[..., :0:-1], axis=-1)
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    return (before * after).reshape(moved.shape).transpose(inverse)


@method
def prod(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the product over `dim`, or over all dims; 1 where there is nothing.

    Narrow integers are multiplied in the widest. The gradient of an element is the
    product of all others, also where some are 0. Not reduced dims keep their sharding.
    If a reduced one is sharded, members exchange their own products; the backward is
    local.

    Raises
    ------
    ShapeError
        If a dim does not exist.
    """
    dims = normalize_dims(x, dim, "prod")
    result: Tensor = _prod(x, dims=dims, keepdims=keepdims)
    return result
