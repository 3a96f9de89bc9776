"""Elements by their indices: take, gather, scatter_add, one_hot, triangles, x[key]."""

from __future__ import annotations

import string
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tparmpi.backend import dtypes, has_values
from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops.keys import read_key
from tparmpi.ops.reductions import normalize_dim
from tparmpi.ops.shape import transpose
from tparmpi.ops.slicing import slice_of
from tparmpi.tensors import Plan, Tensor, method, operator, tensor

LOWER, UPPER = string.ascii_lowercase, string.ascii_uppercase


def _first_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    return operands[0]


def _refuse_no_integers(name: str, ids: Tensor) -> None:
    if ids.dtype.kind not in "iu":
        raise UsageError(f"{name}: indices must be integers, they are {ids.dtype}")


def _counted_from_0(name: str, ids: Any, size: int, dim: int) -> Any:
    """`ids` as int64, with those that count from the end counted from the start.

    Raises
    ------
    UsageError
        If one is out of range.
    """
    outside = _outside(ids, -size, size)
    if outside is not None:
        raise UsageError(
            f"{name}: the index {outside} is outside dim {dim} of size {size}; indices "
            f"go from {-size} to {size - 1}"
        )
    ids = ids.astype(np.int64)
    return ids + (ids < 0) * size


def _outside(ids: Any, first: int, stop: int) -> int | None:
    """One of the `ids` that is not from `first` to before `stop`, or None."""
    if ids.size and has_values(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < first or high >= stop:
            return low if low < first else high
    return None


def _take_rule(x: tuple[int, ...], ids: tuple[int, ...], *, dim: int) -> str:
    """A contraction over `dim` with a matrix of ones and zeros."""
    letters, rows = LOWER[: len(x)], UPPER[: len(ids)]
    return f"{letters},{rows}->{letters[:dim]}{rows}{letters[dim + 1 :]}"


@operator(_take_rule, name="take", linear=(0,), dtype=_first_dtype, cast=False)
def _take(plan: Plan, x: Any, ids: Any) -> Any:
    """Return the elements of `x` that `ids` name along the attribute `dim`."""
    dim = plan.attributes["dim"]
    shard = plan.factors[LOWER[dim]]
    ids = _counted_from_0("take", ids, shard.size, dim)
    xp = plan.xp
    if not shard.axes:
        return xp.take(x, ids, axis=dim), ids
    spec = plan.outputs[0]
    if shard.length == 0:
        return plan.backend.zeros(spec.local_shape, spec.dtype), ids
    at = ids - shard.offset
    inside = (at >= 0) & (at < shard.length)
    taken = xp.take(x, xp.where(inside, at, 0), axis=dim)
    mask = inside.reshape((*ids.shape, *[1] * (x.ndim - dim - 1)))
    return xp.where(mask, taken, xp.zeros((), x.dtype)), ids


@_take.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    dim = plan.attributes["dim"]
    shard = plan.factors[LOWER[dim]]
    ids = saved
    around = (*grad.shape[:dim], *grad.shape[dim + ids.ndim :])
    order = [
        *range(dim, dim + ids.ndim),
        *range(dim),
        *range(dim + ids.ndim, grad.ndim),
    ]
    rows = grad.transpose(order).reshape(ids.size, prod(around))
    rows = rows.astype(dtypes.accumulation_dtype(grad.dtype), copy=False)
    total = plan.backend.embedding_backward(
        rows, ids.reshape(-1), shard.offset, shard.length
    )
    total = total.astype(grad.dtype, copy=False).reshape(shard.length, *around)
    return plan.xp.moveaxis(total, 0, dim), None


@method
def take(x: Tensor, ids: Tensor, dim: int = 0) -> Tensor:
    """Return the elements of `x` that `ids` name along `dim`.

    The result has the dims of `ids` in place of `dim`. A contraction: if `dim` is
    split, each member gives its own elements, zeros for the others, and the result is a
    pending sum. `ids` may be split too.

    Parameters
    ----------
    ids
        Integers; negative ones count from the end.

    Raises
    ------
    ShapeError
        If the dim does not exist.
    UsageError
        If `ids` are no integers, or one is out of range; where `ids` are split, on the
        members that hold it.
    """
    dim = normalize_dim(x, dim, "take")
    _refuse_no_integers("take", ids)
    result: Tensor = _take(x, ids, dim=dim)
    return result


def _along_rule(x: tuple[int, ...], ids: tuple[int, ...], dim: int, name: str) -> str:
    """The letters of `x` and `ids`, those of dims that are repeated left out."""
    if len(x) != len(ids):
        raise ShapeError(
            f"{name}: indices of {len(ids)} dims are given for a tensor of {len(x)}; "
            "as many are needed"
        )
    left, right, output = "", "", ""
    for number, (letter, size, count) in enumerate(zip(LOWER, x, ids, strict=False)):
        if number == dim:
            left, right, output = left + letter, right + "I", output + "I"
            continue
        if size != count and 1 not in (size, count):
            raise ShapeError(
                f"{name}: dim {number} is {size} in a tensor of shape {x}, but {count} "
                f"in indices of shape {ids}; only dim {dim} may differ"
            )
        left += "1" if size == 1 != count else letter
        right += "1" if count == 1 != size else letter
        output += letter
    return f"{left},{right}->{output}"


def _gather_rule(x: tuple[int, ...], ids: tuple[int, ...], *, dim: int) -> str:
    return _along_rule(x, ids, dim, "gather")


def _positions(xp: Any, ids: Any, shape: tuple[int, ...], dim: int, first: int) -> Any:
    """Where in a block of `shape`, counted in C order, indices along `dim` lead.

    -1 where that is in another member's block, which starts elsewhere than at `first`.
    """
    at = ids - first
    inside = (at >= 0) & (at < shape[dim])
    position = at * prod(shape[dim + 1 :])
    for number, size in enumerate(shape):
        if number != dim and size != 1:
            step = prod(shape[number + 1 :])
            index = (
                xp.arange(0, size * step, step) if step else xp.zeros(size, np.int64)
            )
            position = position + index.reshape(size, *[1] * (len(shape) - number - 1))
    return xp.where(inside, position, -1)


def pick_at(
    plan: Plan, x: Any, ids: Any, dim: int, first: int, shape: tuple[int, ...]
) -> Any:
    """Return the elements of a block at `ids` along `dim`, zero outside. Local."""
    if x.size == 0:
        return plan.backend.zeros(shape, x.dtype)
    position = _positions(plan.xp, ids, x.shape, dim, first)
    picked = plan.xp.take(x.reshape(-1), plan.xp.where(position < 0, 0, position))
    return plan.xp.where(position < 0, plan.xp.zeros((), x.dtype), picked)


def add_at(
    plan: Plan, ids: Any, values: Any, shape: tuple[int, ...], dim: int, first: int
) -> Any:
    """Return a block of `shape` with `values` added up at `ids` along `dim`. Local.

    The adjoint of `pick_at`: values of equal indices are added in C order, in float32
    for halves; those outside of the block are left out.
    """
    wide = values.astype(dtypes.accumulation_dtype(values.dtype), copy=False)
    position = _positions(plan.xp, ids, shape, dim, first)
    position = plan.xp.broadcast_to(position, values.shape)
    total = plan.backend.embedding_backward(
        wide.reshape(-1, 1), position.reshape(-1), 0, prod(shape)
    )
    return total.astype(values.dtype, copy=False).reshape(shape)


@operator(_gather_rule, name="gather", linear=(0,), dtype=_first_dtype, cast=False)
def _gather(plan: Plan, x: Any, ids: Any) -> Any:
    """Return the elements of `x` at `ids` along the attribute `dim`."""
    dim = plan.attributes["dim"]
    shard = plan.factors[LOWER[dim]]
    ids = _counted_from_0("gather", ids, shard.size, dim)
    shape = plan.outputs[0].local_shape
    return pick_at(plan, x, ids, dim, shard.offset, shape), ids


@_gather.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    dim, shape = plan.attributes["dim"], plan.inputs[0].local_shape
    return add_at(plan, saved, grad, shape, dim, plan.factors[LOWER[dim]].offset), None


@method
def gather(x: Tensor, ids: Tensor, dim: int = 0) -> Tensor:
    """Return ``x[…, ids[…, i, …], …]``: elements of `x` at indices along `dim`.

    As NumPy's ``take_along_axis``. A contraction, as `take`: if `dim` of `x` is split
    the result is a pending sum and nothing is moved.

    Parameters
    ----------
    ids
        Integers, as many dims as `x` has; all but `dim` of the same size as in `x`, or
        1 in one of the two. Negative ones count from the end.

    Raises
    ------
    ShapeError
        If the dim does not exist, or the shapes do not fit.
    UsageError
        If `ids` are no integers, or one is out of range; where `ids` are split, on the
        members that hold it.
    """
    dim = normalize_dim(x, dim, "gather")
    _refuse_no_integers("gather", ids)
    result: Tensor = _gather(x, ids, dim=dim)
    return result


def _scatter_rule(
    x: tuple[int, ...], ids: tuple[int, ...], values: tuple[int, ...], *, dim: int
) -> str:
    """A sum of `x` and a contraction over the indices' own dim."""
    if ids != values:
        raise ShapeError(
            f"scatter_add: indices of shape {ids} and values of shape {values} must "
            "have the same"
        )
    rest = x[:dim], x[dim + 1 :]
    if len(x) != len(ids) or rest != (ids[:dim], ids[dim + 1 :]):
        raise ShapeError(
            f"scatter_add: indices of shape {ids} do not fit a tensor of shape {x}; "
            f"only dim {dim} may differ"
        )
    letters = LOWER[: len(x)]
    other = f"{letters[:dim]}I{letters[dim + 1 :]}"
    return f"{letters} + {other},{other}->{letters}"


def _scatter_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    return dtypes.promote(operands[0], operands[2])


@operator(
    _scatter_rule,
    name="scatter_add",
    linear=(0, 2),
    dtype=_scatter_dtype,
    cast=False,
)
def _scatter_add(plan: Plan, x: Any, ids: Any, values: Any) -> Any:
    """Return `x` with the `values` added at `ids` along the attribute `dim`."""
    dim, spec = plan.attributes["dim"], plan.outputs[0]
    shard = plan.factors[LOWER[dim]]
    ids = _counted_from_0("scatter_add", ids, shard.size, dim)
    leads = [plan.leads(number) for number in (0, 2)]
    total = x.astype(spec.dtype) if leads[0] else None
    if leads[1]:
        values = values.astype(spec.dtype, copy=False)
        added = add_at(plan, ids, values, spec.local_shape, dim, shard.offset)
        total = added if total is None else total + added
    if total is None:
        total = plan.backend.zeros(spec.local_shape, spec.dtype)
    return total, ids


@_scatter_add.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    dim = plan.attributes["dim"]
    offset, shape = plan.factors[LOWER[dim]].offset, plan.inputs[2].local_shape
    dvalues = pick_at(plan, grad, saved, dim, offset, shape) if wanted[2] else None
    return grad, None, dvalues


@method
def scatter_add(x: Tensor, ids: Tensor, values: Tensor, dim: int = 0) -> Tensor:
    """Return `x` with ``values[…, i, …]`` added at ``[…, ids[…, i, …], …]``.

    Values of equal indices are added up, in C order. If `dim` of `x` is split, each
    member adds what falls into its own part, and nothing is moved; if `dim` of `ids`
    and `values` is split the result is a pending sum.

    Parameters
    ----------
    ids
        Integers, of the shape of `x` but for `dim`; negative ones count from the end.
    values
        Of the shape of `ids`.

    Raises
    ------
    ShapeError
        If the dim does not exist, or the shapes do not fit.
    UsageError
        If `ids` are no integers, `values` and `x` are truth values, or an index is out
        of range; where `ids` are split, on the members that hold it.
    """
    dim = normalize_dim(x, dim, "scatter_add")
    _refuse_no_integers("scatter_add", ids)
    if x.dtype.kind == "b" and values.dtype.kind == "b":
        raise UsageError(
            "scatter_add: truth values are not added up; cast them to an integer dtype"
        )
    result: Tensor = _scatter_add(x, ids, values, dim=dim)
    return result


def _one_hot_rule(
    ids: tuple[int, ...], *, depth: int, dtype: np.dtype[Any]
) -> tuple[str, dict[str, int]]:
    return "...->...d", {"d": depth}


def _one_hot_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    dtype: np.dtype[Any] = attributes["dtype"]
    return dtype


@operator(_one_hot_rule, name="one_hot", dtype=_one_hot_dtype, cast=False)
def _one_hot(plan: Plan, ids: Any) -> Any:
    """Return ones at the `ids` along a new last dim of the attribute `depth`."""
    depth = plan.attributes["depth"]
    outside = _outside(ids, 0, depth)
    if outside is not None:
        raise UsageError(
            f"one_hot: the id {outside} is outside the depth of {depth}; ids go from 0 "
            f"to {depth - 1}"
        )
    hot = ids[..., None] == plan.xp.arange(depth)
    return hot.astype(plan.attributes["dtype"]), None


@method
def one_hot(ids: Tensor, depth: int, dtype: Any = None) -> Tensor:
    """Return zeros with a one at each id along a new last dim of size `depth`. Local.

    Parameters
    ----------
    ids : (...)
        Integers from 0 to `depth` - 1.
    dtype
        By default the place's default floating one.

    Returns
    -------
    Tensor : (..., depth)
        Split as `ids`; the new dim is whole.

    Raises
    ------
    UsageError
        If `ids` are no integers, or one is out of range; where `ids` are split, on the
        members that hold it.
    """
    _refuse_no_integers("one_hot", ids)
    if depth < 0:
        raise ShapeError(f"one_hot: the depth must be 0 or more, it is {depth}")
    kind = dtypes.dtype(ids.spec.place.settings.float if dtype is None else dtype)
    result: Tensor = _one_hot(ids, depth=int(depth), dtype=kind)
    return result


def _triangle_rule(x: tuple[int, ...], *, k: int, upper: bool) -> str:
    letters = LOWER[: len(x)]
    return f"{letters}->{letters}"


@operator(_triangle_rule, name="triangular", linear=(0,))
def _triangular(plan: Plan, x: Any) -> Any:
    """Return `x` with zeros on one side of diagonal `k`, above unless `upper`."""
    return plan.xp.where(_kept(plan), x, plan.xp.zeros((), x.dtype)), None


@_triangular.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (plan.xp.where(_kept(plan), grad, plan.xp.zeros((), grad.dtype)),)


def _kept(plan: Plan) -> Any:
    """Which of this rank's elements of each matrix stay."""
    k, upper = plan.attributes["k"], plan.attributes["upper"]
    rows, columns = (
        plan.xp.arange(shard.offset, shard.offset + shard.length)
        for shard in (
            plan.factors[LOWER[dim]] for dim in range(*_matrix_dims(plan.inputs[0]))
        )
    )
    distance = columns - rows[:, None]
    return distance >= k if upper else distance <= k


def _matrix_dims(x: Any) -> tuple[int, int]:
    ndim = len(x.shape)
    return ndim - 2, ndim


@method
def tril(x: Tensor, k: int = 0) -> Tensor:
    """Return `x` with zeros above diagonal `k` of its last two dims. Local.

    Raises
    ------
    ShapeError
        If there are fewer than two dims.
    """
    return _triangle(x, k, "tril", upper=False)


@method
def triu(x: Tensor, k: int = 0) -> Tensor:
    """Return `x` with zeros below diagonal `k` of its last two dims. Local.

    Raises
    ------
    ShapeError
        If there are fewer than two dims.
    """
    return _triangle(x, k, "triu", upper=True)


def _triangle(x: Tensor, k: int, name: str, *, upper: bool) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(f"{name}: a tensor of shape {x.shape} has fewer than two dims")
    result: Tensor = _triangular(x, k=int(k), upper=upper)
    return result


@method
def getitem(x: Tensor, key: Any) -> Tensor:
    """Return ``x[key]``, as NumPy gives it, for basic keys and one array of indices.

    A kept dim stays split. Of a split dim that a slice cuts, each member sends what
    another one's chunk of the result holds. One index of a split dim, and indices from
    an array as in `take`, make a pending sum. Local in all other cases.

    Parameters
    ----------
    key
        Integers, slices of any step, None for a new dim, one Ellipsis, and at most one
        tensor or array of integers; or a tuple of these. Negative indices count from
        the end.

    Raises
    ------
    ShapeError
        If there are too many indices, or an integer is out of range.
    UsageError
        If the key has anything else in it, or an index of a tensor is out of range.
    """
    read = read_key(x.shape, key)
    y = slice_of(x, read.cuts, read.new)
    if read.ids is None:
        return y
    ids = read.ids
    if not isinstance(ids, Tensor):
        ids = tensor(ids, x.spec.place)
    y = take(y, ids, read.dim)
    if read.in_front and read.dim:
        moved = range(read.dim, read.dim + ids.ndim)
        y = transpose(y, [*moved, *(i for i in range(y.ndim) if i not in moved)])
    return y
