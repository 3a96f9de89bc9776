"""The lock that keeps two jobs from writing one run folder.

A lock is a small JSON file that says who holds it. It is made by linking a finished
file to the lock's name, which either happens whole or fails, on network file systems
too. The holder touches the file now and then; that heartbeat is compared with the
time the same file system gives a new file, so clocks of different hosts do not matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tparmpi.errors import RunFolderError, reason

HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 180.0

_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    token: str
    host: str
    pid: int
    started: str
    job: str
    restart: int

    @classmethod
    def this_process(cls) -> Holder:
        """The calling process as a holder, with a token of its own. Local."""
        jobs = [os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)]
        restart = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_start_of(os.getpid()),
            job=jobs[0] if jobs else "",
            restart=int(restart) if restart.isdigit() else 0,
        )

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}"

    def is_gone(self, asking: Holder) -> str | None:
        """Why this holder surely runs no more, as `asking` sees it, or None. Local."""
        same_job = self.job and self.job == asking.job
        if same_job and self.restart < asking.restart:
            return "an earlier start of this job"
        if self.host == asking.host and self.started != _start_of(self.pid):
            return "a process that has ended"
        return None


class Lock:
    """A lock that this process holds on a folder; made by `take`."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self._path = path
        self._holder = holder
        self._released = threading.Event()
        self._beat = threading.Thread(
            target=self._heartbeat, name="tparmpi-lock", daemon=True
        )
        self._beat.start()

    @classmethod
    def take(cls, path: Path, note: Callable[[str], None]) -> Lock:
        """Take the lock file at `path`, in an existing folder. Local.

        A lock whose holder has ended, or has not been heard of for `STALE_SECONDS`, is
        taken over; `note` is given one sentence about it.

        Raises
        ------
        RunFolderError
            Another process holds it; the message names its job, process and host.
        """
        me = Holder.this_process()
        mine = path.with_name(f"{path.name}.{me.token}")
        try:
            mine.write_text(json.dumps(asdict(me)) + "\n")
            while not (_link(mine, path) or _take_over(path, mine, me, note)):
                pass
        except OSError as error:
            raise RunFolderError(
                f"cannot lock {path.parent}: {reason(error)}; make room or mend the "
                "folder, or give another with --run"
            ) from error
        finally:
            # Where nothing can be removed, the reason has been told already.
            with contextlib.suppress(OSError):
                mine.unlink()
        return cls(path, me)

    def is_held(self) -> bool:
        """Whether the lock file is still this process's own. Local."""
        return _read(self._path) == self._holder

    def release(self) -> None:
        """Give the lock back; does nothing where another took it over. Local.

        One that cannot be removed is that of a process that has ended, before long.
        """
        self._released.set()
        self._beat.join()
        if self.is_held():
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _heartbeat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self._path)
            except OSError:
                # Whoever asks `is_held` learns of a lock that is gone; a file system
                # that is away for a while must not end this thread.
                continue


def _take_over(path: Path, mine: Path, me: Holder, note: Callable[[str], None]) -> bool:
    """Replace a lock that nobody holds any more; False where another was faster.

    A lock may be replaced only by who has made the file that names its holder's heir,
    so two processes that find one stale lock cannot both replace it.
    """
    holder = _read(path)
    try:
        silent = _age(path, mine)
    except FileNotFoundError:
        return False
    reason = holder.is_gone(me) if holder else None
    if reason is None and silent < STALE_SECONDS:
        raise RunFolderError(
            f"{path.parent} is in use by {holder or 'an unreadable lock'} (last heard "
            f"of {max(silent, 0):.0f} s ago): wait until it ends, or give another "
            "folder with --run"
        )
    heir = path.with_name(f"{path.name}.{holder.token if holder else 'what'}.heir")
    if not _link(mine, heir):
        _drop_dead_heir(heir, mine, me)
        time.sleep(0.01)
        return False
    try:
        if _read(path) != holder:
            return False
        mine.replace(path)
    finally:
        heir.unlink(missing_ok=True)
    note(
        f"took over the lock of {path.parent} from {holder or 'an unreadable file'} "
        f"({reason or f'silent for {silent:.0f} s'})"
    )
    return True


def _drop_dead_heir(heir: Path, mine: Path, me: Holder) -> None:
    """Remove what a process left that ended in the middle of taking over."""
    holder = _read(heir)
    try:
        if (holder and holder.is_gone(me)) or _age(heir, mine) > STALE_SECONDS:
            heir.unlink(missing_ok=True)
    except FileNotFoundError:
        return


def _age(path: Path, mine: Path) -> float:
    """Seconds since `path` was touched, by the clock of the file system."""
    os.utime(mine)
    return mine.stat().st_mtime - path.stat().st_mtime


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _start_of(pid: int) -> str:
    """When a process of this host began, in the kernel's words; "" if there is none.

    Tells a process from a later one with the same number.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The second field, the program's name in parentheses, may hold spaces.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]
