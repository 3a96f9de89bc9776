"""Indices in other places: pad, roll, repeat, sort, topk."""

from __future__ import annotations

import string
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops.indexing import add_at
from tparmpi.ops.reductions import normalize_dim, normalize_dims
from tparmpi.sharding import Move, Span, chunk_sizes, chunks_over, find_moves
from tparmpi.tensors import Plan, Tensor, method, operator
from tparmpi.tensors.moves import (
    Touched,
    carry,
    carry_adding,
    moving_group,
    rearrange,
    rearrange_back,
    within,
)

LETTERS = string.ascii_letters
Sizes = dict[str, int]


def _pad_rule(
    x: tuple[int, ...], *, widths: tuple[tuple[int, int], ...], zero: bool
) -> tuple[str, Sizes]:
    sizes = {}
    text = ""
    for letter, size, around in zip(LETTERS, x, widths, strict=False):
        if any(around):
            sizes[letter] = size + sum(around)
            text += f"<{letter}>"
        else:
            text += letter
    return f"{text}->{text}", sizes


def _pad_linear(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> tuple[int, ...]:
    """Of a pending sum every member would add the value."""
    return (0,) if attributes["zero"] else ()


def _padded(plan: Plan) -> Touched:
    (x,), (y,) = plan.inputs, plan.outputs
    return {
        dim: (LETTERS[dim], (Span(0, before, x.shape[dim]),), y.shape[dim])
        for dim, (before, after) in enumerate(plan.attributes["widths"])
        if before or after
    }


@operator(_pad_rule, name="pad", linear=_pad_linear)
def _pad(plan: Plan, x: Any, *, value: Any) -> Any:
    """Return `x` between as many values as the attribute `widths` says."""
    return rearrange(plan, x, _padded(plan), fill=value), None


@_pad.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (rearrange_back(plan, grad, _padded(plan)),)


@method
def pad(
    x: Tensor, widths: Sequence[int | tuple[int, int]], value: complex = 0
) -> Tensor:
    """Return `x` with `value` before and after the indices of its dims.

    Of a split dim each member sends what another one's chunk of the result holds.

    Parameters
    ----------
    widths
        For each dim how many before and after, or one number for both.

    Raises
    ------
    ShapeError
        If there is not one entry for each dim, or one is negative.
    UsageError
        If the value does not fit into the dtype of `x`.
    """
    pairs = tuple(
        (int(w), int(w)) if isinstance(w, int | np.integer) else (int(w[0]), int(w[1]))
        for w in widths
    )
    if len(pairs) != x.ndim:
        raise ShapeError(
            f"pad: there are widths for {len(pairs)} dims, but a tensor of shape "
            f"{x.shape} has {x.ndim}"
        )
    if any(w < 0 for pair in pairs for w in pair):
        raise ShapeError(
            f"pad: a width in {pairs} is negative; cut with a slice, x[start:stop]"
        )
    if not any(w for pair in pairs for w in pair):
        return x
    fill = _fitting(x, value)
    result: Tensor = _pad(x, widths=pairs, zero=bool(fill == 0), value=fill)
    return result


def _fitting(x: Tensor, value: Any) -> Any:
    """`value` in the dtype of `x`."""
    given = np.asarray(value)
    if given.ndim == 0 and given.dtype.kind in "biufc":
        number = given.item()
        if dtypes.promote(x.dtype, number) == x.dtype:
            try:
                return np.asarray(number, x.dtype)[()]
            except OverflowError:
                pass
    raise UsageError(
        f"pad: the value {value!r} does not fit into {x.dtype}; cast the tensor first"
    )


def _roll_rule(x: tuple[int, ...], *, shifts: tuple[int, ...]) -> tuple[str, Sizes]:
    sizes = {}
    text = ""
    for letter, size, shift in zip(LETTERS, x, shifts, strict=False):
        if shift:
            sizes[letter] = size
        text += f"<{letter}>" if shift else letter
    return f"{text}->{text}", sizes


def _rolled(plan: Plan) -> Touched:
    touched = {}
    for dim, shift in enumerate(plan.attributes["shifts"]):
        if shift:
            size = plan.inputs[0].shape[dim]
            spans = Span(0, shift, size - shift), Span(size - shift, 0, shift)
            touched[dim] = LETTERS[dim], spans, size
    return touched


@operator(_roll_rule, name="roll", linear=(0,))
def _roll(plan: Plan, x: Any) -> Any:
    """Return `x` with its indices shifted round by the attribute `shifts`."""
    return rearrange(plan, x, _rolled(plan)), None


@_roll.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (rearrange_back(plan, grad, _rolled(plan)),)


@method
def roll(x: Tensor, shift: int | Sequence[int], dim: int | Sequence[int] = 0) -> Tensor:
    """Return `x` with the indices of `dim` shifted by `shift`, the last to the front.

    Of a split dim each member sends what another one's chunk holds afterwards.

    Parameters
    ----------
    shift, dim
        One of each, or as many shifts as dims.

    Raises
    ------
    ShapeError
        If a dim does not exist, or the numbers differ.
    """
    dims = (int(dim),) if isinstance(dim, int | np.integer) else tuple(dim)
    amounts = (
        (shift,) * len(dims) if isinstance(shift, int | np.integer) else tuple(shift)
    )
    if len(amounts) != len(dims):
        raise ShapeError(f"roll: {len(amounts)} shifts are given for {len(dims)} dims")
    normalize_dims(x, dims, "roll")
    shifts = [0] * x.ndim
    for i, amount in zip(dims, amounts, strict=True):
        shifts[i % x.ndim] = int(amount) % x.shape[i] if x.shape[i] else 0
    if not any(shifts):
        return x
    result: Tensor = _roll(x, shifts=tuple(shifts))
    return result


def _repeat_rule(x: tuple[int, ...], *, count: int, dim: int) -> tuple[str, Sizes]:
    letters = LETTERS[: len(x)]
    text = f"{letters[:dim]}<{letters[dim]}>{letters[dim + 1 :]}"
    return f"{text}->{text}", {letters[dim]: x[dim] * count}


def _repeat_needs(plan: Plan, group: Any) -> tuple[tuple[Move, ...], int, int, int]:
    """What to fetch before repeating locally.

    Returns
    -------
    moves
        That bring this member the indices it repeats.
    needed
        Their number.
    skipped, length
        The part of their repetitions that is this member's.
    """
    count, dim = plan.attributes["count"], plan.attributes["dim"]
    size = plan.inputs[0].shape[dim]
    chunks = chunks_over(size * count, group.size)
    needed = tuple(
        (first // count, -(-(first + length) // count) - first // count)
        if length
        else (0, 0)
        for first, length in chunks
    )
    held = chunks_over(size, group.size)
    moves = find_moves((Span(0, 0, size),), (held,), (needed,), group.rank)
    start, number = needed[group.rank]
    first, length = chunks[group.rank]
    return moves, number, first - start * count, length


@operator(_repeat_rule, name="repeat", linear=(0,))
def _repeat(plan: Plan, x: Any) -> Any:
    """Return `x` with each index of the attribute `dim` `count` times."""
    count, dim = plan.attributes["count"], plan.attributes["dim"]
    group = moving_group(plan, LETTERS[dim])
    if group is None or count == 0:
        return plan.xp.repeat(x, count, axis=dim), None
    moves, needed, skipped, length = _repeat_needs(plan, group)
    shape = (*x.shape[:dim], needed, *x.shape[dim + 1 :])
    fetched = plan.backend.empty(shape, x.dtype)
    carry(group, moves, [x], [fetched], dim)
    repeated = plan.xp.repeat(fetched, count, axis=dim)
    return repeated[within(dim, slice(skipped, skipped + length))], None


@_repeat.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    count, dim = plan.attributes["count"], plan.attributes["dim"]
    spec = plan.inputs[0]
    wide = dtypes.accumulation_dtype(grad.dtype)
    group = moving_group(plan, LETTERS[dim])
    if group is None or count == 0:
        shape = spec.local_shape
        parts = grad.reshape(*shape[:dim], shape[dim], count, *shape[dim + 1 :])
        return (parts.sum(axis=dim + 1, dtype=wide).astype(grad.dtype, copy=False),)
    moves, needed, skipped, length = _repeat_needs(plan, group)
    before, after = grad.shape[:dim], grad.shape[dim + 1 :]
    whole = plan.backend.zeros((*before, needed * count, *after), grad.dtype)
    whole[within(dim, slice(skipped, skipped + length))] = grad
    parts = whole.reshape(*before, needed, count, *after)
    sums = parts.sum(axis=dim + 1, dtype=wide)
    made = plan.backend.zeros(spec.local_shape, wide)
    back = [move.reversed() for move in moves]
    carry_adding(group, back, [sums], [made], dim)
    return (made.astype(grad.dtype, copy=False),)


@method
def repeat(x: Tensor, count: int, dim: int = 0) -> Tensor:
    """Return `x` with each index of `dim` `count` times in a row.

    As NumPy's ``repeat``. Of a split dim each member fetches the indices that its chunk
    of the result repeats.

    Raises
    ------
    ShapeError
        If the dim does not exist, or the count is negative.
    """
    dim = normalize_dim(x, dim, "repeat")
    if not isinstance(count, Integral) or count < 0:
        raise ShapeError(
            f"repeat: the count must be a whole number, 0 or more, it is {count}"
        )
    if count == 1:
        return x
    result: Tensor = _repeat(x, count=int(count), dim=dim)
    return result


def _with_indices(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> tuple[np.dtype[Any], ...]:
    return operands[0], np.dtype(np.int64)


def _order(xp: Any, x: Any, dim: int, descending: bool) -> Any:
    """Stable order of the indices of `dim`; what is not a number counts as largest."""
    if not descending:
        return xp.argsort(x, axis=dim, kind="stable")
    # Equal elements keep their order if they are turned round before and after.
    order = xp.argsort(xp.flip(x, dim), axis=dim, kind="stable")
    return x.shape[dim] - 1 - xp.flip(order, dim)


def _sort_rule(x: tuple[int, ...], *, dim: int, descending: bool = False) -> str:
    letters = LETTERS[: len(x)]
    marked = f"{letters[:dim]}[{letters[dim]}]{letters[dim + 1 :]}"
    return f"{marked}->{marked},{marked}"


@operator(_sort_rule, name="sort", dtype=_with_indices)
def _sort(plan: Plan, x: Any) -> Any:
    """Return `x` in order along the attribute `dim`, and the indices of that order."""
    dim = plan.attributes["dim"]
    order = _order(plan.xp, x, dim, plan.attributes["descending"])
    order = order.astype(np.int64, copy=False)
    return (plan.xp.take_along_axis(x, order, dim), order), order


@_sort.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    shape, dim = plan.inputs[0].local_shape, plan.attributes["dim"]
    return (add_at(plan, saved, grad[0], shape, dim, 0),)


@method
def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return `x` in order along `dim`, and where the elements were: (values, indices).

    Equal elements keep their order; what is not a number counts as larger than all
    numbers. If `dim` is split the tensor is gathered along it (a warning says so).

    Raises
    ------
    ShapeError
        If the dim does not exist.
    """
    dim = normalize_dim(x, dim, "sort")
    values, indices = _sort(x, dim=dim, descending=bool(descending))
    return values, indices


def _topk_rule(
    x: tuple[int, ...], *, k: int, dim: int, largest: bool = True
) -> tuple[str, Sizes]:
    letters = string.ascii_lowercase[: len(x)]
    marked = f"{letters[:dim]}{{{letters[dim]}}}{letters[dim + 1 :]}"
    output = f"{letters[:dim]}K{letters[dim + 1 :]}"
    return f"{marked}->{output},{output}", {"K": k}


@operator(_topk_rule, name="topk", dtype=_with_indices)
def _topk(plan: Plan, x: Any) -> Any:
    """Return the first attribute `k` elements in order along `dim`, and where they are.

    Each member gives its own first ones, from which all choose.
    """
    k, dim = plan.attributes["k"], plan.attributes["dim"]
    factor = string.ascii_lowercase[dim]
    values, indices = _first(plan, x, k, dim)
    indices = indices.astype(np.int64, copy=False) + plan.factors[factor].offset
    if plan.factors[factor].axes:
        counts = [min(k, length) for length in _lengths(plan, factor)]
        values = _from_all(plan, factor, values, counts, dim)
        indices = _from_all(plan, factor, indices, counts, dim)
        values, chosen = _first(plan, values, k, dim)
        indices = plan.xp.take_along_axis(indices, chosen, dim)
    return (values, indices), indices


def _first(plan: Plan, x: Any, k: int, dim: int) -> tuple[Any, Any]:
    order = _order(plan.xp, x, dim, plan.attributes["largest"])
    order = order[within(dim, slice(0, k))]
    return plan.xp.take_along_axis(x, order, dim), order


def _lengths(plan: Plan, factor: str) -> list[int]:
    """How much of the factor each member holds, in the order of their chunks."""
    lengths = [plan.factors[factor].size]
    for axis in plan.factors[factor].axes:
        members = plan.place.shape[axis]
        lengths = [part for whole in lengths for part in chunk_sizes(whole, members)]
    return lengths


def _from_all(plan: Plan, factor: str, array: Any, counts: list[int], dim: int) -> Any:
    """The members' arrays, of which each has its count along `dim`, joined there."""
    shape = (*array.shape[:dim], max(counts), *array.shape[dim + 1 :])
    padded = plan.backend.zeros(shape, array.dtype)
    padded[within(dim, slice(0, array.shape[dim]))] = array
    pieces, _ = plan.collect(factor, padded)
    cut = [
        piece[within(dim, slice(0, count))]
        for piece, count in zip(pieces, counts, strict=True)
    ]
    return plan.xp.concatenate(cut, axis=dim)


@_topk.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    shape, dim = plan.inputs[0].local_shape, plan.attributes["dim"]
    offset = plan.factors[string.ascii_lowercase[dim]].offset
    return (add_at(plan, saved, grad[0], shape, dim, offset),)


@method
def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the `k` largest elements along `dim`, and where they are.

    In descending order (the smallest ones, ascending, if `largest` is false); of equal
    elements the first ones; what is not a number counts as larger than all numbers. If
    `dim` is split each member sends at most `k` elements and their indices.

    Returns
    -------
    values, indices
        Of size `k` along `dim`, which is whole.

    Raises
    ------
    ShapeError
        If the dim does not exist, or has not `k` elements.
    """
    dim = normalize_dim(x, dim, "topk")
    if not 0 <= k <= x.shape[dim]:
        raise ShapeError(
            f"topk: k must be from 0 to the {x.shape[dim]} elements of dim {dim}, "
            f"it is {k}"
        )
    values, indices = _topk(x, k=int(k), dim=dim, largest=bool(largest))
    return values, indices
