"""Signals that ask a run to stop: noted at once, obeyed between two steps."""

from __future__ import annotations

import os
import signal
import weakref
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

_active: weakref.WeakSet[StopSignals] = weakref.WeakSet()


class StopSignals:
    """While entered, USR1, TERM and INT only set `requested`.

    A signal may reach one rank only, so `requested` is this rank's part; the loop takes
    the "or" over all ranks. Children made by `fork` have the former handlers again.
    Enter it in the main thread, before anything that may take long.
    """

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOPPING:
            self._former[number] = signal.signal(number, self._note)
        _active.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the former handlers back. Local."""
        _active.discard(self)
        while self._former:
            signal.signal(*self._former.popitem())

    def ignore(self) -> None:
        """Let the signals do nothing for the rest of the process. Local.

        When a run is over, one that comes late would turn a success into a failure: the
        interpreter takes handlers away some time before it ends.
        """
        _active.discard(self)
        self._former.clear()
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def _restore_in_child() -> None:
    for signals in list(_active):
        signals.restore()


os.register_at_fork(after_in_child=_restore_in_child)
