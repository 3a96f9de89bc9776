"""Learning the code that this process ends with, before MPI does.

The interpreter tells nobody. But it drops an uncaught SystemExit when no frame is left,
while one that was caught is dropped by a frame: this finds those of ``sys.exit``. And
at the end of a script it flushes stderr while the exception that ended it still exists:
this finds those of a plain ``raise SystemExit``.
"""

from __future__ import annotations

import gc
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
    """Watch ``sys.exit`` and the end of the script; once is enough. Local."""
    sys.exit = _exit
    flush = getattr(sys.stderr, "flush", None)
    if flush is None:
        return

    def flush_and_look() -> None:
        flush()
        if sys._getframe().f_back is None:
            _look_for_uncaught()

    try:
        sys.stderr.flush = flush_and_look  # type: ignore[method-assign]
    except AttributeError:
        # A stream of another make; peers then learn only that this rank left.
        return


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


def _look_for_uncaught() -> None:
    """Find the SystemExit that only the interpreter refers to."""
    # By type(): isinstance would ask proxies, which may run any code.
    exits = [found for found in gc.get_objects() if issubclass(type(found), SystemExit)]
    known = (exits, sys._getframe())
    while exits:
        found = exits.pop()
        if all(any(r is k for k in known) for r in gc.get_referrers(found)):
            note(code_of(found))


def _ended_program(error: BaseException) -> bool:
    """Whether the outermost frame stopped where it raised `error`."""
    trace = error.__traceback__
    if trace is None:
        return False
    frame = trace.tb_frame
    return frame.f_back is None and frame.f_lasti == trace.tb_lasti
