"""Fresh host memory, on huge pages where it is large and the system has them.

What moves a message between two ranks of a node walks through the pages of both arrays:
that takes up to half of its time where they are small.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np

from tparmpi.backend.host_memory import HUGE_ADVICE, HUGE_BYTES

Array = np.ndarray[Any, np.dtype[Any]]


def allocate(nbytes: int) -> Array:
    """Return an uninitialised uint8 array; a large one begins with a page. Local.

    Raises
    ------
    MemoryError
        There is not as much.
    """
    if nbytes < HUGE_BYTES or HUGE_ADVICE is None:
        return np.empty(nbytes, np.uint8)
    # Only memory that is touched is taken.
    size = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
    try:
        mapped = mmap.mmap(-1, size + HUGE_BYTES, mmap.MAP_PRIVATE)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes:,} bytes") from error
    start = -np.frombuffer(mapped, np.uint8).ctypes.data % HUGE_BYTES
    # A kernel without huge pages refuses.
    with contextlib.suppress(OSError):
        mapped.madvise(HUGE_ADVICE, start, size)
    memory: Array = np.ndarray(nbytes, np.uint8, mapped, start)
    return memory
