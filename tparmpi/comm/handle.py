"""Handles: operations that were started and go on while the rank does other things."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tparmpi.comm import progress
from tparmpi.comm.ledger import call_site
from tparmpi.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from tparmpi.comm.algorithms import Steps
    from tparmpi.comm.call import Call
    from tparmpi.comm.control import Pending

_T = TypeVar("_T")

# How often those who only look learn of members that have left.
_WATCH_SECONDS = 0.1

_numbers = itertools.count()


class Handle(Generic[_T]):
    """An operation under way, started by a method of ``group.start``.

    It keeps the arrays that the operation uses. The array given to the operation must
    stay as it is until the handle is done.

    Attributes
    ----------
    place : Members
        Where the operation goes on.
    steps : int
        How often it has moved on.
    """

    def __init__(self, call: Call, steps: Steps[_T], site: str | None = None) -> None:
        self.place = call.place
        self.steps = 0
        self._call = call
        self._steps: Steps[_T] | None = steps
        self._pending: Pending | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._watched = time.monotonic()
        self._number = next(_numbers)
        progress.unseen[self._number] = call, call_site() if site is None else site

    def __repr__(self) -> str:
        state = "done" if self._steps is None else "under way"
        return f"<handle of {self._call!r}: {state}>"

    def done(self) -> bool:
        """Say whether the operation is complete, and move all operations on. Local.

        One that failed is complete too: `wait` says why.

        Raises
        ------
        CommunicationError
            If another member has left, so that it will never be complete.
        """
        progress.poll()
        if self._steps is None:
            self._see()
            return True
        now = time.monotonic()
        if now - self._watched > _WATCH_SECONDS:
            self._watched = now
            self._watch()
        return False

    def wait(self) -> _T:
        """Return the operation's result when it is complete. Local.

        All other operations of this rank move on meanwhile.

        Raises
        ------
        CommunicationError
            If another member has left, or the members' calls do not fit together.
        """
        self._see()
        self.settle()
        if self._error is not None:
            raise self._error
        if self._call.turn is not None:
            self._call.turn.hand_over()
        result: _T = self._result
        return result

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        """Return when the operation is complete, or has failed. Local.

        Or as soon as `until` says so: what happens while the operation goes on.
        """
        if self._steps is None:
            return
        if until is None:
            progress.wait(self._is_complete, self._watch)
        else:
            progress.wait(lambda: self._is_complete() or until(), self._watch)

    def check_refusal(self) -> None:
        """Raise the error of an operation that refused its arguments. Local."""
        if isinstance(self._error, (UsageError, ShapeError)):
            self._see()
            raise self._error

    def advance(self) -> bool:
        """Go on as far as possible without waiting; return whether it is the end.

        For the progress engine, which holds its lock.
        """
        steps = self._steps
        if steps is None:
            return True
        try:
            while self._pending is None or self._pending.done(self._call.kind):
                self._pending = next(steps)
                self.steps += 1
        except StopIteration as stop:
            self._result = stop.value
            self._finish(None)
        except Exception as error:
            # Not for whoever happens to look, but for the one who waits for it.
            self._finish(error)
        except BaseException as error:
            self._finish(error)
            raise
        return self._steps is None

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._pending = None
        self._call.end(error)
        self.steps += 1
        self._steps = None

    def _is_complete(self) -> bool:
        progress.poll()
        return self._steps is None

    def _watch(self) -> None:
        with progress.lock:
            if self._pending is not None:
                self._call.watch(self._pending)

    def _see(self) -> None:
        progress.unseen.pop(self._number, None)
