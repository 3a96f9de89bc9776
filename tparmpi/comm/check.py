"""Call checking: members compare what they call before anything is sent.

With ``TPARMPI_CHECK=1`` each call begins with a meeting of its members, on a
communicator of its own. Each tells the others what it calls; where that differs, all
raise the same error. A member that does not come is asked where it is: ranks that wait
for each other in a circle, or for one that has left, will do so for ever, and raise.
"""

from __future__ import annotations

import pickle
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from mpi4py import MPI

from tparmpi.comm import progress, ring
from tparmpi.comm.control import GRACE_SECONDS, Control
from tparmpi.comm.headers import Header, header_of
from tparmpi.comm.ledger import call_site
from tparmpi.comm.tags import describe
from tparmpi.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from tparmpi.comm.algorithms import Steps
    from tparmpi.comm.call import Call

_T = TypeVar("_T")
# Members, number of their group, pair of members or None, sequence number.
_Key = tuple[int, int, tuple[int, int] | None, int]

# How long a rank waits before it asks the others where they are, and before it asks
# those again who did not know.
ASK_SECONDS = 0.25

_TAG = 0
_HEADER, _QUESTION, _ANSWER, _VERDICT = range(4)

_ADVICE = "all members of a group must make its calls, in the same order"


@dataclass(frozen=True)
class Waiting:
    """Where a rank waits, as it answers those who ask.

    Parameters
    ----------
    epoch : int
        Number of the wait on its rank: while it is the same, the rank has not moved.
    key : tuple
        The call's.
    text : str
        The call, its group and its source line.
    members, missing : tuple of int
        World ranks of the call, and of those that have not come.
    """

    epoch: int
    key: _Key
    text: str
    members: tuple[int, ...]
    missing: tuple[int, ...]


class Meeting:
    """The comparison of one call; waited for like the call's messages.

    Made by `Checker.meet`.
    """

    def __init__(
        self,
        checker: Checker,
        key: _Key,
        members: tuple[int, ...],
        place: object,
        header: Header,
    ) -> None:
        self._checker = checker
        self._place = place
        self._header = header
        self.key = key
        self.members = members

    def done(self, doing: str) -> bool:
        """Say whether all members have come and call the same. Local.

        Raises
        ------
        CollectiveMismatchError
            If they do not, or some never will.
        """
        checker = self._checker
        checker.serve()
        text = checker.verdicts.get(self.key)
        if text is None:
            headers = checker.headers[self.key]
            if len(headers) < len(self.members):
                return False
            text = self._difference(headers)
        checker.headers.pop(self.key, None)
        if text:
            raise CollectiveMismatchError(text)
        return True

    def wait(self, control: Control, doing: str) -> None:
        """Return when all members have come. See `done`."""
        progress.wait(lambda: self.done(doing), lambda: self.watch(control, doing))

    def watch(self, control: Control, doing: str) -> None:
        """Find out whether the missing members can come. Local.

        Raises
        ------
        CollectiveMismatchError
            If they cannot.
        CommunicationError
            If one should long have ended the job.
        """
        control.poll()
        failed = [
            rank
            for rank in self.awaited()
            if rank in control.ended and not _has_left(control, rank)
        ]
        control.check_awaited(failed, doing)
        self._checker.look_for(self)

    def awaited(self) -> list[int]:
        """World ranks of the members that have not come."""
        come = self._checker.headers.get(self.key, {})
        return sorted(rank for rank in self.members if rank not in come)

    def describe(self) -> str:
        """Return the call, its group and its source line as text. Local."""
        header = self._header
        return f"{header.text} on {self._place}, call {self.key[3]}, at {header.site}"

    def _difference(self, headers: dict[int, Header]) -> str:
        """Say how the members' calls differ; "" if they do not."""
        if all(h.compared == self._header.compared for h in headers.values()):
            return ""
        callers: dict[tuple[str, str], list[int]] = {}
        for rank in self.members:
            header = headers[rank]
            callers.setdefault((header.text, header.site), []).append(rank)
        # The odd ones first: they are most likely wrong.
        parts = [
            f"{_ranks(ranks)} {text} at {site}"
            for (text, site), ranks in sorted(
                callers.items(), key=lambda item: (len(item[1]), item[1])
            )
        ]
        return (
            f"members of {self._place} make different calls (call {self.key[3]} of the "
            f"group): {'; '.join(parts)}; {_ADVICE}, with the same root, and with "
            "arrays of the same dtype and shape"
        )


class Checker:
    """The meetings of a rank, and what it knows of where others are.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Of all ranks; used for nothing else.
    control : Control
        Says which ranks have left.
    last_call : callable
        Returns the source line of a rank's last call, "" where it is not known.

    Attributes
    ----------
    headers : dict
        For each call that is not complete, what has come from which rank.
    verdicts : dict
        The errors of calls that never will be.
    """

    def __init__(
        self, comm: MPI.Intracomm, control: Control, last_call: Callable[[int], str]
    ) -> None:
        self.comm = comm
        self.headers: dict[_Key, dict[int, Header]] = {}
        self.verdicts: dict[_Key, str] = {}
        self._rank: int = comm.rank
        self._control = control
        self._last_call = last_call
        self._numbers: dict[tuple[int, ...], int] = {}
        self._sends: list[MPI.Request] = []
        self._lock = threading.Lock()
        self._status = MPI.Status()
        self._search: _Search | None = None
        self._blocked: Meeting | None = None
        self._blocked_in = -1

    def number(self, members: tuple[int, ...]) -> int:
        """Return the number of the next group of `members`, never used again. Local."""
        number = self._numbers.get(members, 0)
        self._numbers[members] = number + 1
        return number

    def meet(
        self,
        members: tuple[int, ...],
        number: int,
        pair: tuple[int, int] | None,
        sequence: int,
        place: object,
        header: Header,
    ) -> Meeting:
        """Tell the other members what this rank calls; return the meeting. Local.

        Parameters
        ----------
        members
            World ranks of the group.
        number
            The group's.
        pair
            The two members of a point-to-point call.
        sequence
            Number of the call in the group or between the two.
        place
            The group, or its text.
        header
            What is called.
        """
        key = zlib.crc32(repr(members).encode()), number, pair, sequence
        if pair is not None:
            members = members[pair[0]], members[pair[1]]
        meeting = Meeting(self, key, members, place, header)
        self.headers.setdefault(key, {})[self._rank] = header
        message = pickle.dumps((_HEADER, key, tuple(header)), pickle.HIGHEST_PROTOCOL)
        for rank in members:
            if rank != self._rank:
                self._send(message, rank)
        return meeting

    def serve(self) -> None:
        """Take in what others say, and answer those who ask. Local."""
        # Whoever holds the lock is doing it.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._sends and MPI.Request.Testall(self._sends):
                self._sends.clear()
            while True:
                message = self.comm.Improbe(MPI.ANY_SOURCE, _TAG, self._status)
                if message is None:
                    return
                data = np.empty(self._status.Get_count(MPI.BYTE), np.uint8)
                message.Recv([data, MPI.BYTE])
                # Only ever what another rank of this very program has packed.
                self._take_in(self._status.Get_source(), *pickle.loads(data.data))
        finally:
            self._lock.release()

    def look_for(self, meeting: Meeting) -> None:
        """Ask the missing members of `meeting` where they are. Local.

        Raises
        ------
        CollectiveMismatchError
            If they wait themselves and none of them can go on, or one has left.
        """
        if not ring.recorder.waits:
            # The rank only looks in; it is free to do something else.
            return
        self._blocked, self._blocked_in = meeting, ring.recorder.epoch
        search = self._search
        if search is None or not search.is_about(meeting):
            search = self._search = _Search(self, meeting)
        found = search.go_on()
        if found is not None:
            self._search = None
            raise CollectiveMismatchError(self._condemn(found))

    def waiting(self) -> Waiting | None:
        """Return where this rank waits, None if it does not. Local."""
        meeting = self._blocked
        recorder = ring.recorder
        if meeting is None or not recorder.waits or recorder.epoch != self._blocked_in:
            return None
        return Waiting(
            self._blocked_in,
            meeting.key,
            meeting.describe(),
            meeting.members,
            tuple(meeting.awaited()),
        )

    def has_left(self, rank: int) -> bool:
        """Say whether a rank has left for good, without an error. Local."""
        return _has_left(self._control, rank)

    def ask(self, rank: int) -> None:
        """Ask a rank where it is. Local."""
        self._send(pickle.dumps((_QUESTION, None, None)), rank)

    def _condemn(self, path: dict[int, Waiting | None]) -> str:
        """Tell all members of the calls on a path that these never end."""
        parts = []
        for rank, state in path.items():
            if state is None:
                last = self._last_call(rank)
                after = f" (its last call: {last})" if last else ""
                parts.append(f"rank {rank} has left the program{after}")
            else:
                plural = "s" if len(state.missing) > 1 else ""
                missing = ", ".join(map(str, state.missing))
                parts.append(
                    f"rank {rank} waits for rank{plural} {missing} in {state.text}"
                )
        text = f"calls that can never end: {'; '.join(parts)}; {_ADVICE}"
        states = [state for state in path.values() if state is not None]
        keys = [state.key for state in states]
        message = pickle.dumps((_VERDICT, keys, text), pickle.HIGHEST_PROTOCOL)
        for rank in {member for state in states for member in state.members}:
            if rank != self._rank and not self.has_left(rank):
                self._send(message, rank)
        self._judge(keys, text)
        return text

    def _judge(self, keys: list[_Key], text: str) -> None:
        for key in keys:
            self.verdicts.setdefault(key, text)

    def _send(self, message: bytes, rank: int) -> None:
        self._sends.append(self.comm.Isend([message, MPI.BYTE], rank, _TAG))

    def _take_in(self, source: int, kind: int, about: Any, what: Any) -> None:
        if kind == _HEADER:
            self.headers.setdefault(about, {})[source] = Header(*what)
        elif kind == _QUESTION:
            answer = (_ANSWER, None, self.waiting())
            self._send(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL), source)
        elif kind == _ANSWER:
            if self._search is not None:
                self._search.answers[source] = what
        else:
            self._judge(about, what)


class _Search:
    """A walk from one rank that waits to those it waits for, until it must end.

    What is found is asked for a second time: ranks that have not moved in between were
    all waiting at one moment, so that none of them can be the first to go on.
    """

    def __init__(self, checker: Checker, meeting: Meeting) -> None:
        self._checker = checker
        self._meeting = meeting
        self._epoch = ring.recorder.epoch
        self._start = self._asked = time.monotonic()
        self._suspect: dict[int, int] | None = None
        self.answers: dict[int, Waiting | None] = {}

    def is_about(self, meeting: Meeting) -> bool:
        """Say whether it is about this very wait. Local."""
        return meeting is self._meeting and self._epoch == ring.recorder.epoch

    def go_on(self) -> dict[int, Waiting | None] | None:
        """Return the states of ranks that can never go on, None while unknown. Local.

        A rank that has left has the state None. This rank's is the first.
        """
        now = time.monotonic()
        if now - self._asked < ASK_SECONDS:
            return None
        own = self._checker.waiting()
        assert own is not None
        unknown: set[int] = set()
        path = self._walk({self._checker.comm.rank: own}, own, unknown, set())
        if path is not None:
            moment = {r: -1 if s is None else s.epoch for r, s in path.items()}
            if moment == self._suspect:
                return path
            self._suspect = moment
            unknown |= {r for r, s in path.items() if s is not None and s is not own}
        for rank in unknown:
            self.answers.pop(rank, None)
            self._checker.ask(rank)
        self._asked = now
        return None

    def _walk(
        self,
        path: dict[int, Waiting | None],
        state: Waiting,
        unknown: set[int],
        seen: set[int],
    ) -> dict[int, Waiting | None] | None:
        """Return the path extended to one that ends nowhere, None if there is none."""
        for rank in state.missing:
            if rank in path:
                return path
            if self._checker.has_left(rank):
                return {**path, rank: None}
            answer = self.answers.get(rank)
            if answer is None:
                unknown.add(rank)
            elif rank not in seen:
                seen.add(rank)
                found = self._walk({**path, rank: answer}, answer, unknown, seen)
                if found is not None:
                    return found
        return None


def checked(
    checker: Checker, call: Call, operation: Callable[..., Steps[_T]], arguments: Any
) -> Steps[_T]:
    """Return an operation's steps with its meeting before them. Local.

    The meeting is announced at once, in program order.
    """
    place = call.place
    meeting = checker.meet(
        place.ranks,
        place.number,
        call.pair,
        call.sequence,
        place,
        header_of(call.kind, arguments),
    )
    return _after(meeting, operation(call, *arguments))


def _after(meeting: Any, steps: Steps[_T]) -> Steps[_T]:
    yield meeting
    result = yield from steps
    return result


def communicator_meeting(
    checker: Checker, members: tuple[int, ...], doing: str
) -> Meeting:
    """Begin the meeting before a communicator of `members` is made. Local."""
    header = Header(("communicator",), doing, call_site())
    # Counted apart from the groups' numbers.
    number = checker.number((-1, *members))
    place = f"ranks {describe(members)}"
    return checker.meet(members, -1, None, number, place, header)


def _has_left(control: Control, rank: int) -> bool:
    notice = control.ended.get(rank)
    if notice is None or notice.failed or notice.code:
        return False
    return time.monotonic() - notice.time > GRACE_SECONDS


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} calls"
    return f"ranks {', '.join(map(str, ranks))} call"
