"""The short way of small sums: of host arrays, blocking, while nobody counts or checks.

For arrays this small, what is done around the messages takes longer than they do. The
messages are those of `operations.all_reduce`: another member may take the long way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from tparmpi.comm import algorithms, ring
from tparmpi.comm.abandoned import keep
from tparmpi.comm.control import Pending, unfit
from tparmpi.comm.folding import OPERATIONS, Plain, fold_of
from tparmpi.comm.ledger import active
from tparmpi.comm.tags import FIRST, fold
from tparmpi.comm.transports import host
from tparmpi.errors import UsageError

if TYPE_CHECKING:
    from tparmpi.comm.algorithms import Fold
    from tparmpi.comm.channel import Channel
    from tparmpi.comm.members import Members
    from tparmpi.comm.transports.base import Transport

Array = np.ndarray[Any, np.dtype[Any]]

# Above this, the long way costs nothing that shows.
_BYTES = 1024 * 1024
_SPINS = 20
_KIND = "all_reduce"
# Frames from the record of the call up to the user's.
_DEPTH = 3
# Memory that is kept to receive into, in bytes, at most; it is warm.
_KEPT_BYTES = 8 * 2**20
# Above this, results come from memory that is used again.
_LENT_BYTES = 64 * 1024


class Quick:
    """Sums of small arrays over the members of one place.

    Parameters
    ----------
    place : Members
    channel : Channel
        The place's, whose transport is the host's.
    """

    def __init__(self, place: Members, channel: Channel) -> None:
        assert channel.comm is not None
        assert channel.transport is not None
        self._place = place
        self._channel = channel
        self._control = channel.transport.control
        self._isend = channel.comm.Isend
        self._irecv = channel.comm.Irecv
        me, size = channel.transport.rank, channel.transport.size
        self._me, self._size = me, size
        self._others = [(me + step) % size for step in range(1, size)]
        self._rooms: dict[tuple[str, np.dtype[Any], tuple[int, ...]], _Room] = {}

    def all_reduce(self, array: Any, op: str) -> Array | None:
        """Return the sum, or None if it has to go the long way, untouched.

        Called by the method that the user calls.
        """
        if type(array) is not np.ndarray or active or not array.flags.c_contiguous:
            return None
        key = op, array.dtype, array.shape
        room = self._rooms.pop(key, None) or self._new_room(array, op)
        place, channel = self._place, self._channel
        if room is None:
            return None
        sequence = place.sequence
        tag = fold(place.id, sequence, channel.tag_bound)
        if tag in channel.in_flight:
            return None
        place.sequence = sequence + 1
        recorder = ring.recorder
        entry = recorder.enter(_KIND, place.recorded_as, sequence, _DEPTH)
        try:
            tag += FIRST
            send = (array, room.nbytes, MPI.BYTE)
            parts = room.parts
            if self._size == 2:
                other = self._others[0]
                requests = [
                    self._irecv(room.specs[other], other, tag),
                    self._isend(send, other, tag),
                ]
            else:
                requests = [
                    self._irecv(room.specs[other], other, tag)
                    for other in reversed(self._others)
                ]
                requests += [self._isend(send, other, tag) for other in self._others]
            self._wait(requests)
            parts[self._me] = array
            out = room.fold(parts)
            parts[self._me] = None
        except BaseException as error:
            # Messages may still be under way: the tag stays taken, the room is lost.
            keep(error)
            channel.in_flight.add(tag)
            recorder.break_off(entry)
            raise
        recorder.leave(entry)
        self._rooms[key] = room
        return out

    def forget(self) -> None:
        """Decide anew which sums go this way. Local."""
        self._rooms.clear()

    def _wait(self, requests: list[MPI.Request]) -> None:
        try:
            for _ in range(_SPINS):
                while requests[-1].Test():
                    requests.pop()
                    if not requests:
                        return
        except MPI.Exception as error:
            raise unfit(error, _KIND) from error
        pending = Pending()
        members = self._channel.members
        # Sends were started last, and are seen complete first.
        others = [members[other] for other in reversed(self._others)]
        others += [members[other] for other in self._others]
        for request, rank in zip(requests, others, strict=False):
            pending.add(request, rank)
        pending.wait(self._control, _KIND)

    def _new_room(self, array: Array, op: str) -> _Room | None:
        """Return what such sums need; None if they must go the long way."""
        if (
            op not in OPERATIONS
            or array.dtype.kind not in "biufc"
            or not 0 < array.nbytes <= min(_BYTES, host.MESSAGE_BYTES)
            or not algorithms.goes_whole(array.nbytes, self._size, self._channel.way)
        ):
            return None
        try:
            folder = fold_of(op, array.dtype, np, _KIND)
        except UsageError:
            # The long way says why.
            return None
        nbytes = array.nbytes * self._size
        if nbytes > _KEPT_BYTES:
            return None
        kept = sum(room.nbytes for room in self._rooms.values()) * self._size
        if kept + nbytes > _KEPT_BYTES:
            self._rooms.clear()
        transport = self._channel.transport
        assert transport is not None
        return _Room(array, self._size, folder, transport)


class _Room:
    """Where the members' arrays of one kind are received, and how they are folded."""

    def __init__(
        self, array: Array, size: int, folder: Fold, transport: Transport
    ) -> None:
        self.nbytes = array.nbytes
        self._transport = transport
        self.parts: list[Any] = [np.empty_like(array) for _ in range(size)]
        self.specs = [(part, self.nbytes, MPI.BYTE) for part in self.parts]
        self._folder = folder
        # Without dims, a ufunc without `out` returns a scalar.
        self._ufunc = None
        if isinstance(folder, Plain) and array.ndim and array.nbytes <= _LENT_BYTES:
            self._ufunc = folder.ufunc

    def fold(self, parts: list[Array]) -> Array:
        """Return the left fold of the members' arrays."""
        ufunc = self._ufunc
        if ufunc is None:
            total: Array = self._transport.empty(parts[0].shape, parts[0].dtype)
            self._folder(parts, total)
            return total
        out: Array = ufunc(parts[0], parts[1])
        for member in range(2, len(parts)):
            ufunc(out, parts[member], out=out)
        return out


def quick_for(place: Members, channel: Channel) -> Quick | None:
    """Return the short way of a place, if its arrays are the host's. Local."""
    if type(channel.transport) is host.HostTransport:
        return Quick(place, channel)
    return None
