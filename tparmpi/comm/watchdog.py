"""Ends a job that hangs, after every rank has told where it is.

A thread on each rank looks, now and then, how long the rank has waited for others.
Where that is too long it asks all ranks for their latest calls and Python stacks. Each
rank's own thread tells them, whatever its main thread does. Where not even a thread
runs, because foreign code keeps the interpreter for itself, a signal makes the
interpreter write the stacks. Of a process that is gone the record of its calls is left.

Ranks of one node ask each other through the files of their rings, those of other nodes
by message.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from tparmpi.comm import failure, ring, work
from tparmpi.comm.control import GRACE_SECONDS
from tparmpi.comm.recorded import CALLS, Recorded, start_of

if TYPE_CHECKING:
    from tparmpi.comm.state import World

# How long ranks may take to tell where they are, and the interpreter of one that does
# not to write its stacks. Other nodes do the same meanwhile.
ANSWER_SECONDS = 3.0
SIGNAL_SECONDS = 0.5
REMOTE_SECONDS = 5.0
# The first rank of a node asks for all; if it does not end the job, the others do.
LEADER_SECONDS = 20.0

CALLS_SHOWN = 12

_LONGEST_PERIOD = 0.5
# Real-time signals carry no meaning of their own; this one is seldom taken.
_SIGNAL = signal.SIGRTMIN + 13
# What ranks of different nodes tell each other.
_FREE, _BUSY, _DUMP = range(3)

_dog: Watchdog | None = None


class Watchdog:
    """Watches how long this rank waits, and answers those who wait for it.

    Parameters
    ----------
    world : World
        All ranks.
    local : mapping of int to Path
        The other ranks of this node and the files of their rings.
    claim : Path or None
        A file that the first rank of the node to ask makes.
    seconds : float
        How long a rank may wait.
    """

    def __init__(
        self,
        world: World,
        local: Mapping[int, Path],
        claim: Path | None,
        seconds: float,
    ) -> None:
        self._control = world.control
        self._rank = world.rank
        self._local = local
        self._remote = [
            rank
            for rank in range(world.size)
            if rank != world.rank and rank not in local
        ]
        self._claim = claim
        self._seconds = seconds
        self._busy: set[int] = set()
        self._is_told = False
        self._has_answered = False
        self._excused_until = 0.0
        self._excused = -1
        self._ends_at = float("inf")
        # Each rank of a node looks after the next one.
        self._next = min(local, key=lambda rank: (rank < world.rank, rank), default=-1)
        # Elsewhere the main thread hears what others say, while it waits.
        self._hears = bool(self._remote) and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="tparmpi-watchdog", daemon=True
        )
        self._control.listener = self._hear

    def start(self) -> None:
        """Watch from now on. Local."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer. Local."""
        self._stop.set()
        self._thread.join(ANSWER_SECONDS)
        if self._claim is not None:
            self._claim.unlink(missing_ok=True)

    def tell_remote(self, word: int) -> None:
        """Tell the ranks of other nodes something. Local."""
        for rank in self._remote:
            self._control.tell(rank, word)

    def _run(self) -> None:
        while not self._stop.wait(min(_LONGEST_PERIOD, self._seconds / 4)):
            if self._hears:
                self._control.poll()
            if self._is_told:
                self._lead()
            if ring.recorder.is_asked():
                self._answer()
            self._look()
            self._look_after_next()

    def _hear(self, source: int, word: int) -> None:
        if word == _DUMP:
            self._is_told = True
        elif word == _BUSY:
            self._busy.add(source)
        else:
            self._busy.discard(source)

    def _look(self) -> None:
        """Ask everybody if this rank has waited too long."""
        now = time.monotonic()
        if now > self._ends_at:
            failure.abort(1)
        since = ring.recorder.waiting_since()
        if not since or now - max(since, self._excused_until) < self._seconds:
            return
        busy = self._who_is_busy()
        if busy:
            self._excused_until = now
            if self._excused != ring.recorder.epoch:
                self._excused = ring.recorder.epoch
                failure.say(
                    f"watchdog: {self._waiting(now - since)}; it may go on, as "
                    f"{'; '.join(busy)}",
                    self._rank,
                )
        elif self._ends_at == float("inf"):
            self._lead(
                f"watchdog: {self._waiting(now - since)}; the latest calls and the "
                "stacks of all ranks follow, then the job ends. TPARMPI_WATCHDOG sets "
                "the seconds; work that may take longer on one rank belongs in "
                "`with tpm.long_work(reason):`"
            )

    def _look_after_next(self) -> None:
        """End the job if the next rank's process has gone without a word.

        Not every launcher does so when a process is killed.
        """
        if self._next < 0 or self._knows_of_end():
            return
        found = ring.read_process(self._local[self._next])
        if found is None or start_of(found[0]) == found[1]:
            return
        # It may have left; the word of that comes by another way.
        time.sleep(GRACE_SECONDS)
        if not self._knows_of_end():
            self._answer_for(self._next)
            failure.abort(1)

    def _knows_of_end(self) -> bool:
        """Whether this rank ends, or knows that the next one has."""
        control = self._control
        return control.own is not None or self._next in control.ended

    def _waiting(self, seconds: float) -> str:
        calls = ring.recorder.read().calls
        inside = [call for call in calls if call.seconds is None and not call.failed]
        where = f" in {inside[-1].kind} on {inside[-1].place}" if inside else ""
        awaited = ", ".join(map(str, sorted(set(self._control.awaited))))
        return (
            f"rank {self._rank} has waited {seconds:.0f} s{where} for rank "
            f"{awaited or '?'}"
        )

    def _who_is_busy(self) -> list[str]:
        busy = [f"rank {rank} is in long_work" for rank in sorted(self._busy)]
        if work.reasons:
            busy.append(f"rank {self._rank} is in long_work: {work.reasons[-1]}")
        for rank, path in self._local.items():
            found = ring.read(path)
            if found is not None and found.busy and found.is_alive:
                busy.append(f"rank {rank} is in long_work: {found.reason}")
        return busy

    def _lead(self, why: str = "") -> None:
        """Make all ranks of this node tell where they are, unless another rank does.

        Then end the job, if this is the rank that knows `why`.
        """
        self._is_told = False
        self._ends_at = min(self._ends_at, time.monotonic() + LEADER_SECONDS)
        if not self._is_first():
            return
        if why:
            failure.say(why, self._rank)
            self.tell_remote(_DUMP)
        for path in self._local.values():
            with contextlib.suppress(FileNotFoundError):
                ring.ask(path)
        self._answer()
        silent = self._wait_for_answers()
        for rank in silent:
            self._answer_for(rank)
        if why:
            if self._remote:
                time.sleep(REMOTE_SECONDS)
            if ring.recorder.path is not None:
                failure.say(
                    f"watchdog: {CALLS} calls of each rank are kept in "
                    f"{ring.recorder.path.parent}; print them with "
                    "`python -m tparmpi.comm.post_mortem`",
                    self._rank,
                )
            failure.abort(1)

    def _is_first(self) -> bool:
        if self._claim is None:
            return True
        try:
            os.close(os.open(self._claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _answer(self) -> None:
        """Tell where this rank is, once."""
        if self._has_answered:
            return
        self._has_answered = True
        lines = [*_heading(ring.recorder.read()), *_stacks()]
        failure.say("\n".join(lines), self._rank)
        ring.recorder.answer()

    def _wait_for_answers(self) -> list[int]:
        """Return the ranks of this node that do not answer in time."""
        end = time.monotonic() + ANSWER_SECONDS
        silent = list(self._local)
        while silent and time.monotonic() < end:
            time.sleep(0.05)
            silent = [rank for rank in silent if self._is_silent(rank)]
        return silent

    def _is_silent(self, rank: int) -> bool:
        found = ring.read(self._local[rank])
        return found is None or not found.answered

    def _answer_for(self, rank: int) -> None:
        """Tell where a rank is that does not tell it itself."""
        path = self._local[rank]
        found = ring.read(path)
        if found is None:
            failure.say("there is no record of this rank on this node", rank)
            return
        lines = _heading(found)
        stacks = ring.stacks_of(path)
        if not found.is_alive:
            lines.append("its process is gone: killed, or crashed")
        elif stacks.exists():
            os.kill(found.pid, _SIGNAL)
            time.sleep(SIGNAL_SECONDS)
            lines += ["its threads do not run; the interpreter says:"]
            with contextlib.suppress(FileNotFoundError):
                lines += stacks.read_text(errors="replace").splitlines()
        failure.say("\n".join(lines), rank)


def start(world: World, table: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Give this rank a ring with a file, and a watchdog unless `seconds` is 0. Local.

    Parameters
    ----------
    world
        All ranks.
    table
        A row for each, with its ``host`` and the ``processes`` it can see; the first
        one's ``token`` names the job.
    """
    global _dog
    token = table[0]["token"]
    name = f"{token}-{world.rank}{ring.SUFFIX}"
    ring.recorder = ring.create(name, world.rank, world.size)
    own = ring.recorder.path
    local: dict[int, Path] = {}
    claim = None
    if own is not None:
        host, processes = (table[world.rank][key] for key in ("host", "processes"))
        claim = own.with_name(f"{token}-{host}-{processes}.claim")
        local = {
            rank: own.with_name(f"{token}-{rank}{ring.SUFFIX}")
            for rank, row in enumerate(table)
            if (row["host"], row["processes"]) == (host, processes)
            and rank != world.rank
        }
    if seconds:
        _listen_to_signal()
        _dog = Watchdog(world, local, claim, seconds)
        _dog.start()
    work.announce = _announce
    if work.reasons:
        _announce()


def visible_processes() -> int:
    """Return what tells containers apart that do not see each other's processes.

    Local.
    """
    return os.stat("/proc/self/ns/pid").st_ino


def stop(*, clean: bool) -> None:
    """End the watchdog, and remove the ring's file after a `clean` run. Local."""
    global _dog
    if _dog is not None:
        _dog.stop()
        _dog = None
    own = ring.recorder.path
    if clean and own is not None:
        # The record goes on in memory.
        for path in (own, ring.stacks_of(own)):
            path.unlink(missing_ok=True)


def last_call(rank: int) -> str:
    """Return a rank's last call, "" if this node does not know it. Local."""
    own = ring.recorder.path
    if own is None:
        return ""
    token = own.name.partition("-")[0]
    found = ring.read(own.with_name(f"{token}-{rank}{ring.SUFFIX}"))
    if found is None or not found.calls:
        return ""
    call = found.calls[-1]
    return f"{call.kind} on {call.place}, call {call.sequence}, at {call.site}"


def _announce() -> None:
    """Tell the other ranks whether this one is in `long_work`."""
    ring.recorder.set_busy(work.reasons[-1] if work.reasons else None)
    if _dog is not None:
        _dog.tell_remote(_BUSY if work.reasons else _FREE)


def _listen_to_signal() -> None:
    """Let others make this rank's interpreter write its stacks."""
    own = ring.recorder.path
    if own is None:
        return
    # The handler writes to the file's descriptor, which must stay open.
    file = ring.stacks_of(own).open("w")
    faulthandler.register(_SIGNAL, file=file, all_threads=True)


def _heading(found: Recorded) -> list[str]:
    lines = [f"process {found.pid}; latest calls:"]
    lines += [f"  {line}" for line in found.lines(CALLS_SHOWN)] or ["  none"]
    return lines


def _stacks() -> list[str]:
    """Where all threads of this process are, but the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            lines.append(f"thread {names.get(number, number)}:")
            lines += "".join(traceback.format_stack(frame)).splitlines()
    return lines
