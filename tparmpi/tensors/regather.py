"""Operands that the tape keeps as shards, to be gathered again."""

from __future__ import annotations

from typing import Any

import numpy as np

from tparmpi.sharding import Layout
from tparmpi.tensors.redistribute import redistribute
from tparmpi.tensors.spec import Spec


class Regather:
    """A saved operand kept as its shard, to be gathered again in the backward pass.

    All calls that save the operand in one layout and dtype share one of these: it
    gathers for the first of them that runs backward, and lets go after the last.
    """

    __slots__ = ("_gathered", "_others", "array", "dtype", "layout", "readers", "spec")

    def __init__(
        self, array: Any, spec: Spec, layout: Layout, dtype: np.dtype[Any]
    ) -> None:
        self.array = array
        self.spec = spec
        self.layout = layout
        self.dtype = dtype
        self.readers = 0
        self._gathered: Any = None
        self._others: dict[tuple[Layout, np.dtype[Any]], Regather] = {}

    def bound_for(self, layout: Layout, dtype: np.dtype[Any]) -> Regather:
        """Return what gathers the same operand in `layout` and `dtype`. Local."""
        if (layout, dtype) == (self.layout, self.dtype):
            return self
        if (layout, dtype) not in self._others:
            other = Regather(self.array, self.spec, layout, dtype)
            self._others[layout, dtype] = other
        return self._others[layout, dtype]

    def fetch(self) -> Any:
        """Return the gathered array. Collective over the axes gathered, the first time
        of as many as there are readers.
        """
        array = self._gathered
        if array is None:
            array = redistribute(self.array, self.spec, self.layout)
            array = array.astype(self.dtype, copy=False)
        self.readers -= 1
        self._gathered = array if self.readers > 0 else None
        return array


class Kept:
    """Stands for one operand in what a call saved.

    Attributes
    ----------
    regather
        Gathers the operand's array again.
    number
        Which operand it is.
    """

    __slots__ = ("number", "regather")

    def __init__(self, regather: Regather, number: int) -> None:
        self.regather = regather
        self.number = number

    def stand_in(self) -> Any:
        """Return zeros of the array's shape, which take no memory. Local."""
        regather = self.regather
        spec = regather.spec.with_layout(regather.layout)
        xp = spec.place.backend.xp
        return xp.broadcast_to(xp.zeros((), regather.dtype), spec.local_shape)
