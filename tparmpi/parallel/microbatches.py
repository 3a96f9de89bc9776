"""Cutting a batch into microbatches.

Each member of the axes that split the batch cuts its own rows, so that a cut moves
nothing: microbatch i of the whole batch is made of everybody's part i.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from tparmpi.backend import MetaArray
from tparmpi.errors import ShapeError, UsageError
from tparmpi.sharding import Shard, block, chunk, sharding_axes
from tparmpi.tensors import Tensor, nests, spec_of

Run = tuple[int, int]
"""First row and number of rows."""


def rows_held(batch: int, parts: Sequence[int]) -> list[Run]:
    """Return the rows of each member of axes of sizes `parts` that split `batch`."""
    layout = (Shard(0),) * len(parts)
    runs = []
    for coordinates in product(*map(range, parts)):
        (first,), (count,) = block((batch,), layout, tuple(parts), coordinates)
        runs.append((first, count))
    return runs


def rows_of(
    batch: int, parts: Sequence[int], microbatches: int, number: int
) -> list[Run]:
    """Return the rows of the batch that microbatch `number` is made of, in order."""
    runs = []
    for first, count in rows_held(batch, parts):
        offset, length = chunk(count, microbatches, number)
        runs.append((first + offset, length))
    return runs


def parts_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the sizes of the axes that split the rows of `tensor`, outermost first."""
    sizes = tensor.spec.place.shape
    return tuple(sizes[axis] for axis in sharding_axes(tensor.layout, 0))


def batch_of(name: str, nest: Any) -> tuple[int, tuple[int, ...]]:
    """Return the number of rows of all tensors of `nest`, and how they are split.

    Raises
    ------
    UsageError
        If there is no tensor with dims.
    ShapeError
        If they differ.
    """
    tensors = [tensor for tensor in nests.tensors_in(nest) if tensor.ndim]
    if not tensors:
        raise UsageError(f"{name}: give a tensor whose dim 0 is the batch")
    batch, parts = tensors[0].shape[0], parts_of(tensors[0])
    for tensor in tensors:
        if tensor.shape[0] != batch or parts_of(tensor) != parts:
            raise ShapeError(
                f"{name}: all tensors must have the same rows, split alike; one has "
                f"{batch} rows over {parts or 1}, one {tensor.shape[0]} over "
                f"{parts_of(tensor) or 1}"
            )
    return batch, parts


def cut(nest: Any, microbatches: int, number: int) -> Any:
    """Return the rows of microbatch `number` of every tensor in `nest`. Local.

    Tensors without dims stay as they are.
    """

    def part(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        spec = tensor.spec
        runs = rows_of(tensor.shape[0], parts_of(tensor), microbatches, number)
        rows = sum(count for _, count in runs)
        made = spec_of(spec.place, (rows, *spec.shape[1:]), spec.dtype, spec.layout)
        if tensor.is_shell:
            array: Any = MetaArray(made.local_shape, made.dtype)
        else:
            first, count = chunk(spec.local_shape[0], microbatches, number)
            array = tensor.array[first : first + count]
        return Tensor(made, array, tensor.device)

    return nests.replace(nest, part)
