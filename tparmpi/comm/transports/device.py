"""Messages of arrays in a GPU's memory: what both ways through MPI share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from tparmpi.comm.control import Control, Pending
from tparmpi.comm.scratch import Scratch
from tparmpi.comm.transports import host
from tparmpi.comm.transports.base import Array, Transport
from tparmpi.comm.transports.lanes import LanePending, Lanes, Message
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
        self._start(pending, flat, member, tag, self.outgoing, self.comm.Isend)

    def start_receive(
        self, pending: Pending, flat: Array, member: int, tag: int
    ) -> None:
        self._start(pending, flat, member, tag, self.incoming, self.comm.Irecv)

    def _start(
        self,
        pending: Pending,
        flat: Array,
        member: int,
        tag: int,
        way: Any,
        start: Any,
    ) -> None:
        assert isinstance(pending, LanePending)
        if not flat.size:
            return
        lane = (start is self.comm.Isend, member, tag)
        rank = self._members[member]
        flat = flat.view(np.uint8)
        if isinstance(flat, np.ndarray):
            limit = host.MESSAGE_BYTES
            pieces = (flat[low : low + limit] for low in range(0, flat.size, limit))
            for piece in pieces:
                pending.put(lane, HostMessage(start, piece, member, tag, rank))
            return
        # What the caller or a sum still writes there, or reads.
        earlier = self.streams.event(self.streams.work)
        limit = self.piece_bytes()
        for low in range(0, flat.size, limit):
            piece = flat[low : low + limit]
            pending.put(lane, way(piece, member, tag, rank, earlier))

    @abstractmethod
    def piece_bytes(self) -> int:
        """Return one message's largest size, the same on every rank. Local."""

    @abstractmethod
    def outgoing(
        self, piece: Array, member: int, tag: int, rank: int, earlier: Any
    ) -> Message:
        """Return the message that sends `piece` once `earlier` has happened. Local."""

    @abstractmethod
    def incoming(
        self, piece: Array, member: int, tag: int, rank: int, earlier: Any
    ) -> Message:
        """Return the message received into `piece` after `earlier`. Local."""


class HostMessage(Message):
    """A message from or to host memory."""

    def __init__(
        self, start: Any, buffer: Array, member: int, tag: int, rank: int
    ) -> None:
        super().__init__(rank)
        self._start = start
        self._arguments = ([buffer, MPI.BYTE], member, tag)

    def is_ready(self) -> bool:
        return True

    def hand_over(self) -> MPI.Request:
        request: MPI.Request = self._start(*self._arguments)
        return request
