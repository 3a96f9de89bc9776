"""Memory of large results, used again once nobody holds the result.

The system clears each page of fresh memory at first touch, which takes as long as
receiving into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tparmpi.comm import pages

Array = np.ndarray[Any, np.dtype[Any]]

# Smaller results come from memory that the C library keeps.
_LEAST_BYTES = 64 * 1024
# What is kept for results to come, in bytes, at most.
KEPT_BYTES = 256 * 2**20
# A result takes at most so many times the memory that it needs.
_WASTE = 1.25
_ROUND_BYTES = 4096


class Lender:
    """Host memory that comes back when the last array that uses it is gone.

    Attributes
    ----------
    kept_bytes : int
        What nobody uses now.
    """

    def __init__(self) -> None:
        # Memory comes back at any time, in any thread: each step here is indivisible.
        self._free: dict[int, Array] = {}

    @property
    def kept_bytes(self) -> int:
        return sum(memory.nbytes for memory in tuple(self._free.values()))

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised, C-contiguous array. Local."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < _LEAST_BYTES:
            return np.empty(shape, dtype)
        memory = self._take(nbytes)
        if memory is None:
            memory = pages.allocate(-(-nbytes // _ROUND_BYTES) * _ROUND_BYTES)
        array: Array = np.asarray(_Owner(memory, self))
        return array[:nbytes].view(dtype).reshape(shape)

    def come_back(self, memory: Array) -> None:
        """Take memory that no array uses any more. Local."""
        self._free[id(memory)] = memory
        while self.kept_bytes > KEPT_BYTES:
            # The one that has waited longest.
            self._free.pop(next(iter(tuple(self._free)), 0), None)

    def _take(self, nbytes: int) -> Array | None:
        fitting = [
            (memory.nbytes, key)
            for key, memory in tuple(self._free.items())
            if nbytes <= memory.nbytes <= nbytes * _WASTE + _ROUND_BYTES
        ]
        return self._free.pop(min(fitting)[1], None) if fitting else None


class _Owner:
    """What the arrays over one piece of memory hold on to."""

    def __init__(self, memory: Array, lender: Lender) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
        self._lender = lender

    def __del__(self) -> None:
        self._lender.come_back(self._memory)
