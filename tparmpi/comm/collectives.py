"""The collectives of groups and meshes, on plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tparmpi.comm import operations
from tparmpi.comm.call import Array, Call
from tparmpi.comm.members import Members
from tparmpi.comm.start import Start
from tparmpi.errors import UsageError


class Collectives(Members):
    """A place whose members exchange arrays.

    Every method is collective over the members unless it says otherwise. Arrays are
    NumPy or CuPy arrays of any strides, numeric dtype and shape, without dims or
    elements too; they are not changed, results are fresh. Members' dims are numbered
    from 0, their places by `rank`.

    Where a method takes `out`, that is where the result goes, and what is returned: an
    array of its shape and dtype, of any strides; it may be the input or a part of it.
    """

    _start: Start | None = None

    @property
    def start(self) -> Start:
        """The same methods, which start an operation and return its `Handle`. Local."""
        if self._start is None:
            self._start = Start(self)
        return self._start

    # Sums

    def all_reduce(
        self, array: Array, op: str = "sum", *, out: Array | None = None
    ) -> Array:
        """Return the members' arrays combined elementwise, the same on every member.

        The sum is a left fold in member order, in float32 for float16 and bfloat16,
        rounded once: no algorithm or size of message changes a bit of it.

        Parameters
        ----------
        array
            Of the same shape and dtype on every member.
        op : {"sum", "max", "min", "mean"}
        out
            For the result.

        Raises
        ------
        UsageError
            If `op` is unknown, or the dtype has no such operation, or `out` has another
            dtype.
        ShapeError
            If `out` has another shape.
        """
        if out is None and self._quick is not None:
            result = self._quick.run("all_reduce", array, op)
            if result is not None:
                return result
        call = self.begin("all_reduce")
        return call.run(operations.all_reduce, array, op, out)

    def reduce_scatter(
        self,
        array: Array,
        dim: int = 0,
        op: str = "sum",
        *,
        out: Array | None = None,
    ) -> Array:
        """Return this rank's chunk of the members' arrays combined elementwise.

        `dim` is cut by the chunk rule: the first ``L % n`` members get one more.

        Raises
        ------
        ShapeError
            If the array has no such dim, or `out` does not fit.
        UsageError
            As for `all_reduce`.
        """
        if out is None and self._quick is not None:
            result = self._quick.run("reduce_scatter", array, dim, op)
            if result is not None:
                return result
        call = self.begin("reduce_scatter")
        return call.run(operations.reduce_scatter, array, dim, op, out)

    # Moves

    def all_gather(
        self,
        array: Array,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return the members' arrays joined along `dim`, in member order.

        Parameters
        ----------
        array
            Of the same dtype on every member, and of the same shape but for `dim`.
        sizes
            Length of `dim` on each member; exchanged first if None.
        out
            For the result.

        Raises
        ------
        ShapeError
            If the array has no such dim, or `sizes` or `out` does not fit it.
        """
        if out is None and sizes is not None and self._quick is not None:
            result = self._quick.run("all_gather", array, dim, tuple(sizes))
            if result is not None:
                return result
        call = self.begin("all_gather")
        return call.run(operations.all_gather, array, dim, sizes, out)

    def all_to_all(
        self,
        array: Array,
        split_dim: int,
        concat_dim: int,
        sizes: Sequence[int] | None = None,
        *,
        out: Array | None = None,
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
        out
            For the result.

        Raises
        ------
        ShapeError
            If the array has no such dim, or `sizes` or `out` does not fit it.
        """
        if out is None and sizes is not None and self._quick is not None:
            given = split_dim, concat_dim, tuple(sizes)
            result = self._quick.run("all_to_all", array, *given)
            if result is not None:
                return result
        call = self.begin("all_to_all")
        return call.run(operations.all_to_all, array, split_dim, concat_dim, sizes, out)

    def broadcast(
        self, array: Array | None, root: int = 0, *, out: Array | None = None
    ) -> Array:
        """Return the root's array on every member; others' `array` is not looked at.

        Raises
        ------
        UsageError
            If there is no member `root`.
        ShapeError
            If `out` does not fit.
        """
        call = self.begin("broadcast", root)
        return call.run(operations.broadcast, array, root, out)

    def gather(
        self, array: Array, root: int = 0, dim: int = 0, *, out: Array | None = None
    ) -> Array | None:
        """Return the members' arrays joined along `dim` on the root, None elsewhere.

        `out` is for the root's result.

        Raises
        ------
        ShapeError
            If the array has no such dim, or `out` does not fit.
        UsageError
            If there is no member `root`.
        """
        call = self.begin("gather", root)
        return call.run(operations.gather, array, root, dim, out)

    def scatter(
        self,
        array: Array | None,
        root: int = 0,
        dim: int = 0,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return this rank's chunk of the root's array; others' is not looked at.

        `dim` is cut by the chunk rule.

        Raises
        ------
        ShapeError
            On the root, if the array has no such dim; the others notice that it left.
            If `out` does not fit.
        UsageError
            If there is no member `root`.
        """
        call = self.begin("scatter", root)
        return call.run(operations.scatter, array, root, dim, out)

    def send(self, array: Array, to: int) -> None:
        """Send an array to member `to`, which calls `recv`. Collective over the two.

        It may wait for the receiver, whatever the array's size.
        """
        self.begin_message("send", self.rank, to).run(operations.send, array, to)

    def recv(self, source: int, *, out: Array | None = None) -> Array:
        """Return the next array that member `source` sends. Collective over the two."""
        call = self.begin_message("recv", source, self.rank)
        return call.run(operations.recv, source, out)

    def send_arrays(self, arrays: Sequence[Array], to: int) -> None:
        """Send arrays to member `to`, which calls `recv_arrays`.

        Collective over the two. It may wait for the receiver, whatever the sizes.
        """
        call = self.begin_message("send_arrays", self.rank, to)
        call.run(operations.send_arrays, arrays, to)

    def recv_arrays(self, source: int) -> list[Array]:
        """Return the next arrays that member `source` sends together.

        Collective over the two. Their number, shapes and dtypes are the sender's.
        """
        call = self.begin_message("recv_arrays", source, self.rank)
        return call.run(operations.recv_arrays, source)

    def barrier(self) -> None:
        """Return when every member has called it."""
        self.begin("barrier").run(operations.barrier)

    # Python objects

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's small, picklable object on every member."""
        call = self.begin("broadcast_object", root)
        return call.run(operations.broadcast_object, value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every member's small, picklable object, in member order."""
        call = self.begin("all_gather_object")
        return call.run(operations.all_gather_object, value)

    def foreseen(self, shape: Sequence[int], dtype: Any) -> Array | None:
        """Return the `out` for a `recv` of what is known to be of this kind. Local.

        None, but on a simulated mesh, where nothing comes that could tell.
        """
        return self.backend.empty(shape, dtype) if self.kind == "meta" else None

    # Calls

    def begin(self, kind: str, root: int = 0) -> Call:
        """Begin the next call; members make the same calls in the same order."""
        channel = self._channel or self._open(kind)
        if not 0 <= root < self.size:
            raise UsageError(
                f"{kind}: {self!r} has no member {root}; they are numbered from 0"
            )
        sequence = self.sequence
        self.sequence = sequence + 1
        return channel.call(self, channel, kind, sequence)

    def begin_message(self, kind: str, source: int, to: int) -> Call:
        """Begin the next point-to-point call of two members."""
        channel = self._open(kind)
        peer = to if source == self.rank else source
        if not 0 <= peer < self.size:
            raise UsageError(
                f"{kind}: {self!r} has no member {peer}; they are numbered from 0"
            )
        if source == to:
            raise UsageError(f"{kind}: member {peer} is this rank itself")
        number = self._messages.get((source, to), 0)
        self._messages[source, to] = number + 1
        return channel.call(self, channel, kind, number, (source, to))
