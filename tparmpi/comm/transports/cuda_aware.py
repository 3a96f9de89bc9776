"""Messages from and to a GPU's memory, by an MPI library that takes it."""

from __future__ import annotations

from typing import Any

from tparmpi.comm.transports import host
from tparmpi.comm.transports.base import Array
from tparmpi.comm.transports.device import DeviceTransport, HostMessage
from tparmpi.comm.transports.lanes import Envelope, Message


class CudaAwareTransport(DeviceTransport):
    """MPI is given the arrays themselves, when the streams are done with them."""

    name = "cuda_aware"

    def piece_bytes(self) -> int:
        return host.MESSAGE_BYTES

    def outgoing(self, piece: Array, envelope: Envelope, earlier: Any) -> Message:
        return _Direct(self.comm.Isend, piece, envelope, earlier)

    def incoming(self, piece: Array, envelope: Envelope, earlier: Any) -> Message:
        return _Direct(self.comm.Irecv, piece, envelope, earlier)


class _Direct(HostMessage):
    """A message of device memory, which waits for an event first."""

    def __init__(
        self, start: Any, piece: Array, envelope: Envelope, earlier: Any
    ) -> None:
        super().__init__(start, piece, envelope)
        self._earlier = earlier

    def is_ready(self) -> bool:
        return bool(self._earlier.done)
