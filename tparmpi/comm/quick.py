"""The short way of small blocking calls of host arrays, unless counted or checked.

For arrays this small, what is done around the messages takes longer than they do. So
all that follows from a call's arguments is kept for the next such call. The messages
are those of `operations`: another member may take the long way.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from tparmpi.comm import algorithms, ring
from tparmpi.comm.abandoned import keep
from tparmpi.comm.control import Pending, unfit
from tparmpi.comm.ledger import active
from tparmpi.comm.rooms import Room, make_room
from tparmpi.comm.tags import PHASES, start_of
from tparmpi.comm.transports import host

if TYPE_CHECKING:
    from tparmpi.comm.channel import Channel
    from tparmpi.comm.members import Members

Array = np.ndarray[Any, np.dtype[Any]]

_SPINS = range(20)
_ndarray = np.ndarray
# Frames from the record of the call up to the user's.
_DEPTH = 3
# Memory that is kept to receive into, in bytes, at most; it is warm.
_KEPT_BYTES = 8 * 2**20


class Quick:
    """Small calls of one exchange among the members of one place.

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
        transport = channel.transport
        self._others = algorithms.others(transport.rank, transport.size)
        self._sources = self._others[::-1]
        self._is_pair = transport.size == 2
        self._first = self._others[0]
        self._start, self._tags = start_of(place.id, channel.tag_bound)
        self._rooms: dict[Any, Room] = {}

    def run(self, kind: str, array: Any, *arguments: Any) -> Array | None:
        """Return a call's result, or None if it has to go the long way, untouched.

        Called by the method that the user calls.
        """
        if type(array) is not _ndarray or active or not array.flags.c_contiguous:
            return None
        key = kind, arguments, array.dtype, array.shape
        room = self._rooms.get(key)
        if room is None:
            room = self._new_room(kind, array, arguments)
            if room is None:
                return None
            self._rooms[key] = room
        place, channel = self._place, self._channel
        sequence = place.sequence
        # As tags.fold has it; the messages are of the first phase.
        tag = (self._start + sequence) % self._tags * PHASES
        if tag in channel.in_flight or tag in channel.broken:
            return None
        place.sequence = sequence + 1
        recorder = ring.recorder
        entry = recorder.enter(kind, place.recorded_as, sequence, _DEPTH)
        try:
            incoming, outgoing = room.begin(array)
            if self._is_pair:
                other = self._first
                receive = self._irecv(incoming[0], other, tag)
                send = self._isend(outgoing[0], other, tag)
                for _ in _SPINS:
                    if receive.Test():
                        if not send.Test():
                            self._wait(kind, [send])
                        break
                else:
                    self._wait(kind, [receive, send])
            else:
                tags = repeat(tag)
                requests = list(map(self._irecv, incoming, self._sources, tags))
                requests += map(self._isend, outgoing, self._others, tags)
                self._wait(kind, requests)
            result = room.finish()
        except BaseException as error:
            # Messages may still be under way: the room is lost.
            self._rooms.pop(key, None)
            keep(error)
            channel.break_off(tag)
            recorder.break_off(entry)
            if isinstance(error, MPI.Exception):
                raise unfit(error, kind) from error
            raise
        recorder.leave(entry)
        return result

    def forget(self) -> None:
        """Decide anew which calls go this way. Local."""
        self._rooms.clear()

    def _wait(self, kind: str, requests: list[MPI.Request]) -> None:
        for _ in _SPINS:
            while requests[-1].Test():
                requests.pop()
                if not requests:
                    return
        pending = Pending()
        members = self._channel.members
        # Sends were started last, and are seen complete first.
        ranks = [members[other] for other in (*self._sources, *self._others)]
        for request, rank in zip(requests, ranks, strict=False):
            pending.add(request, rank)
        pending.wait(self._control, kind)

    def _new_room(
        self, kind: str, array: Array, arguments: tuple[Any, ...]
    ) -> Room | None:
        """Return what such calls need; None if they must go the long way."""
        room = make_room(self._channel, kind, array, arguments)
        # Above the limit of a message, arrays are sent in several.
        most = min(_KEPT_BYTES, host.MESSAGE_BYTES)
        if room is None or room.nbytes > most or array.nbytes > most:
            return None
        kept = sum(room.nbytes for room in self._rooms.values())
        if kept + room.nbytes > _KEPT_BYTES:
            self._rooms.clear()
        return room


def quick_for(place: Members, channel: Channel) -> Quick | None:
    """Return the short way of a place, if its arrays are the host's. Local."""
    if type(channel.transport) is host.HostTransport:
        return Quick(place, channel)
    return None
