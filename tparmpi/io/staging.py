"""Memory between tensors and files: how much a rank may use, and buffers of it.

Bytes that lie in a tensor as they do in a file need none. Strided blocks, tensors of a
GPU, converted and transformed ones do.
"""

from __future__ import annotations

import threading

import numpy as np

from tparmpi.config import environment
from tparmpi.io import format as fmt

SLAB_BYTES = 16 << 20
"""What those who look at a tensor, or copy it, hold of it at a time."""

_MOST_PART_BLOCKS = 8


def limit() -> int:
    """Bytes of staging memory a rank may use at once: ``TPARMPI_STAGING_MIB``."""
    return environment().staging_mib << 20


def part_bytes() -> int:
    """Bytes that one thread moves at a time: whole blocks."""
    # The main thread has a part too, and one is made while others wait.
    share = limit() // (2 * fmt.threads() + 1)
    return fmt.BLOCK_BYTES * min(_MOST_PART_BLOCKS, max(1, share // fmt.BLOCK_BYTES))


class Buffers:
    """One buffer for each thread, used again and again: fresh memory is slow."""

    def __init__(self) -> None:
        self._own = threading.local()

    def get(self, nbytes: int) -> np.ndarray:
        """This thread's buffer, uint8; what it held before is overwritten."""
        found: np.ndarray | None = getattr(self._own, "buffer", None)
        if found is None or len(found) < nbytes:
            found = self._own.buffer = np.empty(nbytes, np.uint8)
        return found[:nbytes]
