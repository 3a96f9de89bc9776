"""Messages of a GPU's arrays through pinned host memory, for any MPI library."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from tparmpi.comm.transports.base import Array
from tparmpi.comm.transports.device import DeviceTransport
from tparmpi.comm.transports.lanes import Envelope, Message
from tparmpi.comm.transports.streams import Streams

# One message's largest size in bytes. Every rank cuts equally.
STAGE_BYTES = 2**20


class StagedTransport(DeviceTransport):
    """Arrays are copied down, sent, received and copied up, in pieces.

    While one piece of a lane is copied, the one before it is under way: each lane has
    two buffers of pinned memory. CuPy keeps pinned memory for the next to ask.
    """

    name = "staged"
    window = 2

    def piece_bytes(self) -> int:
        return STAGE_BYTES

    def outgoing(self, piece: Array, envelope: Envelope, earlier: Any) -> Message:
        return _Outgoing(self, piece, envelope, earlier)

    def incoming(self, piece: Array, envelope: Envelope, earlier: Any) -> Message:
        return _Incoming(self, piece, envelope, earlier)


class _Staged(Message):
    """A message of pinned memory, and the copy before or after it.

    Parameters
    ----------
    transport : StagedTransport
    piece
        Device array (N,) uint8.
    envelope : Envelope
    earlier
        Event after which the piece may be read or written.
    """

    def __init__(
        self,
        transport: StagedTransport,
        piece: Array,
        envelope: Envelope,
        earlier: Any,
    ) -> None:
        super().__init__(envelope)
        self.comm = transport.comm
        self.streams: Streams = transport.streams
        self.piece = piece
        self.earlier = earlier
        self.pinned: np.ndarray[Any, Any] | None = None
        self.copied: Any = None

    def begin(self) -> None:
        size = self.piece.size
        memory = self.streams.xp.cuda.alloc_pinned_memory(size)
        self.pinned = np.frombuffer(memory, np.uint8, size)

    def _message(self) -> tuple[Any, int, int]:
        return [self.pinned, MPI.BYTE], self.envelope.member, self.envelope.tag


class _Outgoing(_Staged):
    """Copied down, then sent."""

    def begin(self) -> None:
        super().begin()
        down = self.streams.down
        down.wait_event(self.earlier)
        self.piece.get(stream=down, out=self.pinned, blocking=False)
        self.copied = self.streams.event(down)

    def is_ready(self) -> bool:
        return bool(self.copied.done)

    def hand_over(self) -> MPI.Request:
        return self.comm.Isend(*self._message())

    def land(self) -> None:
        self.pinned = None


class _Incoming(_Staged):
    """Received, then copied up."""

    def is_ready(self) -> bool:
        return True

    def hand_over(self) -> MPI.Request:
        return self.comm.Irecv(*self._message())

    def land(self) -> None:
        up, work = self.streams.up, self.streams.work
        up.wait_event(self.earlier)
        self.piece.set(self.pinned, stream=up)
        self.copied = self.streams.event(up)
        work.wait_event(self.copied)

    def is_gone(self) -> bool:
        if not self.copied.done:
            return False
        self.pinned = None
        return True
