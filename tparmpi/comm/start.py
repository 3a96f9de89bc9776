"""Non-blocking collectives: ``group.start.all_reduce(array)`` returns a handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tparmpi.comm import operations
from tparmpi.comm.call import Array
from tparmpi.comm.handle import Handle

if TYPE_CHECKING:
    from tparmpi.comm.collectives import Collectives


class Start:
    """The collectives of a group or mesh, each started here and waited for later.

    Every method takes what the method of that name of `Collectives` takes, begins that
    operation and returns a `Handle`; operations of a group begin in program order, the
    same on every member. An array that was given, and an `out`, must be left alone
    until the handle is done. What the blocking method refuses at once is refused here.

    Starting is local, but every member must start the operation, or make the blocking
    call, before any member's is complete.
    """

    def __init__(self, place: Collectives) -> None:
        self._place = place

    def all_reduce(
        self, array: Array, op: str = "sum", *, out: Array | None = None
    ) -> Handle[Array]:
        """Start `Collectives.all_reduce`. Local."""
        call = self._place.begin("all_reduce")
        return call.start(operations.all_reduce, array, op, out)

    def reduce_scatter(
        self,
        array: Array,
        dim: int = 0,
        op: str = "sum",
        *,
        out: Array | None = None,
    ) -> Handle[Array]:
        """Start `Collectives.reduce_scatter`. Local."""
        call = self._place.begin("reduce_scatter")
        return call.start(operations.reduce_scatter, array, dim, op, out)

    def all_gather(
        self,
        array: Array,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        out: Array | None = None,
    ) -> Handle[Array]:
        """Start `Collectives.all_gather`. Local."""
        call = self._place.begin("all_gather")
        return call.start(operations.all_gather, array, dim, sizes, out)

    def all_to_all(
        self,
        array: Array,
        split_dim: int,
        concat_dim: int,
        sizes: Sequence[int] | None = None,
        *,
        out: Array | None = None,
    ) -> Handle[Array]:
        """Start `Collectives.all_to_all`. Local."""
        call = self._place.begin("all_to_all")
        return call.start(
            operations.all_to_all, array, split_dim, concat_dim, sizes, out
        )

    def broadcast(
        self, array: Array | None, root: int = 0, *, out: Array | None = None
    ) -> Handle[Array]:
        """Start `Collectives.broadcast`. Local."""
        call = self._place.begin("broadcast", root)
        return call.start(operations.broadcast, array, root, out)

    def gather(
        self, array: Array, root: int = 0, dim: int = 0, *, out: Array | None = None
    ) -> Handle[Array | None]:
        """Start `Collectives.gather`. Local."""
        call = self._place.begin("gather", root)
        return call.start(operations.gather, array, root, dim, out)

    def scatter(
        self,
        array: Array | None,
        root: int = 0,
        dim: int = 0,
        *,
        out: Array | None = None,
    ) -> Handle[Array]:
        """Start `Collectives.scatter`. Local."""
        call = self._place.begin("scatter", root)
        return call.start(operations.scatter, array, root, dim, out)

    def send(self, array: Array, to: int) -> Handle[None]:
        """Start `Collectives.send`. Local."""
        call = self._place.begin_message("send", self._place.rank, to)
        return call.start(operations.send, array, to)

    def recv(self, source: int, *, out: Array | None = None) -> Handle[Array]:
        """Start `Collectives.recv`. Local."""
        call = self._place.begin_message("recv", source, self._place.rank)
        return call.start(operations.recv, source, out)

    def send_arrays(self, arrays: Sequence[Array], to: int) -> Handle[None]:
        """Start `Collectives.send_arrays`. Local."""
        call = self._place.begin_message("send_arrays", self._place.rank, to)
        return call.start(operations.send_arrays, arrays, to)

    def recv_arrays(self, source: int) -> Handle[list[Array]]:
        """Start `Collectives.recv_arrays`. Local."""
        call = self._place.begin_message("recv_arrays", source, self._place.rank)
        return call.start(operations.recv_arrays, source)

    def barrier(self) -> Handle[None]:
        """Start `Collectives.barrier`: done when every member has started it. Local."""
        return self._place.begin("barrier").start(operations.barrier)

    def broadcast_object(self, value: Any, root: int = 0) -> Handle[Any]:
        """Start `Collectives.broadcast_object`. Local."""
        call = self._place.begin("broadcast_object", root)
        return call.start(operations.broadcast_object, value, root)

    def all_gather_object(self, value: Any) -> Handle[list[Any]]:
        """Start `Collectives.all_gather_object`. Local."""
        call = self._place.begin("all_gather_object")
        return call.start(operations.all_gather_object, value)
