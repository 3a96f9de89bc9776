"""Blocks: arrays whose kinds the receiver knows, or learns from a lead.

The messages of a bridge between places. Ahead of the blocks goes a *lead*, of as many
bytes as the receiver expects; it may say what the blocks are. Where that is known, or
likely, without it, the blocks are received into their places before it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tparmpi.comm.algorithms import Steps
from tparmpi.comm.call import Array, Call
from tparmpi.comm.handle import Handle
from tparmpi.comm.tags import FIRST, MESSAGE, SECOND

if TYPE_CHECKING:
    from tparmpi.comm.collectives import Collectives
    from tparmpi.comm.control import Pending

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of a block."""

# The library waits for them itself; looking for the user's line takes its time.
_SITE = "a move between places"

NO_LEAD: Bytes = np.empty(0, np.uint8)


class Expected:
    """What a receiver knows of the blocks that come next: here, all.

    Its methods are called while operations move on, in any thread: they wait for
    nothing.

    Parameters
    ----------
    kinds
        Of the blocks.

    Attributes
    ----------
    lead
        Where the lead is received; without elements where none is sent.
    is_certain
        Whether what is foreseen comes for sure.
    """

    is_certain = True

    def __init__(self, kinds: Sequence[Kind], lead: Bytes = NO_LEAD) -> None:
        self.lead = lead
        self._kinds = kinds

    def is_next(self) -> bool:
        """Say whether all leads before this one have been read. Local."""
        return True

    def foreseen(self) -> Sequence[Kind] | None:
        """Return the kinds before the lead is there; None where it has to say. Local.

        Those that are not certain are the kinds of the blocks before.
        """
        return self._kinds

    def read(self) -> tuple[int, bool]:
        """Return what the lead says of its message, when it is there. Local.

        The bytes that follow it ahead of the blocks, and whether the blocks are of the
        kinds foreseen.
        """
        return 0, True

    def learn(self, news: Bytes) -> None:
        """Take in the bytes that follow the lead. Local."""

    def kinds(self) -> Sequence[Kind] | None:
        """Return the blocks' kinds, after `read`; None while not known. Local."""
        return self._kinds


class _Until:
    """Something else than messages that has to happen before an operation goes on.

    Waited for as a `Pending` is.
    """

    __slots__ = ("_has_happened",)

    def __init__(self, has_happened: Callable[[], bool]) -> None:
        self._has_happened = has_happened

    def done(self, doing: str) -> bool:
        return self._has_happened()

    def watch(self, control: Any, doing: str) -> None:
        """Do nothing: what is to happen has its own messages, which are watched."""


def _until(has_happened: Callable[[], bool]) -> Any:
    return _Until(has_happened)


def start_send(
    place: Collectives,
    blocks: Sequence[Array],
    to: int,
    heads: Sequence[Bytes],
    are_foreseen: bool,
) -> Handle[None]:
    """Start to send blocks to a member, which starts to receive them. Local.

    Parameters
    ----------
    blocks
        Left alone until the handle is done.
    heads
        Host arrays: the lead, and what follows it ahead of the blocks.
    are_foreseen
        Whether the receiver is certain of the blocks' kinds, or they are those of the
        blocks before.
    """
    call = place.begin_message("send_blocks", place.rank, to)
    return call.start(send_blocks, blocks, to, heads, are_foreseen, site=_SITE)


def start_receive(
    place: Collectives, source: int, expected: Expected
) -> Handle[list[Array]]:
    """Start to receive the next blocks of a member. Local.

    Parameters
    ----------
    expected
        What is known of them.
    """
    call = place.begin_message("recv_blocks", source, place.rank)
    return call.start(recv_blocks, source, expected, site=_SITE)


def send_blocks(
    call: Call,
    blocks: Sequence[Array],
    to: int,
    heads: Sequence[Bytes],
    are_foreseen: bool,
) -> Steps[None]:
    """Do what `start_send` starts."""
    link = call.link
    assert link is not None
    pending = link.pending()
    for head in heads:
        link.send(pending, head, to, MESSAGE)
    # Apart from each other: what was posted for others must not be matched.
    phase = SECOND if are_foreseen else FIRST
    for block in blocks:
        data = call.take_in(block)
        call.sent += data.nbytes
        link.send(pending, data.reshape(-1), to, phase)
    yield pending


def recv_blocks(call: Call, source: int, expected: Expected) -> Steps[list[Array]]:
    """Do what `start_receive` starts."""
    link = call.link
    assert link is not None
    opening = link.pending()
    if expected.lead.size:
        link.receive(opening, expected.lead, source, MESSAGE)
    if not expected.is_next():
        yield _until(expected.is_next)
    ahead = None
    if expected.is_certain or link.transport.withdraws:
        ahead = expected.foreseen()
    received, pending = _post(call, ahead or (), source, SECOND)
    yield opening
    news_bytes, as_foreseen = expected.read()
    if news_bytes:
        news = np.empty(news_bytes, np.uint8)
        link.receive(opening, news, source, MESSAGE)
        yield opening
        expected.learn(news)
    if not as_foreseen or ahead is None:
        pending.withdraw()
        kinds = expected.kinds()
        if kinds is None:
            yield _until(lambda: expected.kinds() is not None)
            kinds = expected.kinds()
        assert kinds is not None
        received, pending = _post(call, kinds, source, SECOND if as_foreseen else FIRST)
    yield pending
    return [call.give_out(block) for block in received]


def _post(
    call: Call, kinds: Sequence[Kind], source: int, phase: int
) -> tuple[list[Array], Pending]:
    """Start to receive into fresh blocks."""
    link = call.link
    assert link is not None
    pending = link.pending()
    received = [call.empty(shape, dtype) for shape, dtype in kinds]
    for block in received:
        link.receive(pending, block.reshape(-1), source, phase)
    return received, pending
