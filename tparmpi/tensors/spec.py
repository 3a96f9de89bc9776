"""Specs: what all ranks know of a tensor without its data, interned for identity."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from tparmpi.comm import Place
from tparmpi.sharding import Layout, block

MOST_SPECS = 1 << 15
"""Specs that a place remembers; with their plans some 10 KB each."""

MOST_PLANS = 1 << 12
"""Plans that a spec remembers; some 3 KB each."""


class Spec:
    """Place, global shape, dtype and layout of a tensor.

    Made by `spec_of` only, which returns the same object for equal arguments, so that
    plans are looked up by identity.

    Attributes
    ----------
    place
        The plain device, group or mesh the tensor lives on.
    shape
        Global shape.
    dtype
        NumPy dtype of the elements.
    layout
        One placement for each axis of the place.
    plans
        Operator plans of which this is the first operand's spec; see `remember`.
    """

    def __init__(
        self, place: Place, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout
    ) -> None:
        self.place = place
        self.shape = shape
        self.dtype = dtype
        self.layout = layout
        self.plans: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"Spec({self.shape}, {self.dtype}, {describe_layout(self)})"

    @cached_property
    def _block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.block(self.place.coordinates)

    @property
    def local_offset(self) -> tuple[int, ...]:
        """First global index per dim of this rank's block."""
        return self._block[0]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's block."""
        return self._block[1]

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """This rank's block as slices of the global array."""
        return tuple(slice(o, o + e) for o, e in zip(*self._block, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def local_nbytes(self) -> int:
        """Bytes of this rank's block."""
        return prod(self.local_shape) * self.dtype.itemsize

    def block(
        self, coordinates: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offset, extent) per dim of the block at mesh `coordinates`."""
        return block(self.shape, self.layout, self.place.shape, coordinates)

    def with_layout(self, layout: Layout) -> Spec:
        """Return the spec that differs in the layout only."""
        return spec_of(self.place, self.shape, self.dtype, layout)

    def with_dtype(self, dtype: np.dtype[Any]) -> Spec:
        """Return the spec that differs in the dtype only."""
        return spec_of(self.place, self.shape, dtype, self.layout)


def spec_of(
    place: Place, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout
) -> Spec:
    """Return the one spec of `place`, `shape`, `dtype` and `layout`.

    One that is forgotten is made anew, with plans of its own.
    """
    table = place.specs
    key = (shape, dtype, layout)
    spec: Spec | None = table.get(key)
    if spec is None:
        spec = Spec(place, shape, dtype, layout)
        remember(table, key, spec, MOST_SPECS)
    return spec


def remember(table: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put a value that can be made again into a table of at most `most`. Local.

    A full table forgets its oldest entry: programs whose shapes or slices never come
    again do not grow.
    """
    if len(table) >= most:
        table.pop(next(iter(table)), None)
    table[key] = value


def describe_layout(spec: Spec) -> str:
    """Return the layout as users write it: one placement, or one for each axis."""
    if len(spec.layout) == 1:
        return repr(spec.layout[0])
    pairs = zip(spec.place.axes, spec.layout, strict=True)
    return ", ".join(f"{axis}={placement!r}" for axis, placement in pairs)
