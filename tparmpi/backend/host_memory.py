"""The process's own memory, kept for the arrays to come, on huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
from functools import cache
from pathlib import Path
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

# That of most systems; where it is another, memory is as good as any.
HUGE_BYTES = 2 * 2**20
HUGE_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)

CHOICES = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""Variables with which users choose for themselves what `malloc` keeps."""


@cache
def keep_freed(processes: int = 1) -> bool:
    """Have the process keep what it frees, and say whether it does. Local.

    The arrays of a step are as large as those of the step before. By default glibc
    gives large ones back to the system at once, which must then clear the pages of the
    next, at about 0.1 to 0.25 ms a MiB. The most that the process holds at a time stays
    the same; it holds it from then on.

    What it takes from now on lies on huge pages, where the system has them and lets
    addresses be set aside for memory that is not taken yet: this process's part of the
    machine's memory, at most half of it.

    Nothing is changed where the user chose (`CHOICES`), or with another C library.

    Parameters
    ----------
    processes
        How many share the machine's memory.
    """
    if any(os.environ.get(name) for name in CHOICES):
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    if not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1)):
        return False
    if HUGE_ADVICE is not None and may_set_aside():
        _set_aside(library, HUGE_ADVICE, max(processes, 2))
    return True


def may_set_aside() -> bool:
    """Say whether addresses count for nothing until they are used. Local."""
    with contextlib.suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return False
    kinds = resource.RLIMIT_AS, resource.RLIMIT_DATA
    return all(resource.getrlimit(kind)[0] == resource.RLIM_INFINITY for kind in kinds)


def _set_aside(library: Any, advice: int, parts: int) -> None:
    """Have `malloc` take from addresses that are to be huge pages. Local.

    NumPy asks for them for each large array by itself. That is too late for the pages
    at its ends, which its neighbours have touched: half of an array of 4 MiB.
    """
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # No more than the system gives at a time, nor in all than there is: some batch
    # systems add up the virtual sizes of a job.
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // parts
    address = library.malloc(nbytes)
    if address:
        start = -(-address // HUGE_BYTES) * HUGE_BYTES
        library.madvise(start, nbytes - HUGE_BYTES, advice)
        library.free(address)
