"""Basic slices: picked indices and runs of indices of some dims, dims of size 1."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from tparmpi.errors import ShapeError
from tparmpi.ops.reductions import normalize_dims
from tparmpi.sharding import Span
from tparmpi.tensors import Plan, Tensor, method, operator
from tparmpi.tensors.moves import Touched, rearrange, rearrange_back

Cut = int | tuple[int, int, int] | None
"""What becomes of a dim: one index is picked, or (start, step, length) is kept, or all
of it."""

LETTERS = string.ascii_letters


def _slice_rule(
    x: tuple[int, ...], *, cuts: tuple[Cut, ...], new: tuple[int, ...] = ()
) -> tuple[str, dict[str, int | tuple[int, ...]]]:
    """A kept dim may be split, a cut one is moved, a picked one is contracted."""
    sizes: dict[str, int | tuple[int, ...]] = {}
    operand, output = "", []
    for letter, cut in zip(LETTERS, cuts, strict=False):
        if isinstance(cut, tuple):
            sizes[letter] = cut[2]
            operand += f"<{letter}>"
            output.append(f"<{letter}>")
        else:
            operand += letter
            if cut is None:
                output.append(letter)
    for at in new:
        output.insert(at, "1")
    return f"{operand}->{''.join(output)}", sizes


@operator(_slice_rule, name="getitem", linear=(0,), view=True)
def basic_slice(plan: Plan, x: Any) -> Any:
    """Return what the attribute `cuts` leaves of each dim of `x`.

    Dims of size 1 are put in where the attribute `new` says in the output.
    """
    picks = _picks(plan)
    if picks is None:
        spec = plan.outputs[0]
        return plan.backend.zeros(spec.local_shape, spec.dtype), None
    y = rearrange(plan, x[picks], _touched(plan))
    return y.reshape(plan.outputs[0].local_shape), None


@basic_slice.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    spec = plan.inputs[0]
    picks = _picks(plan)
    if picks is None:
        return (plan.backend.zeros(spec.local_shape, spec.dtype),)
    sizes = iter(grad.shape[i] for i in _kept_dims(plan))
    shape = [
        1 if isinstance(cut, int) else next(sizes) for cut in plan.attributes["cuts"]
    ]
    grad = rearrange_back(plan, grad.reshape(shape), _touched(plan))
    if not any(isinstance(cut, int) for cut in plan.attributes["cuts"]):
        return (grad,)
    whole = plan.backend.zeros(spec.local_shape, grad.dtype)
    whole[picks] = grad
    return (whole,)


def _kept_dims(plan: Plan) -> list[int]:
    """The output's dims that are none of the new ones."""
    return [
        i for i in range(len(plan.outputs[0].shape)) if i not in plan.attributes["new"]
    ]


def _picks(plan: Plan) -> tuple[slice, ...] | None:
    """This rank's block with picked dims cut to size 1.

    None if a picked index lies with another member: this one's summand is zero.
    """
    picks = []
    for letter, cut in zip(LETTERS, plan.attributes["cuts"], strict=False):
        if not isinstance(cut, int):
            picks.append(slice(None))
            continue
        shard = plan.factors[letter]
        at = cut - shard.offset
        if not 0 <= at < shard.length:
            return None
        picks.append(slice(at, at + 1))
    return tuple(picks)


def _touched(plan: Plan) -> Touched:
    return {
        dim: (LETTERS[dim], (Span(cut[0], 0, cut[2], cut[1]),), cut[2])
        for dim, cut in enumerate(plan.attributes["cuts"])
        if isinstance(cut, tuple)
    }


def slice_of(x: Tensor, cuts: Sequence[Cut], new: Sequence[int] = ()) -> Tensor:
    """Return what `cuts` leave of each dim of `x`, which is itself if they leave all.

    Parameters
    ----------
    cuts
        For each dim, within its bounds.
    new
        Numbers of the result's dims of size 1 that `x` has not, ascending.
    """
    cuts = tuple(
        None if cut == (0, 1, size) else cut
        for cut, size in zip(cuts, x.shape, strict=True)
    )
    if not new and all(cut is None for cut in cuts):
        return x
    result: Tensor = basic_slice(x, cuts=cuts, new=tuple(new))
    return result


@method
def flip(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return `x` with the order of the indices of `dim`, or of all dims, reversed.

    Of a split dim each member sends what another one's chunk holds afterwards.

    Raises
    ------
    ShapeError
        If a dim does not exist.
    """
    dims = normalize_dims(x, dim, "flip")
    return slice_of(
        x,
        [
            (size - 1, -1, size) if i in dims and size > 1 else None
            for i, size in enumerate(x.shape)
        ],
    )


@method
def squeeze(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return `x` without the dims `dim` of size 1, or without all of size 1. Local.

    If such a dim is split the result is a pending sum: one member holds the values.

    Raises
    ------
    ShapeError
        If a dim does not exist, or has another size.
    """
    if dim is None:
        dims = tuple(i for i, size in enumerate(x.shape) if size == 1)
    else:
        dims = normalize_dims(x, dim, "squeeze")
    for i in dims:
        if x.shape[i] != 1:
            raise ShapeError(
                f"squeeze: dim {i} of {x.shape} is of size {x.shape[i]}, not 1"
            )
    return slice_of(x, [0 if i in dims else None for i in range(x.ndim)])


@method
def expand_dims(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return `x` with dims of size 1 where `dim` says in the result. Local.

    Raises
    ------
    ShapeError
        If the result has no such dim, or one is given twice.
    """
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    ndim = x.ndim + len(dims)
    if not all(-ndim <= i < ndim for i in dims):
        raise ShapeError(
            f"expand_dims: a result of {ndim} dims has not the dims {tuple(dims)}"
        )
    new = sorted(i % ndim for i in dims)
    if len(set(new)) != len(new):
        raise ShapeError(f"expand_dims: a dim stands twice in {tuple(dims)}")
    return slice_of(x, [None] * x.ndim, new)
