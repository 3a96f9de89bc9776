"""Largest and smallest elements, and where they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import UsageError
from tparmpi.ops.combiners import (
    combine,
    combined_rule,
    finished,
    kept_shape,
    local_count,
    narrowed,
    refuse_complex,
    refuse_empty,
    spread,
    widened,
)
from tparmpi.ops.reductions import normalize_dim, normalize_dims
from tparmpi.tensors import Plan, Tensor, method, operator


def weakest(dtype: np.dtype[Any], op: str) -> Any:
    """Return the number of `dtype` that every other beats in the reduction `op`."""
    if dtypes.is_floating(dtype):
        return -np.inf if op == "max" else np.inf
    if dtype.kind == "b":
        return op == "min"
    limits = np.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def extreme(plan: Plan, x: Any, op: str) -> Any:
    """Return this rank's ``"max"`` or ``"min"`` of `x` over the attribute `dims`.

    The dims are kept with size 1. `x` must not be of a half type, in which not every
    array module compares.
    """
    if local_count(plan) == 0:
        return plan.xp.full(kept_shape(plan), weakest(x.dtype, op), x.dtype)
    reduce = x.max if op == "max" else x.min
    return reduce(axis=plan.attributes["dims"], keepdims=True)


def _extreme(plan: Plan, x: Any, op: str) -> Any:
    x = widened(x)
    y = combine(plan, extreme(plan, x, op), op)
    return finished(plan, y), (x, y)


@operator(combined_rule, name="max")
def _max(plan: Plan, x: Any) -> Any:
    """Return the largest element of `x` over the attribute `dims`."""
    return _extreme(plan, x, "max")


@operator(combined_rule, name="min")
def _min(plan: Plan, x: Any) -> Any:
    """Return the smallest element of `x` over the attribute `dims`."""
    return _extreme(plan, x, "min")


@_max.define_backward
@_min.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, y = saved
    return (narrowed(plan, shared_by_ties(plan, x, y, spread(plan, grad))),)


def shared_by_ties(plan: Plan, x: Any, y: Any, grad: Any) -> Any:
    """Return `grad` in equal parts at the elements of `x` that are `y`, 0 elsewhere.

    Collective over the axes that split reduced dims: ties are counted on all members.
    """
    xp = plan.xp
    # where x is not a number y is none either, and nothing in the slice equals it
    ties = (x == y) | (x != x)
    number = ties.sum(axis=plan.attributes["dims"], keepdims=True, dtype=np.int64)
    share = grad / combine(plan, number).astype(grad.dtype)
    return xp.where(ties, share, share.dtype.type(0))


@method
def max(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the largest element over `dim`, or over all dims.

    Not a number where there is one among them. Elements that are equally large, on
    whichever member, share the gradient equally. Not reduced dims keep their sharding.
    If a reduced one is sharded, members exchange their own largest elements, and in the
    backward how many there are.

    Raises
    ------
    ShapeError
        If a dim does not exist, or there is nothing to choose from.
    UsageError
        If the tensor is complex.
    """
    result: Tensor = _max(x, dims=_checked(x, dim, "max"), keepdims=keepdims)
    return result


@method
def min(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the smallest element over `dim`, or over all dims; see `max`.

    Raises
    ------
    ShapeError
        If a dim does not exist, or there is nothing to choose from.
    UsageError
        If the tensor is complex.
    """
    result: Tensor = _min(x, dims=_checked(x, dim, "min"), keepdims=keepdims)
    return result


def _checked(
    x: Tensor, dim: int | tuple[int, ...] | None, name: str
) -> tuple[int, ...]:
    refuse_complex(name, x)
    dims = normalize_dims(x, dim, name)
    refuse_empty(name, x, dims)
    return dims


def _index_dtype(operands: Any, attributes: dict[str, Any]) -> np.dtype[Any]:
    return np.dtype(np.int64)


def _first(plan: Plan, x: Any, op: str) -> Any:
    """Return the smallest global index of an extreme element over `dims`.

    The dims are one, or all, which count as one flattened dim.
    """
    xp = plan.xp
    x = widened(x)
    own = extreme(plan, x, op)
    nowhere = np.iinfo(np.int64).max
    if local_count(plan):
        here = _global_index(plan, x, op)
    else:
        here = xp.full(own.shape, nowhere, np.int64)
    best = combine(plan, own, op)
    is_best = (own == best) | (own != own)
    here = xp.where(is_best, here, np.int64(nowhere))
    return finished(plan, combine(plan, here, "min")), None


def _global_index(plan: Plan, x: Any, op: str) -> Any:
    """Return the global index of this rank's first extreme element over `dims`."""
    dims, (spec,) = plan.attributes["dims"], plan.inputs
    if len(dims) == x.ndim:
        flat = x.reshape(-1)
        number = flat.argmax() if op == "max" else flat.argmin()
    else:
        (dim,) = dims
        number = x.argmax(axis=dim) if op == "max" else x.argmin(axis=dim)
    found, stride = 0, 1
    for dim in reversed(dims):
        size = x.shape[dim]
        found = found + (number % size + spec.local_offset[dim]) * stride
        number = number // size
        stride *= spec.shape[dim]
    return plan.xp.asarray(found, np.int64).reshape(kept_shape(plan))


@operator(combined_rule, name="argmax", dtype=_index_dtype, cast=False)
def _argmax(plan: Plan, x: Any) -> Any:
    """Return where the largest element of `x` over the attribute `dims` is."""
    return _first(plan, x, "max")


@operator(combined_rule, name="argmin", dtype=_index_dtype, cast=False)
def _argmin(plan: Plan, x: Any) -> Any:
    """Return where the smallest element of `x` over the attribute `dims` is."""
    return _first(plan, x, "min")


@method
def argmax(x: Tensor, dim: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index along `dim` of the largest element, int64.

    The first of several that are equally large; the first that is not a number, if
    any is. Without `dim` it is the index into the flattened tensor. Other dims keep
    their sharding. If `dim` is sharded, members exchange their own largest elements and
    where these are.

    Raises
    ------
    ShapeError
        If the dim does not exist, or there is nothing to choose from.
    UsageError
        If several dims are asked, or the tensor is complex.
    """
    result: Tensor = _argmax(x, dims=_one_or_all(x, dim, "argmax"), keepdims=keepdims)
    return result


@method
def argmin(x: Tensor, dim: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index along `dim` of the smallest element, int64; see `argmax`.

    Raises
    ------
    ShapeError
        If the dim does not exist, or there is nothing to choose from.
    UsageError
        If several dims are asked, or the tensor is complex.
    """
    result: Tensor = _argmin(x, dims=_one_or_all(x, dim, "argmin"), keepdims=keepdims)
    return result


def _one_or_all(x: Tensor, dim: int | None, name: str) -> tuple[int, ...]:
    if isinstance(dim, tuple | list):
        raise UsageError(
            f"{name}: takes one dim, or None for the flattened tensor, not {dim}"
        )
    if dim is not None:
        dim = normalize_dim(x, dim, name)
    return _checked(x, dim, name)
