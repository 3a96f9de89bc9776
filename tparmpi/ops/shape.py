"""Other shapes for the same elements: reshape, transpose, expand."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from numbers import Integral
from operator import index, mul
from typing import Any

from tparmpi.backend import dtypes
from tparmpi.errors import ShapeError
from tparmpi.ops.reductions import normalize_dim
from tparmpi.sharding import Move, Shard, Span, bind, chunks_over, find_moves
from tparmpi.tensors import Plan, Tensor, method, operator
from tparmpi.tensors.moves import carry, carry_back, moving_group

_FIRST = Shard(0)


def _reshape_rule(
    x: tuple[int, ...], *, shape: tuple[int, ...], moved: bool = False
) -> tuple[str, dict[str, int]]:
    """Factor both shapes at the common boundaries of their cumulative products.

    A dim that is one factor on both sides may be sharded; of a split or merged dim, the
    leading factor. Where the boundaries do not nest, all dims must be whole. With the
    attribute `moved` the first dims may be sharded, and only they.
    """
    if moved:
        letters = iter(string.ascii_letters[1:])
        sizes = {"a": shape[0]}
        text = "<a>" + "".join(f"[{next(letters)}]" for _ in x[1:]) + "-><a>"
        for size in shape[1:]:
            letter = next(letters)
            sizes[letter] = size
            text += letter
        return text, sizes
    ends = sorted({*accumulate(x, mul), *accumulate(shape, mul)})
    nested = 0 not in x and all(b % a == 0 for a, b in pairwise(ends))
    if not nested:
        letters = iter(string.ascii_letters)
        left = [(next(letters), n) for n in x]
        right = [(next(letters), n) for n in shape]
        text = "->".join("".join(f"[{c}]" for c, _ in side) for side in (left, right))
        return text, dict(left + right)
    sizes = {}
    factors = []
    before = 1
    for letter, end in zip(
        string.ascii_letters, (e for e in ends if e > 1), strict=False
    ):
        sizes[letter] = end // before
        factors.append((before, end, letter))
        before = end
    text = "->".join(_written(side, factors) for side in (x, shape))
    return text, sizes


def _written(shape: tuple[int, ...], factors: list[tuple[int, int, str]]) -> str:
    text = ""
    before = 1
    for size in shape:
        end = before * size
        inside = "".join(c for a, b, c in factors if a >= before and b <= end)
        text += inside if len(inside) == 1 else f"({inside})" if inside else "1"
        before = end
    return text


def _reshape_moves(plan: Plan, group: Any) -> tuple[Move, ...]:
    """Members hold runs of the elements in C order, before and after."""
    (x,), (y,) = plan.inputs, plan.outputs
    held = tuple(
        tuple(
            (offset * prod(spec.shape[1:]), size * prod(spec.shape[1:]))
            for offset, size in chunks_over(spec.shape[0], group.size)
        )
        for spec in (x, y)
    )
    everything = (Span(0, 0, prod(x.shape)),)
    return find_moves(everything, held[:1], held[1:], group.rank)


def _moved_group(plan: Plan) -> Any:
    return moving_group(plan, "a") if plan.attributes["moved"] else None


@operator(_reshape_rule, name="reshape", linear=(0,), view=True)
def _reshape(plan: Plan, x: Any) -> Any:
    """Return `x` with the same elements in the attribute `shape`."""
    shape = plan.outputs[0].local_shape
    group = _moved_group(plan)
    if group is None:
        return x.reshape(shape), None
    made = plan.backend.empty(shape, x.dtype)
    moves = _reshape_moves(plan, group)
    carry(group, moves, [x.reshape(-1)], [made.reshape(-1)], 0)
    return made, None


@_reshape.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    shape = plan.inputs[0].local_shape
    group = _moved_group(plan)
    if group is None:
        return (grad.reshape(shape),)
    made = plan.backend.empty(shape, grad.dtype)
    moves = _reshape_moves(plan, group)
    carry_back(group, moves, [grad.reshape(-1)], [made.reshape(-1)], 0)
    return (made,)


@lru_cache(maxsize=4096)
def _keeps_first(x: tuple[int, ...], shape: tuple[int, ...], members: int) -> bool:
    """Whether the first dim may stay split over `members` where it lies."""
    text, sizes = _reshape_rule(x, shape=shape)
    rule = bind(text, [x], "reshape", sizes)
    factors = rule.operands[0][0]
    return bool(factors) and rule.shardable(factors[0], (members,))


def _must_move(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether only the first dim is split, over one axis, and cannot stay so."""
    if _FIRST not in x.layout or not shape:
        return False
    splits = [i for i, p in enumerate(x.layout) if isinstance(p, Shard)]
    if len(splits) != 1:
        return False
    return not _keeps_first(x.shape, shape, x.spec.place.shape[splits[0]])


@method
def reshape(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """Return the elements of `x`, in C order, in another shape.

    Of a dim that is split or merged only the leading factor may be sharded, and its
    size must divide by the members that share it. Otherwise, where the first dim is the
    only one that is sharded, by one axis, members exchange what they need for their
    chunks of the new first dim; in all other cases the tensor is gathered (a warning
    says so).

    Parameters
    ----------
    shape
        A number, or one for each dim, of which one may be -1 and is worked out.

    Raises
    ------
    ShapeError
        If the numbers of elements differ.
    """
    given = (shape,) if isinstance(shape, int | Integral) else tuple(shape)
    wanted = tuple(index(n) for n in given)
    if wanted.count(-1) == 1:
        known = prod(n for n in wanted if n != -1)
        if known and x.size % known == 0:
            wanted = tuple(x.size // known if n == -1 else n for n in wanted)
    if any(n < 0 for n in wanted) or prod(wanted) != x.size:
        raise ShapeError(
            f"reshape: a tensor of shape {x.shape} has {x.size} elements, which do not "
            f"fit the shape {given}"
        )
    result: Tensor = _reshape(x, shape=wanted, moved=_must_move(x, wanted))
    return result


def _transpose_rule(x: tuple[int, ...], *, dims: tuple[int, ...]) -> str:
    letters = string.ascii_letters[: len(x)]
    return f"{letters}->{''.join(letters[i] for i in dims)}"


@operator(_transpose_rule, name="transpose", linear=(0,), view=True)
def _transpose(plan: Plan, x: Any) -> Any:
    """Return `x` with its dims in the order of the attribute `dims`."""
    return x.transpose(plan.attributes["dims"]), None


@_transpose.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    dims = plan.attributes["dims"]
    return (grad.transpose([dims.index(i) for i in range(len(dims))]),)


@method
def transpose(x: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """Return `x` with its dims in the order `dims`, reversed by default. Local.

    Raises
    ------
    ShapeError
        If `dims` does not name every dim once.
    """
    if dims is None:
        dims = range(x.ndim)[::-1]
    order = tuple(i % x.ndim if -x.ndim <= i < x.ndim else i for i in dims)
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(
            f"transpose: {tuple(dims)} does not name each dim of {x.shape} once"
        )
    result: Tensor = _transpose(x, dims=order)
    return result


@method
def swap(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Return `x` with two dims in each other's place. Local.

    Raises
    ------
    ShapeError
        If a dim does not exist.
    """
    first = normalize_dim(x, dim0, "swap")
    second = normalize_dim(x, dim1, "swap")
    order = list(range(x.ndim))
    order[first], order[second] = second, first
    return transpose(x, order)


def _expand_rule(
    x: tuple[int, ...], *, shape: tuple[int, ...]
) -> tuple[str, dict[str, int]]:
    """A repeated dim has a letter in the output only."""
    sizes = {}
    operand, output = "", ""
    missing = len(shape) - len(x)
    for number, (letter, size) in enumerate(
        zip(string.ascii_letters, shape, strict=False)
    ):
        output += letter
        if number < missing or x[number - missing] != size:
            sizes[letter] = size
            operand += "1" if number >= missing else ""
        else:
            operand += letter
    return f"{operand}->{output}", sizes


@operator(_expand_rule, name="expand", linear=(0,), view=True)
def _expand(plan: Plan, x: Any) -> Any:
    """Return `x` repeated to the attribute `shape`."""
    return plan.xp.broadcast_to(x, plan.outputs[0].local_shape), None


@_expand.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    before, after = plan.inputs[0], plan.outputs[0]
    missing = len(after.shape) - len(before.shape)
    repeated = tuple(
        number
        for number, size in enumerate(after.shape)
        if number < missing or before.shape[number - missing] != size
    )
    total = grad.sum(axis=repeated, dtype=dtypes.accumulation_dtype(grad.dtype))
    return (total.astype(grad.dtype, copy=False).reshape(before.local_shape),)


@method
def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x` repeated along dims of size 1, and along new leading ones. Local.

    As NumPy's ``broadcast_to``; repeated dims are whole on every member, and nothing is
    copied.

    Parameters
    ----------
    shape
        That of the result; -1 keeps a dim as it is.

    Raises
    ------
    ShapeError
        If `x` does not broadcast to the shape.
    """
    wanted = tuple(int(size) for size in shape)
    missing = len(wanted) - x.ndim
    found = tuple(
        x.shape[i - missing] if size == -1 and i >= missing else size
        for i, size in enumerate(wanted)
    )
    fits = missing >= 0 and all(size >= 0 for size in found)
    if not fits or any(
        has not in (1, size) for has, size in zip(x.shape, found[missing:], strict=True)
    ):
        raise ShapeError(
            f"expand: a tensor of shape {x.shape} cannot be repeated to {wanted}: from "
            "the right, each of its dims must be 1 or the size wanted"
        )
    if found == x.shape:
        return x
    result: Tensor = _expand(x, shape=found)
    return result
