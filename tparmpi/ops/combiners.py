"""What reductions over split dims share: their rule, and how members' parts meet.

Between the steps the reduced dims are kept with size 1, so that results stretch over
the operand again. Members exchange such small arrays only, never the operand.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import ShapeError, UsageError
from tparmpi.sharding import chunk_sizes
from tparmpi.tensors import Plan, Tensor


def reduced_rule(
    x: tuple[int, ...],
    dims: tuple[int, ...],
    keepdims: bool,
    opening: str = "",
    closing: str = "",
) -> str:
    """Return the rule of a reduction of shape `x` over `dims`.

    Parameters
    ----------
    opening, closing
        What stands around the reduced dims' letters.
    """
    operand, kept = "", ""
    for dim, letter in enumerate(string.ascii_letters[: len(x)]):
        if dim in dims:
            operand += f"{opening}{letter}{closing}"
            kept += "1" if keepdims else ""
        else:
            operand += letter
            kept += letter
    return f"{operand}->{kept}"


def combined_rule(
    x: tuple[int, ...], *, dims: tuple[int, ...], keepdims: bool = False
) -> str:
    """Return the rule of a reduction that combines the pieces of split `dims`."""
    return reduced_rule(x, dims, keepdims, "{", "}")


def sum_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    """Return the dtype of a sum or product: narrow integers become the widest, as in
    NumPy.
    """
    (dtype,) = operands
    if dtype.kind in "bi":
        return np.result_type(dtype, np.int64)
    return np.result_type(dtype, np.uint64) if dtype.kind == "u" else dtype


def widened(x: Any) -> Any:
    """Return `x`, if it is of a half type as float32."""
    return x.astype(dtypes.accumulation_dtype(x.dtype), copy=False)


def kept_shape(plan: Plan) -> tuple[int, ...]:
    """Return the local shape of the operand with its reduced dims of size 1."""
    dims = plan.attributes["dims"]
    local = plan.inputs[0].local_shape
    return tuple(1 if dim in dims else size for dim, size in enumerate(local))


def local_count(plan: Plan) -> int:
    """Return how many elements of this rank's block are reduced to one."""
    local = plan.inputs[0].local_shape
    return prod(local[dim] for dim in plan.attributes["dims"])


def finished(plan: Plan, kept: Any) -> Any:
    """Return the output that `kept`, with its reduced dims of size 1, amounts to."""
    (output,) = plan.outputs
    return kept.reshape(output.local_shape).astype(output.dtype, copy=False)


def spread(plan: Plan, grad: Any) -> Any:
    """Return the output's gradient with the reduced dims of size 1, halves widened."""
    return widened(grad.reshape(kept_shape(plan)))


def narrowed(plan: Plan, grad: Any) -> Any:
    """Return `grad` in the dtype of the operand."""
    return grad.astype(plan.inputs[0].dtype, copy=False)


def combine(plan: Plan, array: Any, op: str = "sum") -> Any:
    """Return `array` reduced by `op` over the members that split reduced dims.

    Collective over the axes that split them; `array` itself where none does.
    """
    for dim in plan.attributes["dims"]:
        array = plan.combine(string.ascii_letters[dim], array, op)
    return array


def collect(plan: Plan, array: Any) -> tuple[Any, int]:
    """Return the `array` of each member that splits reduced dims, and our number.

    Collective over the axes that split them.

    Returns
    -------
    pieces : (members, *array.shape)
        The same on every member; in the order of `counts`.
    number
        Which of them is this rank's.
    """
    pieces, number = array[None], 0
    for dim in plan.attributes["dims"]:
        letter = string.ascii_letters[dim]
        if plan.factors[letter].axes:
            inner = len(pieces)
            stacked, place = plan.collect(letter, pieces)
            pieces = stacked.reshape(len(stacked) * inner, *array.shape)
            number += place * inner
    return pieces, number


def counts(plan: Plan) -> list[int]:
    """Return how many elements each member of `collect` reduces to one. Local."""
    found = [1]
    for dim in plan.attributes["dims"]:
        factor = plan.factors[string.ascii_letters[dim]]
        sizes = [factor.size]
        for axis in factor.axes:
            parts = plan.place.shape[axis]
            sizes = [part for size in sizes for part in chunk_sizes(size, parts)]
        found = [size * inner for size in sizes for inner in found]
    return found


def refuse_empty(name: str, x: Tensor, dims: tuple[int, ...]) -> int:
    """Return how many elements of `x` are reduced to one; refuse none.

    Raises
    ------
    ShapeError
        If there are none.
    """
    count = prod(x.shape[dim] for dim in dims)
    if count == 0:
        raise ShapeError(
            f"{name}: a tensor of shape {x.shape} has no elements over the dims "
            f"{dims}, and at least one is needed; skip the call for such a tensor"
        )
    return count


def refuse_complex(name: str, x: Tensor) -> None:
    """Refuse complex numbers.

    Raises
    ------
    UsageError
        If `x` is complex.
    """
    if dtypes.is_complex(x.dtype):
        raise UsageError(
            f"{name}: is defined for real numbers, and the tensor is {x.dtype}; pass "
            "its real or imaginary part"
        )
