"""Messages from and to host memory. Arrays of a GPU are copied there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from tparmpi.comm.control import Control, Pending
from tparmpi.comm.lent import Lender
from tparmpi.comm.scratch import Scratch
from tparmpi.comm.transports.base import Array, Transport

# One message's largest size in bytes: MPI counts are 32-bit in its older interfaces.
# Every rank cuts equally, so that the pieces match.
MESSAGE_BYTES = 2**30

_scratch = Scratch()
_results = Lender()

# MPI gets at the memory of these kinds directly; others (bfloat16) hide it.
_PLAIN_KINDS = frozenset("biufc")


class HostTransport(Transport):
    """Point-to-point messages of host memory on a private communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The members' communicator.
    members : tuple of int
        World rank of each member.
    control : Control
        Says which ranks have ended.
    """

    name = "host"
    xp = np
    withdraws = True

    def __init__(
        self, comm: MPI.Intracomm, members: tuple[int, ...], control: Control
    ) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self._members = members
        self.control = control
        self._isend = comm.Isend
        self._irecv = comm.Irecv

    def take_in(self, array: Array) -> Array:
        if type(array) is not np.ndarray and hasattr(array, "__cuda_array_interface__"):
            from tparmpi.backend import get

            array = get("cuda").to_host(array)
        array = np.asarray(array)
        # Not ascontiguousarray: that makes 0-d arrays 1-d.
        return array if array.flags.c_contiguous else array.copy(order="C")

    def give_out(self, array: Array, place: Any) -> Array:
        return array if place.kind == "cpu" else place.backend.from_host(array)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return _results.empty(shape, dtype)

    def borrow(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return _scratch.borrow(shape, dtype)

    def give_back(self, array: Array) -> None:
        _scratch.give_back(array)

    def pending(self) -> Pending:
        return Pending()

    def start_send(self, pending: Pending, flat: Array, member: int, tag: int) -> None:
        for piece in _messages(flat):
            pending.requests.append(self._isend(piece, member, tag))
            pending.ranks.append(self._members[member])

    def start_receive(
        self, pending: Pending, flat: Array, member: int, tag: int
    ) -> None:
        for piece in _messages(flat):
            pending.requests.append(self._irecv(piece, member, tag))
            pending.ranks.append(self._members[member])


def _messages(flat: Array) -> list[tuple[Array, int, MPI.Datatype]]:
    """Cut a one-dim array into messages; none where it has no elements."""
    nbytes = flat.nbytes
    if flat.dtype.kind not in _PLAIN_KINDS:
        flat = flat.view(np.uint8)
    if 0 < nbytes <= MESSAGE_BYTES:
        return [(flat, nbytes, MPI.BYTE)]
    flat = flat.view(np.uint8)
    starts = range(0, nbytes, MESSAGE_BYTES)
    pieces = (flat[start : start + MESSAGE_BYTES] for start in starts)
    return [(piece, piece.nbytes, MPI.BYTE) for piece in pieces]
