"""Memory that collectives receive into, kept between calls.

Fresh pages cost as much as moving the data: the system clears each at first touch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from tparmpi.comm import pages

# What is kept for the next call, in bytes, at most; and rounding, so that calls of
# nearly the same size share.
_KEPT_BYTES = 64 * 2**20
_ROUND_BYTES = 64 * 2**10


class Scratch:
    """Memory to borrow for the length of a call.

    Parameters
    ----------
    allocate : callable
        Returns an uninitialised uint8 array of a number of bytes; of host memory if
        not given.
    """

    def __init__(self, allocate: Callable[[int], Any] = pages.allocate) -> None:
        self._allocate = allocate
        self._free: list[Any] = []
        # The progress thread borrows too.
        self._lock = threading.Lock()

    def borrow(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array; `give_back` it when nothing uses it. Local."""
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._take(nbytes)
        if buffer is None:
            rounded = -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES
            buffer = self._allocate(rounded)
        return buffer[:nbytes].view(dtype).reshape(shape)

    def give_back(self, array: Any) -> None:
        """Take back a borrowed array, of which no message is under way. Local."""
        buffer = array
        while isinstance(buffer.base, type(buffer)):
            buffer = buffer.base
        with self._lock:
            kept = sum(other.size for other in self._free)
            if kept + buffer.size <= _KEPT_BYTES:
                self._free.append(buffer)

    def _take(self, nbytes: int) -> Any | None:
        """Return the smallest buffer that is large enough; None if there is none."""
        with self._lock:
            fitting = [
                (buffer.size, number)
                for number, buffer in enumerate(self._free)
                if buffer.size >= nbytes
            ]
            return self._free.pop(min(fitting)[1]) if fitting else None
