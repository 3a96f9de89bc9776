"""Cutting a batch into microbatches.

Each member of the axes that split the batch cuts its own rows, so that a cut moves
nothing: microbatch i of the whole batch is made of everybody's part i. Tensors that
are whole give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    axes = sharding_axes(tensor.layout, 0)
    return tuple(sizes[axis] for axis in axes if sizes[axis] > 1)


@dataclass(frozen=True)
class Cut:
    """How a batch is cut.

    Attributes
    ----------
    batch
        Number of rows.
    parts
        Sizes of the axes that split them.
    microbatches
        How many there are.
    """

    batch: int
    parts: tuple[int, ...]
    microbatches: int

    def rows(self, number: int) -> list[Run]:
        """Return the rows of microbatch `number`, in order. Local."""
        return rows_of(self.batch, self.parts, self.microbatches, number)

    def take(self, nest: Any, number: int) -> Any:
        """Return the rows of microbatch `number` of every tensor in `nest`. Local.

        Tensors without dims stay as they are.
        """
        return nests.replace(nest, lambda tensor: self._rows(tensor, number))

    def _rows(self, tensor: Tensor, number: int) -> Tensor:
        if not tensor.ndim:
            return tensor
        spec, runs = tensor.spec, self.rows(number)
        rows = sum(count for _, count in runs)
        made = spec_of(spec.place, (rows, *spec.shape[1:]), spec.dtype, spec.layout)
        if tensor.is_shell:
            return Tensor(made, MetaArray(made.local_shape, made.dtype), tensor.device)
        if parts_of(tensor):
            runs = [chunk(spec.local_shape[0], self.microbatches, number)]
        pieces = [tensor.array[first : first + count] for first, count in runs]
        xp = spec.place.backend.xp
        array = pieces[0] if len(pieces) == 1 else xp.concatenate(pieces)
        return Tensor(made, array, tensor.device)


def cut_of(features: Any, targets: Any, microbatches: int) -> Cut:
    """Return how the batch of `features` and `targets` is cut. Local.

    Raises
    ------
    UsageError
        If one of them has no tensor with dims.
    ShapeError
        If tensors have not the same rows, or are split in different ways.
    """
    rows = [_rows_in("features", features), _rows_in("targets", targets)]
    if rows[0] != rows[1]:
        raise ShapeError(
            f"Pipeline: the features have {rows[0]} rows, the targets {rows[1]}"
        )
    tensors = nests.tensors_in([features, targets])
    splits = {parts_of(tensor) for tensor in tensors if tensor.ndim} - {()}
    if len(splits) > 1:
        raise ShapeError(
            "Pipeline: features and targets must be split alike along the batch, or be "
            f"whole; they are split in {' and in '.join(map(str, sorted(splits)))}"
        )
    return Cut(rows[0], splits.pop() if splits else (), microbatches)


def _rows_in(name: str, nest: Any) -> int:
    rows = {tensor.shape[0] for tensor in nests.tensors_in(nest) if tensor.ndim}
    if not rows:
        raise UsageError(f"Pipeline: the {name} have no tensor whose dim 0 is a batch")
    if len(rows) > 1:
        counts = " and ".join(map(str, sorted(rows)))
        raise ShapeError(
            f"Pipeline: the {name} have tensors of {counts} rows; all must have those "
            "of one batch"
        )
    return rows.pop()
