"""The order between a caller's work on a GPU, the library's, and messages.

MPI knows nothing of streams: what it sends must be there when it is told to send, what
it receives into must not be read or written by then. And the caller goes on with other
work meanwhile, which the library must not wait for. So the library has streams of its
own; a call's work there follows what the caller had given its stream before the call,
and what the caller gives it after the call follows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from tparmpi.comm.algorithms import Steps

Array = Any
_T = TypeVar("_T")


class Streams:
    """The library's streams on one GPU.

    Parameters
    ----------
    xp : module
        CuPy, or what stands in for it.

    Attributes
    ----------
    device
        The GPU, which each thread makes current for the library's work there.
    work
        The stream that sums are made on, and results put together.
    down, up
        The streams of copies to the host and to the GPU.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.device = xp.cuda.Device()
        self.work = xp.cuda.Stream(non_blocking=True)
        self.down = xp.cuda.Stream(non_blocking=True)
        self.up = xp.cuda.Stream(non_blocking=True)

    def event(self, stream: Any) -> Any:
        """Return an event: all that `stream` has been given so far is done. Local."""
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def follow(self, later: Any, earlier: Any) -> None:
        """Let what `later` gets from now on wait for what `earlier` has. Local."""
        later.wait_event(self.event(earlier))


@cache
def streams_of(xp: Any) -> Streams:
    """Return the library's streams on this rank's GPU, always the same. Local."""
    return Streams(xp)


class Turn:
    """One call's work on the library's stream, between the caller's before and after.

    Parameters
    ----------
    streams : Streams
        The caller's stream is the one that is current when the turn is made.
    """

    __slots__ = ("_caller", "_end", "_made", "_streams")

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._caller = streams.xp.cuda.get_current_stream()
        self._end: Any = None
        self._made: list[Array] = []
        streams.follow(streams.work, self._caller)

    def __enter__(self) -> None:
        self._streams.device.__enter__()
        self._streams.work.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._streams.work.__exit__(kind, error, trace)
        self._streams.device.__exit__(kind, error, trace)

    def drive(self, steps: Steps[_T], *_arguments: Any) -> Steps[_T]:
        """Take an operation's steps on the library's stream.

        Its arguments, and what it allocated on the caller's stream, are kept until that
        stream follows: memory that is let go before would be used again too early.
        """
        while True:
            with self:
                try:
                    pending = next(steps)
                except StopIteration as stop:
                    result: _T = stop.value
                    break
                except Exception:
                    self._finish()
                    raise
            yield pending
        self._finish()
        return result

    def _finish(self) -> None:
        streams = self._streams
        with streams.device:
            self._end = streams.event(streams.work)
            self._caller.wait_event(self._end)
        self._made.clear()

    def hand_over(self) -> None:
        """Let the current stream's work follow the call's, which is over. Local."""
        current = self._streams.xp.cuda.get_current_stream()
        if self._end is not None and current != self._caller:
            current.wait_event(self._end)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array that the caller may keep. Local.

        The caller's stream allocates it, since that is where it will be freed: memory
        of the library's stream would be used again by a later call, while the caller's
        stream still reads it. And what had the memory before may still be at work.
        """
        streams = self._streams
        with self._caller:
            array = streams.xp.empty(tuple(shape), dtype)
        streams.follow(streams.work, self._caller)
        self._made.append(array)
        return array
