"""Messages of arrays in a GPU's memory: what both ways through MPI share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from tparmpi.comm.control import Control, Pending
from tparmpi.comm.scratch import Scratch
from tparmpi.comm.transports import host
from tparmpi.comm.transports.base import Array, Transport
from tparmpi.comm.transports.lanes import Envelope, LanePending, Lanes, Message
from tparmpi.comm.transports.streams import Streams, Turn, streams_of


class DeviceTransport(Transport):
    """Working arrays are the GPU's; host arrays can be sent and received too.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The members' communicator.
    members : tuple of int
        World rank of each member.
    control : Control
        Says which ranks have ended.
    xp : module
        CuPy, or what stands in for it.
    """

    # Messages of a lane that may be under way at a time.
    window: int | None = None

    def __init__(
        self,
        comm: MPI.Intracomm,
        members: tuple[int, ...],
        control: Control,
        xp: Any,
    ) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.control = control
        self.xp = xp
        self.comm = comm
        self.streams: Streams = streams_of(xp)
        self._members = members
        self._lanes = Lanes(self.window, self.streams.device)
        self._scratch = Scratch(lambda nbytes: xp.empty((nbytes,), np.uint8))

    def turn(self) -> Turn:
        return Turn(self.streams)

    def take_in(self, array: Array) -> Array:
        if not isinstance(array, self.xp.ndarray):
            return self.xp.asarray(np.asarray(array))
        return array if array.flags.c_contiguous else array.copy(order="C")

    def give_out(self, array: Array, place: Any) -> Array:
        return array

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return self.xp.empty(tuple(shape), dtype)

    def borrow(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return self._scratch.borrow(shape, dtype)

    def give_back(self, array: Array) -> None:
        self._scratch.give_back(array)

    def pending(self) -> Pending:
        return LanePending(self._lanes)

    def start_send(self, pending: Pending, flat: Array, member: int, tag: int) -> None:
        self._start(pending, flat, ("to", member, tag), self.outgoing)

    def start_receive(
        self, pending: Pending, flat: Array, member: int, tag: int
    ) -> None:
        self._start(pending, flat, ("from", member, tag), self.incoming)

    def _start(
        self,
        pending: Pending,
        flat: Array,
        lane: tuple[str, int, int],
        message: Callable[[Array, Envelope, Any], Message],
    ) -> None:
        assert isinstance(pending, LanePending)
        if not flat.size:
            return
        way, member, tag = lane
        envelope = Envelope(member, tag, self._members[member])
        flat = flat.view(np.uint8)
        if isinstance(flat, np.ndarray):
            start = self.comm.Isend if way == "to" else self.comm.Irecv
            for piece in _pieces(flat, host.MESSAGE_BYTES):
                pending.put(lane, HostMessage(start, piece, envelope))
            return
        # What the caller or a sum still writes there, or reads.
        earlier = self.streams.event(self.streams.work)
        for piece in _pieces(flat, self.piece_bytes()):
            pending.put(lane, message(piece, envelope, earlier))

    @abstractmethod
    def piece_bytes(self) -> int:
        """Return one message's largest size, the same on every rank. Local."""

    @abstractmethod
    def outgoing(self, piece: Array, envelope: Envelope, earlier: Any) -> Message:
        """Return the message that sends `piece` once `earlier` has happened. Local."""

    @abstractmethod
    def incoming(self, piece: Array, envelope: Envelope, earlier: Any) -> Message:
        """Return the message received into `piece` after `earlier`. Local."""


def _pieces(flat: Array, nbytes: int) -> Iterator[Array]:
    return (flat[low : low + nbytes] for low in range(0, flat.size, nbytes))


class HostMessage(Message):
    """A message from or to host memory.

    Parameters
    ----------
    start : callable
        ``Isend`` or ``Irecv``.
    buffer
        Array (N,) uint8.
    envelope : Envelope
    """

    def __init__(self, start: Any, buffer: Array, envelope: Envelope) -> None:
        super().__init__(envelope)
        self._start = start
        self._buffer = buffer

    def is_ready(self) -> bool:
        return True

    def hand_over(self) -> MPI.Request:
        envelope = self.envelope
        buffer = [self._buffer, MPI.BYTE]
        request: MPI.Request = self._start(buffer, envelope.member, envelope.tag)
        return request
