"""The progress engine of a rank: moves its non-blocking operations on.

MPI moves messages, and sums are made, only while somebody asks. Whoever waits for one
operation asks for all of them; the dispatcher of operators asks between two; and where
MPI lets several threads call it, a thread asks while none of them does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tparmpi.comm import ring
from tparmpi.config import environment

if TYPE_CHECKING:
    from tparmpi.comm.call import Call
    from tparmpi.comm.handle import Handle
    from tparmpi.comm.members import Members

active: list[Handle[Any]] = []
"""The operations under way, in the order in which they were started."""

unseen: dict[int, tuple[Call, str]] = {}
"""What was started and not yet seen done, by number of the handle; and where."""

lock = threading.Lock()
"""Held while operations move on, by one thread at a time."""

_SPINS = 20
# Where each rank has a core to itself, yielding it gains nobody of the job anything.
_OWN_CORE_SECONDS = 0.02
_SPIN_SECONDS = 0.005
_PAUSE_SECONDS = 0.0001
# How long the thread leaves alone what another one looks after, at first and at most.
# Waking up takes the interpreter's lock from that one, and perhaps its core.
_ASIDE_SECONDS = 0.0002
_LONG_ASIDE_SECONDS = 0.005
# How long it looks for operations by itself before it waits to be told of one.
_IDLE_SECONDS = 0.5
_WATCH_SECONDS = 0.02
_STOP_SECONDS = 1.0
_LEAKS_SHOWN = 5


def add(handle: Handle[Any]) -> None:
    """Take the first steps of an operation, and move it on from now on. Local."""
    with lock:
        if not handle.advance():
            active.append(handle)
            _thread.wake()


def poll() -> bool:
    """Move all operations on as far as they go without waiting. Local.

    Returns
    -------
    bool
        Whether one of them moved.
    """
    _thread.looks += 1
    return _move_on()


def _move_on() -> bool:
    # Whoever holds the lock is doing it.
    if not lock.acquire(blocking=False):
        return False
    try:
        moved = False
        for handle in tuple(active):
            steps = handle.steps
            if handle.advance():
                active.remove(handle)
            moved |= handle.steps != steps
        return moved
    finally:
        lock.release()


def wait(done: Callable[[], bool], watch: Callable[[], None]) -> None:
    """Return when `done` says so, and move other operations on meanwhile. Local.

    After some misses it yields the core at each, unless the rank has it to itself, and
    later it sleeps between.

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
    _thread.rest()
    start = watched = time.perf_counter()
    recorder = ring.recorder
    try:
        while not done():
            now = time.perf_counter()
            if active and poll():
                start = now
                recorder.go_on()
            if now - start < _rank.spin_seconds:
                continue
            if now - start < _SPIN_SECONDS:
                os.sched_yield()
                continue
            if not recorder.waits:
                recorder.wait()
            if now - watched > _WATCH_SECONDS:
                watched = now
                watch()
            time.sleep(_PAUSE_SECONDS)
    finally:
        recorder.go_on()
        _thread.resume()


def count_cores(share: float) -> None:
    """Take in how many cores this rank may count on. Local."""
    _rank.spin_seconds = _OWN_CORE_SECONDS if share >= 1 else 0.0


def settle(place: Members) -> None:
    """Return when no operation of `place` is under way. Local."""
    for handle in tuple(active):
        if handle.place is place:
            handle.settle()


def close(seconds: float) -> str:
    """End the thread, and report the operations that nobody saw done. Local.

    Parameters
    ----------
    seconds
        How long those under way may take to end, as other ranks may wait for them.

    Returns
    -------
    str
        Lines for the user; empty if all is well.
    """
    end = time.monotonic() + seconds
    while active and time.monotonic() < end:
        poll()
        time.sleep(_PAUSE_SECONDS)
    _thread.stop()
    if not unseen:
        return ""
    lines = [
        f"operations started and never waited for: {len(unseen)} ({len(active)} still "
        "under way); call wait() on each handle:"
    ]
    lines += [
        f"  {call!r}, started at {site}"
        for call, site in list(unseen.values())[:_LEAKS_SHOWN]
    ]
    if len(unseen) > _LEAKS_SHOWN:
        lines.append(f"  and {len(unseen) - _LEAKS_SHOWN} more")
    return "\n".join(lines)


class _Rank:
    """How long this rank may keep its core while it waits."""

    spin_seconds = 0.0


_rank = _Rank()


class _Thread:
    """Moves operations on while no other thread of this rank waits or asks.

    Attributes
    ----------
    wanted
        Whether there is to be one; None while it is not known.
    looks
        How often other threads have asked.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.wanted: bool | None = None
        self._work = threading.Event()
        self.looks = 0
        self._stopped = False
        self._waiting = 0

    def wake(self) -> None:
        """Look after operations from now on; started where MPI allows it. Local."""
        if self.wanted is None:
            self.wanted = environment().progress_thread and may_have_thread()
        if not self.wanted or self._stopped:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="tparmpi-progress", daemon=True
            )
            self._thread.start()
        if not self._work.is_set():
            self._work.set()

    def rest(self) -> None:
        """Leave the operations to a thread that waits for one. Local."""
        self._waiting += 1

    def resume(self) -> None:
        """Look after operations again. Local."""
        self._waiting -= 1

    def stop(self) -> None:
        """End the thread. Local."""
        self._stopped = True
        self._work.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
            self._thread = None

    def _run(self) -> None:
        seen, aside = self.looks, _ASIDE_SECONDS
        idle = 0.0
        while not self._stopped:
            if not active:
                if idle < _IDLE_SECONDS:
                    time.sleep(_LONG_ASIDE_SECONDS)
                    idle += _LONG_ASIDE_SECONDS
                    continue
                self._work.clear()
                if not active:
                    self._work.wait()
            idle = 0.0
            if self._waiting or self.looks != seen or not self.wanted:
                seen = self.looks
                time.sleep(aside)
                aside = min(2 * aside, _LONG_ASIDE_SECONDS)
                continue
            aside = _ASIDE_SECONDS
            if not _move_on():
                time.sleep(_PAUSE_SECONDS)


_thread = _Thread()


def may_have_thread() -> bool:
    """Say whether MPI lets several threads call it. Local."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


@contextmanager
def thread(*, wanted: bool) -> Iterator[None]:
    """Have operations moved on by the thread, or not, whatever was set. Local."""
    before, _thread.wanted = _thread.wanted, wanted
    try:
        yield
    finally:
        _thread.wanted = before
