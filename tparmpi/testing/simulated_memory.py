"""A simulated GPU's memory and streams: what is done when, and what is seen before.

A stream's work is done when somebody waits for the stream or an event of it, or asks,
one operation each time. Until then whoever looks at what it writes sees NaN. Two things
see what was there before: earlier work, and work of another stream, which should have
waited.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

# All bits set: NaN in every floating dtype.
LATE = 0xFF

Host = np.ndarray[Any, Any]


class Block:
    """One allocation: what the host and MPI see of it, and what it truly holds.

    Parameters
    ----------
    nbytes : int

    Attributes
    ----------
    seen : numpy.ndarray
        uint8; NaN where work that writes it is still to be done.
    """

    def __init__(self, nbytes: int) -> None:
        self.seen: Host = np.full(nbytes, LATE, np.uint8)
        self._true: Host = np.empty(nbytes, np.uint8)
        self._writers: Host = np.zeros(nbytes, np.uint16)
        self._late = 0
        self._lent: list[tuple[Host, bool, Any]] = []

    def promise(self, array: Host) -> None:
        """Let work be queued that writes `array`."""
        if not array.size:
            return
        seen, true, writers = (
            _bytes(b, self.seen, array) for b in (self.seen, self._true, self._writers)
        )
        np.copyto(true, seen, where=writers == 0)
        writers += 1
        seen[...] = LATE
        self._late += 1

    def keep(self, array: Host) -> None:
        """Let that work be done. The block is as `uncover` leaves it."""
        if array.size:
            _bytes(self._writers, self.seen, array)[...] -= 1
            self._late -= 1

    def uncover(self) -> None:
        """Show what the block truly holds."""
        if self._late:
            np.copyto(self.seen, self._true, where=self._writers > 0)

    def cover(self) -> None:
        """Hide what is still to be written."""
        if self._late:
            late = self._writers > 0
            np.copyto(self._true, self.seen, where=late)
            np.copyto(self.seen, np.uint8(LATE), where=late)

    def lend(self, array: Host, request: Any, *, writes: bool) -> None:
        """Let `array` be used by a message until `request` is false."""
        self._lent.append((array, writes, request))

    def complaints(self, array: Host, *, writes: bool) -> Iterator[str]:
        """Say which messages under way forbid work that reads or writes `array`."""
        self._lent = [entry for entry in self._lent if entry[2]]
        for lent, is_received, _ in self._lent:
            if (writes or is_received) and np.shares_memory(lent, array):
                how = "received into" if is_received else "sent"
                what = "writes" if writes else "reads"
                yield f"work {what} memory that is still being {how}"


def _bytes(buffer: Host, base: Host, array: Host) -> Host:
    """The part of `buffer` that lies as `array` lies in `base`, one entry a byte."""
    offset = address(array) - address(base)
    width = buffer.itemsize
    return np.ndarray(
        (*array.shape, array.itemsize),
        buffer.dtype,
        buffer.data,
        offset * width,
        tuple(step * width for step in (*array.strides, 1)),
    )


def address(array: Host) -> int:
    """Return where an array begins."""
    return int(array.__array_interface__["data"][0])


class Work:
    """One operation of a stream.

    Parameters
    ----------
    run : callable
        Does it.
    reads, writes : sequence of (Block, numpy.ndarray)
        The memory that it reads and writes, as views of blocks.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        reads: Sequence[tuple[Block, Host]],
        writes: Sequence[tuple[Block, Host]],
    ) -> None:
        self._run = run
        self._reads = reads
        self._writes = writes
        self._blocks = {id(b): b for b, _ in (*reads, *writes)}.values()

    def promise(self) -> None:
        """Hide what it will write, from now on."""
        for block, array in self._writes:
            block.promise(array)

    def do(self) -> list[str]:
        """Do it; return what was wrong with the moment."""
        complaints: list[str] = []
        for block, array in self._reads:
            complaints += block.complaints(array, writes=False)
        for block, array in self._writes:
            complaints += block.complaints(array, writes=True)
        for block in self._blocks:
            block.uncover()
        with np.errstate(all="ignore"):
            self._run()
        for block, array in self._writes:
            block.keep(array)
        for block in self._blocks:
            block.cover()
        return complaints


class Stream:
    """A queue of late work; see `cupy.cuda.Stream`. Streams never wait by themselves.

    Parameters
    ----------
    device : Streams
        The other streams of the same device.

    Attributes
    ----------
    queued, finished : int
        How much work it was given, and how much of that is done.
    """

    def __init__(self, device: Streams) -> None:
        self._device = device
        self._work: deque[Work | tuple[Stream, int]] = deque()
        self.queued = 0
        self.finished = 0
        self.ptr = id(self)

    def __enter__(self) -> Stream:
        self._device.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._device.stack.pop()

    def use(self) -> Stream:
        """Make this the thread's current stream."""
        self._device.stack[-1] = self
        return self

    def record(self, event: Event | None = None) -> Event:
        """Return an event that happens when all work queued so far is done."""
        event = Event(self._device) if event is None else event
        event.at = (self, self.queued)
        return event

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for `event`."""
        if event.at is not None:
            self.queue(event.at)

    def synchronize(self) -> None:
        """Do all work."""
        self.reach(self.queued)

    @property
    def done(self) -> bool:
        """Whether all work is done. Asking does some."""
        return self.approach(self.queued)

    def queue(self, work: Work | tuple[Stream, int]) -> None:
        """Add work, or a place of another stream to wait for."""
        device = self._device
        with device.lock:
            if device.at_work:
                # The garbage collector frees memory in the middle of it.
                device.left_over.append((self, work))
                return
            if isinstance(work, Work):
                work.promise()
            self._work.append(work)
            self.queued += 1

    def reach(self, place: int) -> None:
        """Do the work up to `place`."""
        with self._device.lock:
            while self.finished < place:
                self._step()

    def approach(self, place: int) -> bool:
        """Say whether the work up to `place` is done; if not, do one operation."""
        with self._device.lock:
            if self.finished >= place:
                return True
            self._step()
            return False

    def _step(self) -> None:
        first = self._work[0]
        if isinstance(first, tuple):
            stream, place = first
            if stream.finished < place:
                stream._step()
                return
        self._work.popleft()
        self.finished += 1
        if isinstance(first, Work):
            with self._device.whole():
                self._device.complaints += first.do()


class Event:
    """A place in a stream's work; see `cupy.cuda.Event`."""

    def __init__(self, device: Streams) -> None:
        self._device = device
        self.at: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Happen when all work that `stream` has now is done."""
        (stream or self._device.current).record(self)

    def synchronize(self) -> None:
        """Do the work that the event waits for."""
        if self.at is not None:
            self.at[0].reach(self.at[1])

    @property
    def done(self) -> bool:
        """Whether it has happened. Asking does some of the work."""
        return self.at is None or self.at[0].approach(self.at[1])


class _Stacks(threading.local):
    """Each thread's current streams, the innermost last."""

    def __init__(self, first: Stream) -> None:
        self.streams = [first]


class Streams:
    """The streams of one device.

    Attributes
    ----------
    lock : threading.RLock
        Held while work is queued or done, or memory looked at.
    at_work : bool
        Whether a piece of work is under way, or memory looked at.
    left_over : list of (Stream, Work)
        What was queued meanwhile.
    null : Stream
        Every thread's first current stream.
    complaints : list of str
        Of work done while a message used the same memory.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.null = Stream(self)
        self.complaints: list[str] = []
        self.at_work = False
        self.left_over: list[tuple[Stream, Work | tuple[Stream, int]]] = []
        self._stacks = _Stacks(self.null)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let memory stay as it is but for what the caller does meanwhile."""
        with self.lock:
            self.at_work = True
            try:
                yield
            finally:
                self.at_work = False
                left_over, self.left_over = self.left_over, []
                for stream, work in left_over:
                    stream.queue(work)

    @property
    def stack(self) -> list[Stream]:
        """The calling thread's current streams, the innermost last."""
        return self._stacks.streams

    @property
    def current(self) -> Stream:
        """The calling thread's current stream."""
        return self._stacks.streams[-1]
