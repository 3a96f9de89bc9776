"""The progress engine of a rank: moves its non-blocking operations on.

MPI moves messages, and sums are made, only while somebody asks. Whoever waits for one
operation asks for all of them, and the dispatcher of operators asks between two.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tparmpi.comm.handle import Handle

active: list[Handle[Any]] = []
"""The operations under way, in the order in which they were started."""

_lock = threading.Lock()

_SPINS = 20
_SPIN_SECONDS = 0.005
_PAUSE_SECONDS = 0.0001
_WATCH_SECONDS = 0.02


def add(handle: Handle[Any]) -> None:
    """Take the first steps of an operation, and move it on from now on. Local."""
    with _lock:
        if not handle.advance():
            active.append(handle)


def poll() -> None:
    """Move all operations on as far as they go without waiting. Local."""
    # Whoever holds the lock is doing it.
    if not _lock.acquire(blocking=False):
        return
    try:
        for handle in tuple(active):
            if handle.advance():
                active.remove(handle)
    finally:
        _lock.release()


def wait(done: Callable[[], bool], watch: Callable[[], None]) -> None:
    """Return when `done` says so, and move other operations on meanwhile. Local.

    After some misses it yields the core at each, later it sleeps between.

    Parameters
    ----------
    done
        Says whether what is waited for has happened.
    watch
        Called now and then while it has not; raises if it never will.
    """
    for _ in range(_SPINS):
        if done():
            return
        if active:
            poll()
    start = watched = time.perf_counter()
    while not done():
        if active:
            poll()
        now = time.perf_counter()
        if now - start < _SPIN_SECONDS:
            os.sched_yield()
            continue
        if now - watched > _WATCH_SECONDS:
            watched = now
            watch()
        time.sleep(_PAUSE_SECONDS)
