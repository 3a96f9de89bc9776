"""How ranks learn that others have failed or left, on a communicator of its own.

A rank that ends tells all others, once: it left, with its exit code, or it failed, with
a digest of its error. A rank that waits for a message looks for these notices, so that
it can give up on a member that will never answer.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from tparmpi.comm import progress
from tparmpi.errors import CommunicationError

# How long a message may still be under way from a rank whose notice came first, and how
# long a failed rank may take to end the job before those who wait for it give up.
GRACE_SECONDS = 0.5
ABORT_SECONDS = 8.0

_NOTICE_TAG = 0
_FIELDS = 3


@dataclass(frozen=True)
class Notice:
    """What a rank said when it ended.

    Parameters
    ----------
    failed : bool
        Whether an error ended it, so that the job is to end too.
    code : int
        Its exit code.
    digest : int
        Tells its error from others; 0 where there is none.
    time : float
        When it was received, on this rank's monotonic clock, in seconds.
    """

    failed: bool
    code: int
    digest: int
    time: float


class Control:
    """Notices among the ranks of one communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Used for nothing else.

    Attributes
    ----------
    ended : dict of int to Notice
        The other ranks that have ended, as far as known.
    own : Notice or None
        What this rank has said.
    awaited : sequence of int
        The ranks that this one was last seen to wait for.
    listener : callable or None
        Takes (rank, word) of each word that another rank tells this one.
    services : list of callable
        Called whenever this rank looks for notices.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.ended: dict[int, Notice] = {}
        self.own: Notice | None = None
        self.awaited: Sequence[int] = ()
        self.listener: Callable[[int, int], None] | None = None
        self.services: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._sends: list[MPI.Request] = []
        bound = comm.Get_attr(MPI.TAG_UB)
        self._tag_bound = bound if isinstance(bound, int) else 32767

    def announce(self, *, failed: bool, code: int, digest: int = 0) -> None:
        """Tell all others that this rank ends; only the first notice counts. Local."""
        with self._lock:
            if self.own is not None:
                return
            self.own = Notice(failed, code, digest, time.monotonic())
            message = np.array([failed, code, digest], np.int64)
            self._sends += [
                self.comm.Isend([message, MPI.INT64_T], other, _NOTICE_TAG)
                for other in range(self.size)
                if other != self.rank
            ]

    def tell(self, rank: int, word: int) -> None:
        """Tell another rank's listener a word. Local."""
        message = np.array([word], np.int64)
        with self._lock:
            request = self.comm.Isend([message, MPI.INT64_T], rank, self._tag_bound)
            self._sends.append(request)

    def poll(self) -> None:
        """Take in the notices that have arrived. Local."""
        with self._lock:
            if self._sends and MPI.Request.Testall(self._sends):
                self._sends = []
            status = MPI.Status()
            while True:
                message = self.comm.Improbe(MPI.ANY_SOURCE, _NOTICE_TAG, status)
                if message is None:
                    break
                received = np.empty(_FIELDS, np.int64)
                message.Recv([received, MPI.INT64_T])
                failed, code, digest = received.tolist()
                notice = Notice(bool(failed), code, digest, time.monotonic())
                self.ended[status.Get_source()] = notice
            if self.listener is not None:
                self._listen(self.listener)
        for serve in self.services:
            serve()

    def _listen(self, listener: Callable[[int, int], None]) -> None:
        status = MPI.Status()
        word = np.empty(1, np.int64)
        while message := self.comm.Improbe(MPI.ANY_SOURCE, self._tag_bound, status):
            message.Recv([word, MPI.INT64_T])
            listener(status.Get_source(), int(word[0]))

    def others_ended(self, seconds: float | None) -> bool:
        """Wait until all other ranks have ended, at most `seconds`; return whether.

        Local. None waits without limit, except that a failed rank's job is not waited
        for longer than it takes to end it.
        """
        start = time.monotonic()
        pause = 0.001
        while True:
            self.poll()
            if len(self.ended) == self.size - 1 and not self._sends:
                return True
            now = time.monotonic()
            if seconds is not None and now - start > seconds:
                return False
            if any(
                (n.failed or n.code) and now - n.time > ABORT_SECONDS
                for n in self.ended.values()
            ):
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def all_well(self) -> bool:
        """Say whether all ranks have left with code 0. Local."""
        notices = [self.own, *self.ended.values()]
        return len(notices) == self.size and not any(
            notice is None or notice.failed or notice.code for notice in notices
        )

    def agreed_code(self) -> int:
        """Return the exit code of the lowest rank that ended with a nonzero one."""
        codes = {rank: notice.code for rank, notice in self.ended.items()}
        if self.own is not None:
            codes[self.rank] = self.own.code
        return next((codes[rank] for rank in sorted(codes) if codes[rank]), 0)

    def check_awaited(self, awaited: Sequence[int], doing: str) -> None:
        """Refuse to wait for ranks that have ended. Local.

        Raises
        ------
        CommunicationError
            If one of the `awaited` ranks has left, or should long have ended the job.
        """
        self.awaited = awaited
        self.poll()
        now = time.monotonic()
        for rank in awaited:
            notice = self.ended.get(rank)
            if notice is None:
                continue
            # A rank that ends with an error ends the job; its text is the one to read.
            ends_job = notice.failed or notice.code != 0
            if now - notice.time > (ABORT_SECONDS if ends_job else GRACE_SECONDS):
                how = "has failed" if notice.failed else "has left the program"
                raise CommunicationError(
                    f"{doing}: rank {rank} {how} and will not take part; all members "
                    "of a group must make its collective calls"
                )

    def rendezvous(self, members: Sequence[int], doing: str) -> None:
        """Wait until all `members` are here. Collective over the members.

        MPI's own collectives spin while they wait, and wait for ever for a rank that
        has left; after this they find everybody present.
        """
        size, me = len(members), members.index(self.rank)
        name = zlib.crc32(np.array(members, np.int64).tobytes())
        # Between the tag of the notices and that of the words.
        tag = 1 + name % (self._tag_bound - 1)
        token = np.zeros(1, np.uint8)
        heard = np.empty(1, np.uint8)
        distance = 1
        while distance < size:
            source = members[(me - distance) % size]
            target = members[(me + distance) % size]
            pending = Pending()
            pending.add(self.comm.Irecv([heard, MPI.BYTE], source, tag), source)
            pending.add(self.comm.Isend([token, MPI.BYTE], target, tag), target)
            pending.wait(self, doing)
            distance *= 2


class Pending:
    """Messages under way, and the world ranks at their other ends."""

    __slots__ = ("ranks", "requests")

    def __init__(self) -> None:
        self.requests: list[MPI.Request] = []
        self.ranks: list[int] = []

    def add(self, request: MPI.Request, rank: int) -> None:
        """Wait for `request` too, a message to or from world rank `rank`. Local."""
        self.requests.append(request)
        self.ranks.append(rank)

    def done(self, doing: str) -> bool:
        """Move the messages on and say whether all are complete. Local.

        Raises
        ------
        CommunicationError
            If MPI refuses a message.
        """
        requests = self.requests
        try:
            # A test of any moves all of them, and costs less than one of all.
            while requests:
                if not requests[-1].Test():
                    return False
                requests.pop()
                self.ranks.pop()
        except MPI.Exception as error:
            raise unfit(error, doing) from error
        return True

    def wait(self, control: Control, doing: str) -> None:
        """Return when all messages are complete. Local.

        Polls, and moves all other operations of this rank on.

        Raises
        ------
        CommunicationError
            If a rank at the other end has left, or MPI refuses a message.
        """
        if not self.done(doing):
            self._poll(control, doing)

    def _poll(self, control: Control, doing: str) -> None:
        progress.wait(lambda: self.done(doing), lambda: self.watch(control, doing))

    def watch(self, control: Control, doing: str) -> None:
        """Refuse to wait for ranks that have ended. Local.

        Raises
        ------
        CommunicationError
            If a rank at the other end of a message has.
        """
        control.check_awaited(self.awaited(), doing)

    def withdraw(self) -> None:
        """Give up receives of which no message will ever come. Local.

        On transports that say so only.
        """
        for request in self.requests:
            request.Cancel()
            request.Wait()
        self.requests.clear()
        self.ranks.clear()

    def awaited(self) -> list[int]:
        """World ranks at the other ends of the messages that are not complete."""
        return [
            rank
            for request, rank in zip(self.requests, self.ranks, strict=True)
            if not request.Test()
        ]


def unfit(error: MPI.Exception, doing: str) -> CommunicationError:
    """Return the error of a message that MPI refuses."""
    return CommunicationError(
        f"{doing}: a message does not fit ({_cause(error)}); all members must make the "
        "same calls, with arrays of matching shapes and dtypes"
    )


def _cause(error: MPI.Exception) -> str:
    if error.Get_error_class() == MPI.ERR_IN_STATUS:
        return "it is longer than what is expected here"
    return str(error)
