"""Joining tensors and cutting them into pieces."""

from __future__ import annotations

import string
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tparmpi.errors import ShapeError
from tparmpi.ops.reductions import normalize_dim
from tparmpi.ops.slicing import expand_dims
from tparmpi.sharding import Move, Span
from tparmpi.tensors import Plan, Tensor, method, operator
from tparmpi.tensors.moves import carry, carry_back, moves_between, moving_group


def _marked(ndim: int, dim: int) -> str:
    """One letter for each dim, that of `dim` moved."""
    letters = string.ascii_letters[:ndim]
    return f"{letters[:dim]}<{letters[dim]}>{letters[dim + 1 :]}"


def _split_rule(
    x: tuple[int, ...], *, sizes: tuple[int, ...], dim: int
) -> tuple[str, dict[str, tuple[int, ...]]]:
    marked = _marked(len(x), dim)
    outputs = ",".join([marked] * len(sizes))
    return f"{marked}->{outputs}", {string.ascii_letters[dim]: sizes}


def _split_moves(plan: Plan, group: Any) -> tuple[Move, ...]:
    sizes, dim = plan.attributes["sizes"], plan.attributes["dim"]
    starts = accumulate(sizes, initial=0)
    spans = [
        Span(start, 0, size, output=number)
        for number, (start, size) in enumerate(zip(starts, sizes, strict=False))
    ]
    return moves_between(group, spans, [plan.inputs[0].shape[dim]], sizes)


@operator(_split_rule, name="split", linear=(0,), view=True)
def _split(plan: Plan, x: Any) -> Any:
    """Return pieces of `x` along the attribute `dim`, of the attribute `sizes`."""
    sizes, dim = plan.attributes["sizes"], plan.attributes["dim"]
    group = moving_group(plan, string.ascii_letters[dim])
    if group is None:
        pieces = plan.xp.split(x, list(accumulate(sizes))[:-1], axis=dim)
    else:
        pieces = [plan.backend.empty(s.local_shape, x.dtype) for s in plan.outputs]
        carry(group, _split_moves(plan, group), [x], pieces, dim)
    return (pieces[0] if len(pieces) == 1 else tuple(pieces)), None


@_split.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    dim = plan.attributes["dim"]
    pieces = grad if isinstance(grad, tuple) else (grad,)
    group = moving_group(plan, string.ascii_letters[dim])
    if group is None:
        return (plan.xp.concatenate(pieces, axis=dim),)
    made = plan.backend.empty(plan.inputs[0].local_shape, pieces[0].dtype)
    carry_back(group, _split_moves(plan, group), pieces, [made], dim)
    return (made,)


@method
def split(x: Tensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return pieces of `x` along `dim`.

    Of a split dim each member sends what other members' chunks of the pieces hold.

    Parameters
    ----------
    sizes
        The pieces' sizes, or a number of equal pieces.

    Raises
    ------
    ShapeError
        If the sizes do not add up.
    """
    dim = normalize_dim(x, dim, "split")
    length = x.shape[dim]
    if isinstance(sizes, int | np.integer):
        if sizes < 1 or length % sizes:
            raise ShapeError(
                f"split: dim {dim} of size {length} has no {sizes} equal pieces"
            )
        sizes = (length // sizes,) * sizes
    sizes = tuple(map(int, sizes))
    if not sizes or sum(sizes) != length or min(sizes) < 0:
        raise ShapeError(f"split: {sizes} do not add up to dim {dim} of size {length}")
    pieces = _split(x, sizes=sizes, dim=dim)
    return pieces if isinstance(pieces, tuple) else (pieces,)


def _concat_rule(*shapes: tuple[int, ...], dim: int) -> tuple[str, dict[str, int]]:
    marked = _marked(len(shapes[0]), dim)
    total = sum(shape[dim] for shape in shapes)
    operands = ",".join([marked] * len(shapes))
    return f"{operands}->{marked}", {string.ascii_letters[dim]: total}


def _concat_moves(plan: Plan, group: Any) -> tuple[Move, ...]:
    dim = plan.attributes["dim"]
    sizes = [spec.shape[dim] for spec in plan.inputs]
    firsts = accumulate(sizes, initial=0)
    spans = [
        Span(0, first, size, operand=number)
        for number, (first, size) in enumerate(zip(firsts, sizes, strict=False))
    ]
    return moves_between(group, spans, sizes, [sum(sizes)])


@operator(_concat_rule, name="concat", additive=True)
def _concat(plan: Plan, *operands: Any) -> Any:
    """Return the operands joined along the attribute `dim`."""
    dim = plan.attributes["dim"]
    group = moving_group(plan, string.ascii_letters[dim])
    if group is None:
        return plan.xp.concatenate(operands, axis=dim), None
    spec = plan.outputs[0]
    made = plan.backend.empty(spec.local_shape, spec.dtype)
    carry(group, _concat_moves(plan, group), operands, [made], dim)
    return made, None


@_concat.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    dim = plan.attributes["dim"]
    group = moving_group(plan, string.ascii_letters[dim])
    if group is None:
        ends = list(accumulate(spec.shape[dim] for spec in plan.inputs))
        pieces = plan.xp.split(grad, ends[:-1], axis=dim)
    else:
        pieces = [plan.backend.empty(s.local_shape, grad.dtype) for s in plan.inputs]
        moves = [m for m in _concat_moves(plan, group) if wanted[m.source.array]]
        carry_back(group, moves, [grad], pieces, dim)
    return tuple(
        piece if want else None for piece, want in zip(pieces, wanted, strict=True)
    )


def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the tensors joined along `dim`.

    Where it is split each member sends what another one's chunk of the result holds.

    Raises
    ------
    ShapeError
        If there are none, or their other dims differ.
    """
    tensors = tuple(tensors)
    if not tensors:
        raise ShapeError("concat: there are no tensors to join")
    dim = normalize_dim(tensors[0], dim, "concat")
    for number, tensor in enumerate(tensors):
        if tensor.ndim != tensors[0].ndim:
            raise ShapeError(
                f"concat: operand {number} has {tensor.ndim} dims, "
                f"operand 0 has {tensors[0].ndim}"
            )
    result: Tensor = _concat(*tensors, dim=dim)
    return result


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the tensors, all of one shape, side by side along a new dim `dim`. Local.

    Raises
    ------
    ShapeError
        If there are none, their shapes differ, or the result has no such dim.
    """
    tensors = tuple(tensors)
    if not tensors:
        raise ShapeError("stack: there are no tensors to join")
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if tensor.shape != first.shape:
            raise ShapeError(
                f"stack: operand {number} has the shape {tensor.shape}, "
                f"operand 0 has {first.shape}"
            )
    if not -first.ndim - 1 <= dim <= first.ndim:
        raise ShapeError(
            f"stack: tensors of shape {first.shape} have no place for a new dim {dim}"
        )
    dim %= first.ndim + 1
    return concat([expand_dims(tensor, dim) for tensor in tensors], dim)
