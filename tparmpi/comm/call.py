"""One collective call: its tag, its place in the ledger, and its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tparmpi.comm import algorithms, objects
from tparmpi.comm.algorithms import Link
from tparmpi.comm.ledger import active, record
from tparmpi.comm.tags import FIRST
from tparmpi.errors import ShapeError, UsageError
from tparmpi.sharding import chunk

if TYPE_CHECKING:
    from tparmpi.comm.channel import Channel
    from tparmpi.comm.members import Members

Array = Any

# Raised before anything is sent.
_REFUSALS = (UsageError, ShapeError)


class Call:
    """The scope of one call: holds its tag while it runs, records it when it ends.

    Parameters
    ----------
    place : Members
    channel : Channel
        The open place's.
    kind : str
        Name of the call.
    sequence : int
        Number of the call, the same on all members.

    Attributes
    ----------
    link : Link or None
        None where there is one member, and nothing to send.
    sent : int
        Payload bytes that this rank sends; the call sets it.
    """

    __slots__ = ("_channel", "_place", "_sequence", "_start", "kind", "link", "sent")

    def __init__(
        self, place: Members, channel: Channel, kind: str, sequence: int
    ) -> None:
        self._place = place
        self._channel = channel
        self._sequence = sequence
        self._start = 0.0
        self.kind = kind
        self.link: Link | None = None
        self.sent = 0

    def __enter__(self) -> Call:
        transport = self._channel.transport
        if transport is not None:
            if active:
                self._start = perf_counter()
            tag = self._channel.begin(self._place.id, self._sequence)
            self.link = Link(transport, tag, self.kind)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.link is None:
            return
        if error is not None and not issubclass(error, _REFUSALS):
            # Messages may still be under way: the tag stays taken.
            return
        self._channel.end(self.link.tag)
        if self._start and error is None:
            seconds = perf_counter() - self._start
            record(self.kind, self._place.label, self.sent, seconds)

    @property
    def xp(self) -> Any:
        """The array module of working arrays."""
        return np if self.link is None else self.link.transport.xp

    def take_in(self, array: Array) -> Array:
        """Return a rank's array as a working array; see `Transport`."""
        if self.link is None:
            return array if hasattr(array, "dtype") else np.asarray(array)
        return self.link.transport.take_in(array)

    def give_out(self, array: Array) -> Array:
        """Return a fresh working array as an array of the place's kind."""
        assert self.link is not None
        return self.link.transport.give_out(array, self._place)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised working array."""
        assert self.link is not None
        return self.link.transport.empty(shape, dtype)

    def copy(self, array: Array) -> Array:
        """Return a fresh, C-contiguous copy of a rank's own array."""
        return array.copy(order="C") if hasattr(array, "dtype") else np.array(array)


def cut(data: Array, dim: int, parts: int) -> list[Array]:
    """Return the contiguous chunks of a working array along `dim`."""
    blocks = []
    for part in range(parts):
        start, size = chunk(data.shape[dim], parts, part)
        block = data[(slice(None),) * dim + (slice(start, start + size),)]
        blocks.append(block if block.flags.c_contiguous else block.copy(order="C"))
    return blocks


def join(
    call: Call,
    outgoing: Sequence[Array],
    shapes: Sequence[tuple[int, ...]],
    dim: int,
    own: Array,
) -> Array:
    """Exchange flat blocks and return the received ones joined along `dim`.

    Parameters
    ----------
    outgoing
        A flat block for each member.
    shapes
        Shape of the block that comes from each member.
    own
        This rank's block for itself.
    """
    link = call.link
    assert link is not None
    total = sum(shape[dim] for shape in shapes)
    shape = (*own.shape[:dim], total, *own.shape[dim + 1 :])
    out = call.empty(shape, own.dtype)
    places = []
    stop = 0
    for block in shapes:
        start, stop = stop, stop + block[dim]
        places.append(out[(slice(None),) * dim + (slice(start, stop),)])
    # Blocks that are contiguous in the result are received in place.
    received = [
        place if place.flags.c_contiguous else call.empty(place.shape, own.dtype)
        for place in places
    ]
    places[link.rank][...] = own
    algorithms.exchange(link, outgoing, [block.reshape(-1) for block in received])
    for member in link.others():
        if received[member] is not places[member]:
            places[member][...] = received[member]
    return out


def spread_object(link: Link, value: Any, root: int) -> Any:
    """Return the root's `value` on every member."""
    frame, body = objects.pack(value if link.rank == root else None)
    algorithms.spread(link, frame, root)
    if link.rank != root:
        body = objects.body_for(frame)
    algorithms.spread(link, body, root)
    return objects.unpack(frame, body)


def send_array(link: Link, data: Array, to: int, phase: int = FIRST) -> None:
    """Send a working array with its shape and dtype."""
    frame, body = objects.pack((data.shape, data.dtype))
    pending = link.pending()
    for part in (frame, body, data.reshape(-1)):
        link.send(pending, part, to, phase)
    link.wait(pending)


def receive_array(link: Link, source: int, phase: int = FIRST) -> Array:
    """Return the working array that `send_array` sends."""
    frame = np.empty(objects.FRAME_BYTES, np.uint8)
    _receive(link, frame, source, phase)
    body = objects.body_for(frame)
    _receive(link, body, source, phase)
    shape, dtype = objects.unpack(frame, body)
    data = link.transport.empty(shape, dtype)
    _receive(link, data.reshape(-1), source, phase)
    return data


def _receive(link: Link, flat: Array, source: int, phase: int) -> None:
    pending = link.pending()
    link.receive(pending, flat, source, phase)
    link.wait(pending)
