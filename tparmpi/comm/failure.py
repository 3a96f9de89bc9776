"""One rank's failure ends the whole job; nobody is left waiting.

The hooks are installed when a launcher has started several processes, or by `init`.
They see uncaught exceptions of all threads and ``sys.exit`` with a nonzero code. A
plain ``raise SystemExit`` passes them by, so a rank also tells the others when it
leaves: whoever waits for it then raises, and that ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from tparmpi.comm import exits, progress
from tparmpi.comm.launcher import launched

if TYPE_CHECKING:
    from tparmpi.comm.state import World

# How long a failed rank waits to learn whether the others failed alike.
ALIKE_SECONDS = 1.0
# How long a rank whose error another one prints waits for that one to end the job.
SECOND_SECONDS = 4.0
# How long MPI may take to start or to end the job before this process ends by force.
FORCE_SECONDS = 4.0
# How long an operation that nobody waited for may take to end when the rank leaves.
LEAK_SECONDS = 1.0

_INTERRUPTED = 130

_installed_by: int | None = None
_world: World | None = None
_finalizes = False


def install() -> None:
    """Install the hooks, once. Local."""
    global _installed_by
    if _installed_by == os.getpid():
        return
    _installed_by = os.getpid()
    exits.watch()
    sys.excepthook = _Hook(sys.excepthook)
    threading.excepthook = _ThreadHook(threading.excepthook)
    atexit.register(_at_exit)


def install_in_job() -> None:
    """Install the hooks if a launcher started several processes. Local."""
    if launched().size > 1:
        install()


def join(world: World, *, finalizes: bool) -> None:
    """Let failures be told to the ranks of `world` from now on. Local.

    Parameters
    ----------
    world
        All ranks.
    finalizes
        Whether MPI is to be finalized at exit, as nobody else does.
    """
    global _world, _finalizes
    _world, _finalizes = world, finalizes


def in_job() -> bool:
    """Say whether other ranks depend on this one. Local."""
    if _installed_by != os.getpid():
        return False
    return _world.size > 1 if _world is not None else launched().size > 1


def fail(text: str, *, code: int = 1, digest: int = 0, marked: bool = True) -> None:
    """Print an error and end the job with `code`; once where ranks fail alike.

    Local. Returns only if all ranks have ended, so that each may leave with its code.

    Parameters
    ----------
    text
        The error's lines.
    code
        Exit code.
    digest
        Equal for errors that are alike.
    marked
        Whether each line carries the rank even if all ranks failed alike.
    """
    if _world is None or not _may_call_mpi():
        _fail_alone(text, code)
    control = _world.control
    control.announce(failed=True, code=code, digest=digest)
    all_ended = control.others_ended(ALIKE_SECONDS)
    alike = [
        rank
        for rank, notice in control.ended.items()
        if notice.failed and notice.digest == digest
    ]
    if any(rank < control.rank for rank in alike):
        if not all_ended and not control.others_ended(SECOND_SECONDS):
            abort(code)
        return
    everybody = len(alike) == control.size - 1
    say(text, control.rank if marked or not everybody else None)
    if not all_ended:
        abort(code)


def leave(code: int) -> int:
    """Tell the others that this rank leaves, and wait for them to leave too.

    Local. Where `code` is not 0 and they go on, it ends the job.

    Returns
    -------
    int
        The exit code that all ranks agree on: the first in rank order that is not 0.
    """
    if _world is None and code and in_job() and not _start_late():
        _kill(f"exited with code {code}")
    if _world is None or _is_finalized():
        return code
    control = _world.control
    control.announce(failed=False, code=code)
    if not control.others_ended(ALIKE_SECONDS if code else None):
        if code:
            say(f"exited with code {code} while other ranks go on", control.rank)
        abort(code or 1)
    return control.agreed_code()


def abort(code: int) -> NoReturn:
    """End the job, with `code` if the launcher lets it; by force if MPI does not."""
    _flush()
    # Its thread needs neither the interpreter nor a working MPI.
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(FORCE_SECONDS, exit=True, file=nowhere)
        # What was printed must reach the launcher before it ends everybody.
        time.sleep(0.05)
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)
        time.sleep(FORCE_SECONDS + 1)
    os._exit(code)


class _Hook:
    """`sys.excepthook` of a rank."""

    def __init__(self, previous: object) -> None:
        self._previous = previous

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if not in_job() or _is_finalized():
            assert callable(self._previous)
            self._previous(kind, error, trace)
            return
        code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        exits.note(code)
        _fail_of(kind, error, trace, code)


class _ThreadHook:
    """`threading.excepthook` of a rank."""

    def __init__(self, previous: object) -> None:
        self._previous = previous

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        ends_thread_only = issubclass(args.exc_type, SystemExit)
        if ends_thread_only or not in_job() or _is_finalized():
            assert callable(self._previous)
            self._previous(args)
            return
        name = args.thread.name if args.thread is not None else "unknown"
        heading = f"Exception in thread {name}:\n"
        error = args.exc_value or args.exc_type()
        _fail_of(args.exc_type, error, args.exc_traceback, 1, heading)
        # All ranks failed alike; the main thread may still wait for them.
        _flush()
        os._exit(1)


def _fail_of(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    code: int,
    heading: str = "",
) -> None:
    text = heading + "".join(traceback.format_exception(kind, error, trace))
    fail(text, code=code, digest=digest_of(f"{kind.__qualname__}: {error}"))


def digest_of(text: str) -> int:
    """Return a number that is equal for equal texts and not 0. Local."""
    return zlib.crc32(text.encode(errors="replace")) + 1


def _at_exit() -> None:
    if _installed_by != os.getpid():
        # A fork of a rank.
        return
    from tparmpi.comm import watchdog

    code = exits.code()
    leaked = progress.close(0.0 if code else LEAK_SECONDS)
    if leaked and code == 0:
        say(leaked, None if _world is None else _world.rank)
    if in_job():
        leave(code)
    if _world is None or _is_finalized():
        return
    watchdog.stop(clean=_world.control.others_ended(0.0))
    if _world.control.all_well():
        left_behind = _world.close()
        if left_behind:
            say(left_behind, _world.rank)
    if _finalizes:
        from mpi4py import MPI

        MPI.Finalize()


def _fail_alone(text: str, code: int) -> NoReturn:
    """End the job without a word with the other ranks."""
    job = launched()
    rank = job.rank if _world is None else _world.rank
    if _world is None and rank:
        # If all fail alike, the first one's text is enough.
        time.sleep(ALIKE_SECONDS)
    say(text, rank)
    if _mpi_connects():
        abort(code)
    _kill()


def _kill(text: str = "") -> NoReturn:
    """End a job without MPI, where an ordinary exit leaves the others hanging."""
    if text:
        say(text, launched().rank)
    _flush()
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


def _start_late() -> bool:
    """Start MPI only to agree on leaving; return whether that was possible."""
    from tparmpi.comm.runtime import init
    from tparmpi.errors import TparmpiError

    # If the others never come, the default action ends this process, and so the job.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, FORCE_SECONDS)
    try:
        init()
    except (TparmpiError, ImportError, RuntimeError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def refuse(text: str, code: int) -> int:
    """Print a sentence, once where all ranks say it, and end the job with `code`.

    Local; returns the agreed code if all ranks have ended.
    """
    if not in_job():
        say(text, None)
        return code
    if _world is None and not _start_late():
        _fail_alone(text, code)
    fail(text, code=code, digest=digest_of(text), marked=False)
    return code if _world is None else _world.control.agreed_code()


def _mpi_connects() -> bool:
    """Whether MPI runs and can end the other ranks."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return False
    return bool(module.COMM_WORLD.size > 1)


def _is_finalized() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_finalized())


def _may_call_mpi() -> bool:
    from mpi4py import MPI

    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        return True
    return threading.current_thread() is threading.main_thread()


def say(text: str, rank: int | None) -> None:
    """Print lines on stderr in one piece, each marked with its rank. Local.

    What cannot be written is lost: the job must end all the same.
    """
    mark = "" if rank is None else f"[rank {rank}] "
    lines = "".join(f"{mark}{line}\n" for line in text.rstrip("\n").split("\n"))
    _flush()
    stream = sys.stderr or sys.__stderr__
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(lines)
            stream.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
