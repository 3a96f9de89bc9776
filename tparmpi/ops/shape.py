"""Operators that move elements and change none."""

from __future__ import annotations

import string
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Any

from tparmpi.errors import ShapeError
from tparmpi.ops.reductions import normalize_dims
from tparmpi.tensors import Plan, Tensor, method, operator


def _reshape_rule(
    x: tuple[int, ...], *, shape: tuple[int, ...]
) -> tuple[str, dict[str, int]]:
    """Factor both shapes at the common boundaries of their cumulative products.

    A dim that is one factor on both sides may be sharded; of a split or merged dim, the
    leading factor. Where the boundaries do not nest, all dims must be whole.
    """
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


@operator(_reshape_rule, name="reshape", linear=(0,), view=True)
def _reshape(plan: Plan, x: Any) -> Any:
    """Return `x` with the same elements in the attribute `shape`."""
    return x.reshape(plan.outputs[0].local_shape), None


@_reshape.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad.reshape(plan.inputs[0].local_shape),)


@method
def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the elements of `x`, in C order, in another shape.

    Of a dim that is split or merged only the leading factor may be sharded, and its
    size must divide by the members that share it; otherwise the tensor is gathered (a
    warning says so).

    Parameters
    ----------
    shape
        One dim may be -1 and is worked out.

    Raises
    ------
    ShapeError
        If the numbers of elements differ.
    """
    wanted = tuple(int(n) for n in shape)
    if wanted.count(-1) == 1:
        known = prod(n for n in wanted if n != -1)
        if known and x.size % known == 0:
            wanted = tuple(x.size // known if n == -1 else n for n in wanted)
    if any(n < 0 for n in wanted) or prod(wanted) != x.size:
        raise ShapeError(
            f"reshape: a tensor of shape {x.shape} has {x.size} elements, which do not "
            f"fit the shape {tuple(shape)}"
        )
    result: Tensor = _reshape(x, shape=wanted)
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


def _split_rule(
    x: tuple[int, ...], *, sizes: tuple[int, ...], dim: int
) -> tuple[str, dict[str, int]]:
    letters = string.ascii_lowercase[: len(x)]
    parts = string.ascii_uppercase
    if len(sizes) > len(parts):
        raise ShapeError(f"split: at most {len(parts)} parts, not {len(sizes)}")
    marked = f"{letters[:dim]}[{letters[dim]}]{letters[dim + 1 :]}"
    outputs = [marked.replace(letters[dim], part) for part in parts[: len(sizes)]]
    return f"{marked}->{','.join(outputs)}", dict(zip(parts, sizes, strict=False))


@operator(_split_rule, name="split", linear=(0,), view=True)
def _split(plan: Plan, x: Any) -> Any:
    """Return pieces of `x` along the attribute `dim`, of the attribute `sizes`."""
    ends = list(accumulate(plan.attributes["sizes"]))
    pieces = plan.xp.split(x, ends[:-1], axis=plan.attributes["dim"])
    return (pieces[0] if len(pieces) == 1 else tuple(pieces)), None


@_split.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    pieces = grad if isinstance(grad, tuple) else (grad,)
    return (plan.xp.concatenate(pieces, axis=plan.attributes["dim"]),)


@method
def split(x: Tensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return pieces of `x` along `dim`, which must not be sharded.

    Parameters
    ----------
    sizes
        The pieces' sizes, or a number of equal pieces.

    Raises
    ------
    ShapeError
        If the sizes do not add up.
    """
    (dim,) = normalize_dims(x, dim, "split")
    length = x.shape[dim]
    if isinstance(sizes, int):
        if sizes < 1 or length % sizes:
            raise ShapeError(
                f"split: dim {dim} of size {length} has no {sizes} equal pieces"
            )
        sizes = (length // sizes,) * sizes
    sizes = tuple(sizes)
    if sum(sizes) != length or min(sizes) < 0:
        raise ShapeError(f"split: {sizes} do not add up to dim {dim} of size {length}")
    pieces = _split(x, sizes=sizes, dim=dim)
    return pieces if isinstance(pieces, tuple) else (pieces,)


def _concat_rule(*shapes: tuple[int, ...], dim: int) -> tuple[str, dict[str, int]]:
    letters = string.ascii_lowercase[: len(shapes[0])]
    marked = f"{letters[:dim]}[{letters[dim]}]{letters[dim + 1 :]}"
    parts = string.ascii_uppercase[:-1]
    if len(shapes) > len(parts):
        raise ShapeError(f"concat: at most {len(parts)} operands, not {len(shapes)}")
    operands = [marked.replace(letters[dim], part) for part in parts[: len(shapes)]]
    total = sum(shape[dim] for shape in shapes)
    return f"{','.join(operands)}->{marked.replace(letters[dim], 'Z')}", {"Z": total}


@operator(_concat_rule, name="concat", additive=True)
def _concat(plan: Plan, *operands: Any) -> Any:
    """Return the operands joined along the attribute `dim`."""
    return plan.xp.concatenate(operands, axis=plan.attributes["dim"]), None


@_concat.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    dim = plan.attributes["dim"]
    ends = list(accumulate(spec.shape[dim] for spec in plan.inputs))
    pieces = plan.xp.split(grad, ends[:-1], axis=dim)
    return tuple(
        piece if want else None for piece, want in zip(pieces, wanted, strict=True)
    )


def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the tensors joined along `dim`, which must not be sharded.

    Raises
    ------
    ShapeError
        If there are none, or their other dims differ.
    """
    tensors = tuple(tensors)
    if not tensors:
        raise ShapeError("concat: there are no tensors to join")
    (dim,) = normalize_dims(tensors[0], dim, "concat")
    for number, tensor in enumerate(tensors):
        if tensor.ndim != tensors[0].ndim:
            raise ShapeError(
                f"concat: operand {number} has {tensor.ndim} dims, "
                f"operand 0 has {tensors[0].ndim}"
            )
    result: Tensor = _concat(*tensors, dim=dim)
    return result
