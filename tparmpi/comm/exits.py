"""Learning the code that ``sys.exit`` ends this process with.

The interpreter tells nobody. But it drops an uncaught SystemExit when no frame is left,
while one that was caught is dropped by a frame.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, NoReturn

_code = 0
_last: weakref.ref[BaseException] | None = None


class _Exit(SystemExit):
    """A SystemExit that can be referred to weakly."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"
_Exit.__module__ = "builtins"


def watch() -> None:
    """Replace ``sys.exit`` by one that is watched, once. Local."""
    sys.exit = _exit


def note(code: int) -> None:
    """Say what this process will exit with. Local."""
    global _code
    _code = code


def code() -> int:
    """Return what this process exits with, as far as known; 0 if nothing is. Local."""
    error = _last() if _last is not None else None
    if error is not None and _ended_program(error):
        note(code_of(error))
    return _code


def code_of(error: BaseException) -> int:
    """Return the exit code that a SystemExit stands for. Local."""
    value = error.code if isinstance(error, SystemExit) else 1
    if value is None:
        return 0
    return value & 0xFF if isinstance(value, int) else 1


def _exit(status: Any = None, /) -> NoReturn:
    # Without a local variable: a frame that refers to it would keep it alive.
    raise _watched(status)


def _watched(status: Any) -> _Exit:
    global _last
    error = _Exit() if status is None else _Exit(status)
    if threading.current_thread() is threading.main_thread():
        ending = code_of(error)

        def dropped(_: weakref.ref[BaseException]) -> None:
            if sys._getframe().f_back is None:
                note(ending)

        _last = weakref.ref(error, dropped)
    return error


def _ended_program(error: BaseException) -> bool:
    """Whether the outermost frame stopped where it raised `error`."""
    trace = error.__traceback__
    if trace is None:
        return False
    frame = trace.tb_frame
    return frame.f_back is None and frame.f_lasti == trace.tb_lasti
