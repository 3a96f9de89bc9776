"""Memory that collectives receive into, kept between calls.

Fresh pages cost as much as moving the data: the system clears each at first touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

# What is kept for the next call, in bytes, at most; and rounding, so that calls of
# nearly the same size share.
_KEPT_BYTES = 64 * 2**20
_ROUND_BYTES = 64 * 2**10


class Scratch:
    """Host memory to borrow for the length of a call."""

    def __init__(self) -> None:
        self._free: list[np.ndarray[Any, Any]] = []

    def borrow(
        self, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """Return an uninitialised array; `give_back` it when nothing uses it. Local."""
        nbytes = prod(shape) * dtype.itemsize
        fitting = [buffer for buffer in self._free if buffer.size >= nbytes]
        if fitting:
            buffer = min(fitting, key=len)
            self._free = [other for other in self._free if other is not buffer]
        else:
            rounded = -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES
            buffer = np.empty(rounded, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)

    def give_back(self, array: np.ndarray[Any, Any]) -> None:
        """Take back a borrowed array, of which no message is under way. Local."""
        buffer = array
        while isinstance(buffer.base, np.ndarray):
            buffer = buffer.base
        kept = sum(other.size for other in self._free)
        if kept + buffer.size <= _KEPT_BYTES:
            self._free.append(buffer)
