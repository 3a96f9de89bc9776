"""The process's own memory, kept for the arrays to come."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

CHOICES = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""Variables with which users choose for themselves what `malloc` keeps."""


@cache
def keep_freed() -> bool:
    """Have the process keep what it frees, and say whether it does. Local.

    The arrays of a step are as large as those of the step before. By default glibc
    gives large ones back to the system at once, which must then clear the pages of the
    next, at about 0.1 to 0.25 ms a MiB. The most that the process holds at a time stays
    the same; it holds it from then on.

    Nothing is changed where the user chose (`CHOICES`), or with another C library.
    """
    if any(os.environ.get(name) for name in CHOICES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))
