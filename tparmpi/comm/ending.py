"""What a program still has to do together with the other ranks when it ends.

The interpreter joins threads before it calls the functions of `atexit`, and from then
on starts no others; what is done here is done before that.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from tparmpi.comm import exits

Work = Callable[[int], None]

_works: list[tuple[int, Work]] = []


def before_exit(work: Work) -> None:
    """Call ``work(code)`` once when the program ends, in this process alone. Local.

    The main thread calls it after the program's last line, with the exit code as far as
    it is known. Where that is 0 all ranks are taken to end alike, and `work` may call
    them; where it is not, they may be gone. An error of `work` ends the job as one of
    the program would.
    """
    if not _works:
        # As `concurrent.futures` does, whose executors work until it is called.
        threading._register_atexit(_end)  # type: ignore[attr-defined]
    entry = os.getpid(), work
    if entry not in _works:
        _works.append(entry)


def _end() -> None:
    code = exits.code()
    for process, work in _works:
        if process != os.getpid():
            continue
        try:
            work(code)
        except Exception:
            sys.excepthook(*sys.exc_info())
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            # The interpreter would leave with 0.
            os._exit(code or 1)
