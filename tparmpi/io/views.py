"""Tensors made out of stored ones and read part by part. Local: no MPI here.

A view knows how each of its boxes lies in the tensors it is made of, so that a rank
reads its own block of a transposed, split or merged tensor and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import CheckpointError
from tparmpi.io.planner import Box
from tparmpi.io.slabs import slabs

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_COMPLEX = frozenset({"complex64", "complex128"})


class Reader(Protocol):
    """Reads parts of stored tensors by their names."""

    def read(self, name: str, box: Box) -> np.ndarray:
        """The part `box` of a tensor, as a fresh array in its own dtype."""

    def read_into(self, name: str, box: Box, target: np.ndarray) -> None:
        """The part `box` of a tensor, to an array of its shape and dtype."""

    def check(self, name: str, box: Box) -> None:
        """Find what is wrong with the part `box` of a tensor, keeping nothing of it."""


class View(Protocol):
    """A tensor that can be read in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""

    @property
    def dtype(self) -> str:
        """The name of its dtype."""

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """The part `box` of it."""


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """The part `box` of it."""
        return reader.read(self.name, box)


@dataclass(frozen=True)
class Permuted:
    """A view's dims in another order."""

    base: View
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return tuple(self.base.shape[axis] for axis in self.axes)

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return self.base.dtype

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """The part `box` of it."""
        back = tuple(self.axes.index(axis) for axis in range(len(self.axes)))
        return self.base.read(reader, _permuted(box, back)).transpose(self.axes)


@dataclass(frozen=True)
class Unflattened:
    """A view of which one dim is seen as several."""

    base: View
    dim: int
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        shape = self.base.shape
        return (*shape[: self.dim], *self.sizes, *shape[self.dim + 1 :])

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return self.base.dtype

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """The part `box` of it."""
        end = self.dim + len(self.sizes)
        rows, inner = box.shape[self.dim], prod(self.sizes[1:])
        offset = (
            *box.offset[: self.dim],
            box.offset[self.dim] * inner,
            *box.offset[end:],
        )
        shape = (*box.shape[: self.dim], rows * inner, *box.shape[end:])
        found = self.base.read(reader, Box(offset, shape))
        seen = (*box.shape[: self.dim], rows, *self.sizes[1:], *box.shape[end:])
        origin = (
            *box.offset[: self.dim + 1],
            *(0,) * (len(self.sizes) - 1),
            *box.offset[end:],
        )
        part: np.ndarray = box.of(found.reshape(seen), origin)
        return part


@dataclass(frozen=True)
class Joined:
    """Views one after the other along a dim."""

    parts: tuple[View, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        total = sum(part.shape[self.dim] for part in self.parts)
        return _with(self.parts[0].shape, self.dim, total)

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return self.parts[0].dtype

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """The part `box` of it."""
        values = np.empty(box.shape, dtypes.dtype(self.dtype))
        begin = 0
        for part in self.parts:
            offset = _with((0,) * len(part.shape), self.dim, begin)
            common = Box(offset, part.shape).intersection(box)
            if common is not None:
                at = _with(common.offset, self.dim, common.offset[self.dim] - begin)
                found = part.read(reader, Box(at, common.shape))
                common.of(values, box.offset)[...] = found
            begin += part.shape[self.dim]
        return values


@dataclass(frozen=True, eq=False)
class Rows:
    """Chosen indices of a view's dim, in the order of `index`."""

    base: View
    dim: int
    index: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return _with(self.base.shape, self.dim, len(self.index))

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return self.base.dtype

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """The part `box` of it."""
        values = np.empty(box.shape, dtypes.dtype(self.dtype))
        first = box.offset[self.dim]
        rows = self.index[first : first + box.shape[self.dim]]
        for span in _spans(rows):
            low, high = int(rows[span].min()), int(rows[span].max()) + 1
            offset = _with(box.offset, self.dim, low)
            shape = _with(box.shape, self.dim, high - low)
            found = self.base.read(reader, Box(offset, shape))
            target = (slice(None),) * self.dim + (span,)
            values[target] = found.take(rows[span] - low, axis=self.dim)
        return values


@dataclass(frozen=True)
class Cast:
    """A view's values in another dtype."""

    base: View
    dtype: str
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return self.base.shape

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """The part `box` of it.

        Raises
        ------
        CheckpointError
            A finite value is beyond the dtype's range.
        """
        values = self.base.read(reader, box)
        with np.errstate(over="ignore"):
            cast = values.astype(dtypes.dtype(self.dtype))
        if not np.array_equal(np.isfinite(values), np.isfinite(cast)):
            raise CheckpointError(
                f"'{self.name}' has values beyond the range of {self.dtype}; load it "
                f"as {self.base.dtype}"
            )
        return cast


def parts(view: View, box: Box, limit: int) -> Iterator[Box]:
    """Cut a part of a view for reading, into boxes of at most `limit` elements. Pure.

    Together they read little more of the files than the whole would: they are cut
    along the dims that are the outermost in the files.
    """
    if isinstance(view, Cast):
        yield from parts(view.base, box, limit)
    elif isinstance(view, Permuted):
        back = tuple(view.axes.index(axis) for axis in range(len(view.axes)))
        for part in parts(view.base, _permuted(box, back), limit):
            yield _permuted(part, view.axes)
    elif box.size:
        whole = Box((0,) * len(box.shape), box.shape)
        for slab in slabs(box.shape, whole, limit):
            start = zip(box.offset, slab.offset, strict=True)
            yield Box(tuple(a + b for a, b in start), slab.shape)


def castable(stored: str, wanted: str) -> bool:
    """Whether a load may turn one dtype into the other. Pure.

    Floating types into each other, complex ones too, integers only into those that hold
    all their values.
    """
    if {stored, wanted} <= _FLOATS or {stored, wanted} <= _COMPLEX:
        return True
    if {stored, wanted} & (_FLOATS | _COMPLEX | {"bool"}):
        return stored == wanted
    return bool(np.can_cast(np.dtype(stored), np.dtype(wanted), "safe"))


def _permuted(box: Box, axes: tuple[int, ...]) -> Box:
    return Box(
        tuple(box.offset[axis] for axis in axes),
        tuple(box.shape[axis] for axis in axes),
    )


def _with(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def _spans(rows: np.ndarray[Any, Any]) -> Iterator[slice]:
    """Runs of positions to be read at once: all where that reads little too much."""
    if not len(rows):
        return
    if int(rows.max()) - int(rows.min()) < 2 * len(rows):
        yield slice(0, len(rows))
        return
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    for first, end in itertools.pairwise(edges):
        yield slice(first, end)
