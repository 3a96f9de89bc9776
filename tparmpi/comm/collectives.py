"""The collectives of groups and meshes, on plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tparmpi.comm import algorithms, objects
from tparmpi.comm.call import (
    Call,
    cut,
    join,
    receive_array,
    send_array,
    spread_object,
)
from tparmpi.comm.folding import fold_of
from tparmpi.comm.members import Members
from tparmpi.comm.tags import FIRST, MESSAGE
from tparmpi.errors import ShapeError, UsageError
from tparmpi.sharding import chunk

Array = Any


class Collectives(Members):
    """A place whose members exchange arrays.

    Every method is collective over the members unless it says otherwise. Arrays are
    NumPy or CuPy arrays of any strides, numeric dtype and shape, without dims or
    elements too; they are not changed, results are fresh. Members' dims are numbered
    from 0, their places by `rank`.
    """

    # Sums

    def all_reduce(self, array: Array, op: str = "sum") -> Array:
        """Return the members' arrays combined elementwise, the same on every member.

        The sum is a left fold in member order, in float32 for float16 and bfloat16,
        rounded once: no algorithm or size of message changes a bit of it.

        Parameters
        ----------
        array
            Of the same shape and dtype on every member.
        op : {"sum", "max", "min", "mean"}

        Raises
        ------
        UsageError
            If `op` is unknown, or the dtype has no such operation.
        """
        with self._operation("all_reduce") as call:
            data = call.take_in(array)
            fold = fold_of(op, data.dtype, call.xp, "all_reduce")
            link = call.link
            if link is None:
                return call.copy(array)
            flat = data.reshape(-1)
            if flat.nbytes * (self.size - 1) <= algorithms.WHOLE_BYTES:
                out = algorithms.reduce_whole(link, flat, fold)
            else:
                out = algorithms.reduce_everywhere(link, flat, fold)
            own = chunk(flat.size, self.size, self.rank)[1]
            call.sent = (flat.size + (self.size - 2) * own) * flat.itemsize
            return call.give_out(out.reshape(data.shape))

    def reduce_scatter(self, array: Array, dim: int = 0, op: str = "sum") -> Array:
        """Return this rank's chunk of the members' arrays combined elementwise.

        `dim` is cut by the chunk rule: the first ``L % n`` members get one more.

        Raises
        ------
        ShapeError
            If the array has no such dim.
        UsageError
            As for `all_reduce`.
        """
        with self._operation("reduce_scatter") as call:
            data = call.take_in(array)
            dim = _dim("reduce_scatter", data.shape, dim)
            fold = fold_of(op, data.dtype, call.xp, "reduce_scatter")
            link = call.link
            if link is None:
                return call.copy(array)
            blocks = cut(data, dim, self.size)
            mine = blocks[self.rank]
            out = call.empty(mine.shape, data.dtype)
            flats = [block.reshape(-1) for block in blocks]
            algorithms.reduce_blocks(link, flats, out.reshape(-1), fold)
            call.sent = data.nbytes - mine.nbytes
            return call.give_out(out)

    # Moves

    def all_gather(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Array:
        """Return the members' arrays joined along `dim`, in member order.

        Parameters
        ----------
        array
            Of the same dtype on every member, and of the same shape but for `dim`.
        sizes
            Length of `dim` on each member; exchanged first if None.

        Raises
        ------
        ShapeError
            If the array has no such dim, or `sizes` does not fit it.
        """
        with self._operation("all_gather") as call:
            data = call.take_in(array)
            dim = _dim("all_gather", data.shape, dim)
            sizes = self._sizes(call, data.shape[dim], sizes)
            if call.link is None:
                return call.copy(array)
            shapes = [_with(data.shape, dim, size) for size in sizes]
            outgoing = [data.reshape(-1)] * self.size
            out = join(call, outgoing, shapes, dim, data)
            call.sent = (self.size - 1) * data.nbytes
            return call.give_out(out)

    def all_to_all(
        self,
        array: Array,
        split_dim: int,
        concat_dim: int,
        sizes: Sequence[int] | None = None,
    ) -> Array:
        """Cut along one dim, send each member its chunk, join along another.

        Parameters
        ----------
        array
            Of the same dtype on every member, and of the same shape but for
            `concat_dim`.
        split_dim
            Cut by the chunk rule.
        concat_dim
            Joined in member order.
        sizes
            Length of `concat_dim` on each member; exchanged first if None.

        Raises
        ------
        ShapeError
            If the array has no such dim, or `sizes` does not fit it.
        """
        with self._operation("all_to_all") as call:
            data = call.take_in(array)
            split_dim = _dim("all_to_all", data.shape, split_dim)
            concat_dim = _dim("all_to_all", data.shape, concat_dim)
            sizes = self._sizes(call, data.shape[concat_dim], sizes)
            if call.link is None:
                return call.copy(array)
            blocks = cut(data, split_dim, self.size)
            mine = blocks[self.rank]
            if split_dim == concat_dim:
                own = [chunk(size, self.size, self.rank)[1] for size in sizes]
            else:
                own = list(sizes)
            shapes = [_with(mine.shape, concat_dim, size) for size in own]
            outgoing = [block.reshape(-1) for block in blocks]
            out = join(call, outgoing, shapes, concat_dim, mine)
            call.sent = data.nbytes - mine.nbytes
            return call.give_out(out)

    def broadcast(self, array: Array | None, root: int = 0) -> Array:
        """Return the root's array on every member; others' `array` is not looked at.

        Raises
        ------
        UsageError
            If there is no member `root`.
        """
        self._member("broadcast", root)
        with self._operation("broadcast") as call:
            link = call.link
            if link is None:
                return call.copy(array)
            data = call.take_in(array) if self.rank == root else None
            head = None if data is None else (data.shape, data.dtype)
            shape, dtype = spread_object(link, head, root)
            out = call.empty(shape, dtype) if data is None else data
            algorithms.spread(link, out.reshape(-1), root)
            call.sent = len(algorithms.tree(link, root)[1]) * out.nbytes
            return call.copy(array) if self.rank == root else call.give_out(out)

    def gather(self, array: Array, root: int = 0, dim: int = 0) -> Array | None:
        """Return the members' arrays joined along `dim` on the root, None elsewhere.

        Raises
        ------
        ShapeError
            If the array has no such dim.
        UsageError
            If there is no member `root`.
        """
        self._member("gather", root)
        with self._operation("gather") as call:
            data = call.take_in(array)
            dim = _dim("gather", data.shape, dim)
            link = call.link
            if link is None:
                return call.copy(array)
            if self.rank != root:
                call.sent = data.nbytes
                send_array(link, data, root, FIRST)
                return None
            parts = [
                data if member == root else receive_array(link, member, FIRST)
                for member in range(self.size)
            ]
            return call.give_out(call.xp.concatenate(parts, dim))

    def scatter(self, array: Array | None, root: int = 0, dim: int = 0) -> Array:
        """Return this rank's chunk of the root's array; others' is not looked at.

        `dim` is cut by the chunk rule.

        Raises
        ------
        ShapeError
            On the root, if the array has no such dim; the others notice that it left.
        UsageError
            If there is no member `root`.
        """
        self._member("scatter", root)
        with self._operation("scatter") as call:
            link = call.link
            if link is None:
                return call.copy(array)
            if self.rank != root:
                return call.give_out(receive_array(link, root, FIRST))
            data = call.take_in(array)
            blocks = cut(data, _dim("scatter", data.shape, dim), self.size)
            for member in link.others():
                send_array(link, blocks[member], member, FIRST)
            call.sent = data.nbytes - blocks[root].nbytes
            return call.give_out(blocks[root].copy())

    def send(self, array: Array, to: int) -> None:
        """Send an array to member `to`, which calls `recv`. Collective over the two.

        It may wait for the receiver, whatever the array's size.
        """
        self._peer("send", to)
        with self._message("send", self.rank, to) as call:
            assert call.link is not None
            data = call.take_in(array)
            call.sent = data.nbytes
            send_array(call.link, data, to, MESSAGE)

    def recv(self, source: int) -> Array:
        """Return the next array that member `source` sends. Collective over the two."""
        self._peer("recv", source)
        with self._message("recv", source, self.rank) as call:
            assert call.link is not None
            return call.give_out(receive_array(call.link, source, MESSAGE))

    def barrier(self) -> None:
        """Return when every member has called it."""
        with self._operation("barrier") as call:
            if call.link is not None:
                algorithms.meet(call.link)

    # Python objects

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's small, picklable object on every member."""
        self._member("broadcast_object", root)
        with self._operation("broadcast_object") as call:
            if call.link is None:
                return value
            received = spread_object(call.link, value, root)
            return value if self.rank == root else received

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every member's small, picklable object, in member order."""
        with self._operation("all_gather_object") as call:
            link = call.link
            if link is None:
                return [value]
            frame, body = objects.pack(value)
            frames = [np.empty_like(frame) for _ in range(self.size)]
            algorithms.exchange(link, [frame] * self.size, frames)
            frames[self.rank] = frame
            bodies = [objects.body_for(other) for other in frames]
            algorithms.exchange(link, [body] * self.size, bodies)
            bodies[self.rank] = body
            call.sent = (self.size - 1) * (frame.nbytes + body.nbytes)
            values = [objects.unpack(f, b) for f, b in zip(frames, bodies, strict=True)]
            values[self.rank] = value
            return values

    # Checks

    def _operation(self, kind: str) -> Call:
        call = Call(self, self._open(kind), kind, self._sequence)
        self._sequence += 1
        return call

    def _message(self, kind: str, source: int, to: int) -> Call:
        channel = self._open(kind)
        number = self._messages.get((source, to), 0)
        self._messages[source, to] = number + 1
        return Call(self, channel, kind, number)

    def _sizes(
        self, call: Call, length: int, sizes: Sequence[int] | None
    ) -> Sequence[int]:
        """Return every member's length of the dim that is joined."""
        if sizes is None:
            return _exchange_lengths(call, length)
        if len(sizes) != self.size or sizes[self.rank] != length:
            raise ShapeError(
                f"{call.kind}: sizes {tuple(sizes)} must hold each of the {self.size} "
                f"members' lengths, and this one's (member {self.rank}) is {length}"
            )
        return sizes

    def _member(self, kind: str, member: int) -> None:
        if not 0 <= member < self.size:
            raise UsageError(
                f"{kind}: {self!r} has no member {member}; they are numbered from 0"
            )

    def _peer(self, kind: str, member: int) -> None:
        self._member(kind, member)
        if member == self.rank:
            raise UsageError(f"{kind}: member {member} is this rank itself")


def _exchange_lengths(call: Call, length: int) -> list[int]:
    link = call.link
    if link is None:
        return [length]
    own = np.array([length], np.int64)
    lengths = np.empty((link.size, 1), np.int64)
    lengths[link.rank] = own
    algorithms.exchange(link, [own] * link.size, list(lengths))
    return [int(other) for other in lengths[:, 0]]


def _dim(kind: str, shape: tuple[int, ...], dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise ShapeError(f"{kind}: an array of shape {shape} has no dim {dim}")
    return dim


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
