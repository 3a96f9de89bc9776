"""What small calls need, kept between them: where they receive, and what they send.

A room serves calls of one kind with the same arguments and arrays of one shape and
dtype, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from tparmpi.comm import algorithms
from tparmpi.comm.folding import OPERATIONS, Plain, fold_of
from tparmpi.comm.operations import cut, with_dim
from tparmpi.errors import UsageError
from tparmpi.sharding import chunk, chunk_sizes

if TYPE_CHECKING:
    from tparmpi.comm.algorithms import Fold
    from tparmpi.comm.channel import Channel
    from tparmpi.comm.transports.base import Transport

Array = np.ndarray[Any, np.dtype[Any]]
Combine = Callable[[Sequence[Array]], Array]
Message = tuple[Array, int, MPI.Datatype]
"""What mpi4py takes: memory, its length, and that it is bytes."""

_BYTE = MPI.BYTE

# Above these, the long way costs nothing that shows: bytes of the array to sum whole,
# and of the largest of what else a call takes and returns.
_WHOLE_BYTES = 1024 * 1024
_BYTES = 64 * 1024
# Sums above this are made in memory of results that nobody holds any more, and received
# there at once.
_LENT_BYTES = 64 * 1024


class Room:
    """Where the other members' parts of a result are received.

    Parameters
    ----------
    transport : Transport
        The host's.
    shapes : sequence of tuple of int
        Shape of each member's part.
    dtype : numpy.dtype
    combine : callable
        Makes the result of all members' parts.
    dim : int or None
        Where the array is cut to send each member its block; None sends it whole.

    Attributes
    ----------
    nbytes : int
        What it keeps.
    """

    def __init__(
        self,
        transport: Transport,
        shapes: Sequence[tuple[int, ...]],
        dtype: np.dtype[Any],
        combine: Combine,
        dim: int | None = None,
    ) -> None:
        self._me = transport.rank
        self._others = algorithms.others(transport.rank, transport.size)
        self._count = transport.size - 1
        self._combine = combine
        self._dim = dim
        self._parts: list[Any] = [np.empty(shape, dtype) for shape in shapes]
        self._parts[self._me] = None
        incoming = [_message(self._parts[m]) for m in reversed(self._others)]
        self._incoming: list[Any] = incoming
        self.nbytes = sum(message[1] for message in incoming)

    def begin(self, array: Array) -> tuple[list[Message], list[Message]]:
        """Return what to receive, from the last member on, and send, from the next."""
        if self._dim is None:
            self._parts[self._me] = array
            return self._incoming, [(array, array.nbytes, _BYTE)] * self._count
        blocks = cut(array, self._dim, len(self._parts))
        self._parts[self._me] = blocks[self._me]
        return self._incoming, [_message(blocks[member]) for member in self._others]

    def finish(self) -> Array:
        """Return the result, once all parts are here."""
        result = self._combine(self._parts)
        self._parts[self._me] = None
        return result


class _LargeSum(Room):
    """Receives one part where the sum will be; see `algorithms.places`."""

    def __init__(self, transport: Transport, array: Array, folder: Fold) -> None:
        shapes = [array.shape] * transport.size
        there = algorithms.there(transport.rank)
        shapes[there] = (0,)

        def combine(parts: Sequence[Array]) -> Array:
            folder(parts, parts[there])
            return parts[there]

        super().__init__(transport, shapes, array.dtype, combine)
        self._there = there
        self._position = self._others[::-1].index(there)
        self._transport = transport

    def begin(self, array: Array) -> tuple[list[Message], list[Message]]:
        total = self._transport.empty(array.shape, array.dtype)
        self._parts[self._there] = total
        self._incoming[self._position] = _message(total)
        return super().begin(array)

    def finish(self) -> Array:
        total = super().finish()
        # Only the caller holds it.
        self._parts[self._there] = None
        self._incoming[self._position] = None
        return total


def make_room(
    channel: Channel, kind: str, array: Array, arguments: tuple[Any, ...]
) -> Room | None:
    """Return the room of such calls; None if they must go the long way. Local.

    The long way refuses what is wrong.
    """
    if array.dtype.kind not in "biufc" or array.size == 0:
        return None
    assert channel.transport is not None
    return _MAKERS[kind](channel, channel.transport, array, *arguments)


def _for_all_reduce(
    channel: Channel, transport: Transport, array: Array, op: str
) -> Room | None:
    nbytes, size = array.nbytes, transport.size
    folder = _folder("all_reduce", array, op)
    if (
        folder is None
        or nbytes > _WHOLE_BYTES
        or not algorithms.goes_whole(nbytes, size, channel.way)
    ):
        return None
    if nbytes > _LENT_BYTES:
        return _LargeSum(transport, array, folder)
    combine = _summing(folder, array.shape, size)
    return Room(transport, [array.shape] * size, array.dtype, combine)


def _for_reduce_scatter(
    channel: Channel, transport: Transport, array: Array, dim: int, op: str
) -> Room | None:
    folder = _folder("reduce_scatter", array, op)
    lengths = _cut_lengths(array, dim, transport)
    if folder is None or lengths is None:
        return None
    largest = array.size // array.shape[dim] * lengths[0]
    if largest > algorithms.step_of(array.itemsize, transport.size, channel.way):
        return None
    mine = with_dim(array.shape, dim, lengths[transport.rank])
    combine = _summing(folder, mine, transport.size)
    return Room(transport, [mine] * transport.size, array.dtype, combine, dim)


def _for_all_gather(
    channel: Channel,
    transport: Transport,
    array: Array,
    dim: int,
    sizes: tuple[int, ...],
) -> Room | None:
    if not _may_join(array, dim, sizes, transport):
        return None
    shapes = [with_dim(array.shape, dim, length) for length in sizes]
    return Room(transport, shapes, array.dtype, partial(np.concatenate, axis=dim))


def _for_all_to_all(
    channel: Channel,
    transport: Transport,
    array: Array,
    split_dim: int,
    concat_dim: int,
    sizes: tuple[int, ...],
) -> Room | None:
    lengths = _cut_lengths(array, split_dim, transport)
    if lengths is None or not _may_join(array, concat_dim, sizes, transport):
        return None
    size, me = transport.size, transport.rank
    if split_dim == concat_dim:
        sizes = tuple(chunk(length, size, me)[1] for length in sizes)
        if 0 in sizes:
            return None
    mine = with_dim(array.shape, split_dim, lengths[me])
    shapes = [with_dim(mine, concat_dim, length) for length in sizes]
    combine = partial(np.concatenate, axis=concat_dim)
    return Room(transport, shapes, array.dtype, combine, split_dim)


_MAKERS: dict[str, Callable[..., Room | None]] = {
    "all_reduce": _for_all_reduce,
    "reduce_scatter": _for_reduce_scatter,
    "all_gather": _for_all_gather,
    "all_to_all": _for_all_to_all,
}


def _folder(kind: str, array: Array, op: str) -> Fold | None:
    if op not in OPERATIONS:
        return None
    try:
        return fold_of(op, array.dtype, np, kind)
    except UsageError:
        return None


def _summing(folder: Fold, shape: tuple[int, ...], size: int) -> Combine:
    """Return what makes a fresh array of the fold of small arrays."""
    if isinstance(folder, Plain) and shape:
        ufunc = folder.ufunc
        if size == 2:
            return lambda parts: ufunc(parts[0], parts[1])

        def combine(parts: Sequence[Array]) -> Array:
            total: Array = ufunc(parts[0], parts[1])
            for part in parts[2:]:
                ufunc(total, part, out=total)
            return total

        return combine

    def combine_into(parts: Sequence[Array]) -> Array:
        # Without dims, a ufunc without `out` returns a scalar.
        total = np.empty(shape, parts[0].dtype)
        folder(parts, total)
        return total

    return combine_into


def _cut_lengths(
    array: Array, dim: int, transport: Transport
) -> tuple[int, ...] | None:
    """Return the lengths of an array's blocks, if it can be cut and none is empty."""
    if array.nbytes > _BYTES or not 0 <= dim < array.ndim:
        return None
    lengths = chunk_sizes(array.shape[dim], transport.size)
    return None if 0 in lengths else lengths


def _may_join(
    array: Array, dim: int, sizes: tuple[int, ...], transport: Transport
) -> bool:
    """Say whether members' arrays of these lengths are joined here, none empty."""
    return (
        0 <= dim < array.ndim
        and len(sizes) == transport.size
        and sizes[transport.rank] == array.shape[dim]
        and 0 not in sizes
        and array.nbytes // array.shape[dim] * sum(sizes) <= _BYTES
    )


def _message(array: Array) -> Message:
    return array, array.nbytes, _BYTE
