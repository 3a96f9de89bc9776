"""Simulated meshes: the shapes and the ledger of one rank among many, without MPI.

A simulated rank's arrays are `MetaArray` objects. Its calls return at once, with the
shapes that they return among real ranks, and enter in the ledger what this rank would
send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tparmpi.backend import MetaArray, get
from tparmpi.comm import algorithms, blocks, objects, operations, runtime
from tparmpi.comm.ledger import Entry, active
from tparmpi.comm.settings import DeviceSettings
from tparmpi.errors import GroupError, ShapeError, UsageError
from tparmpi.sharding import chunk

if TYPE_CHECKING:
    from tparmpi.comm.device import Device
    from tparmpi.comm.group import Group
    from tparmpi.comm.members import Members
    from tparmpi.comm.mesh import Mesh

_KIND = "meta"


class simulate:
    """Context in which one process stands for one rank of a mesh of any size.

    ``with tpm.simulate(dp=64, pp=8, tp=8) as mesh:`` runs a program's shapes, layouts
    and ledger without data, communication or `init`: models are built on ``mesh`` (or
    ``mesh.autodiff()``, ``mesh.split("pp")``, …) and called as always. The ledger's
    calls and bytes are those of the rank at `coordinates`, exactly. Whatever needs
    values (`numpy`, `item`, …) raises `DeviceError`. Local; under a launcher too.

    Parameters
    ----------
    coordinates
        The place along each axis of the rank that is simulated, in axis order or by
        name; the first rank's by default.
    settings
        Default dtypes, as for `init`.
    **axes
        Size of each axis, outermost first.

    Raises
    ------
    UsageError
        If there are no axes, or no such coordinates.

    Examples
    --------
    >>> with tpm.simulate(dp=4, tp=8) as mesh, tpm.ledger() as ledger:
    ...     x = tpm.tensor(np.zeros((16, 64)), mesh).with_sharding(dp=tpm.Shard(0))
    ...     w = tpm.tensor(np.zeros((64, 64)), mesh).with_sharding(tp=tpm.Shard(0))
    ...     y = (x @ w).with_sharding(tp=tpm.Replicate())
    >>> ledger.bytes(axis="tp")
    3584
    """

    def __init__(
        self,
        *,
        coordinates: Sequence[int] | Mapping[str, int] | None = None,
        settings: DeviceSettings | None = None,
        **axes: int,
    ) -> None:
        from tparmpi.comm.mesh import check_sizes

        if not axes:
            raise UsageError(
                "simulate: no axes are given; name them: simulate(dp=2, tp=2)"
            )
        check_sizes("simulate", axes)
        self._axes = axes
        here = _checked_coordinates(coordinates, axes)
        rank = int(np.ravel_multi_index(here, tuple(axes.values())))
        self._settings = settings or DeviceSettings()
        self._rank = rank

    def __enter__(self) -> Mesh:
        from tparmpi.comm.mesh import Mesh

        world = SimulatedWorld(prod(self._axes.values()), self._rank, self._settings)
        self._before = runtime.replace_world(world)  # type: ignore[arg-type]
        try:
            from tparmpi.comm.group import make_group

            world.group = make_group(world.devices, "group")
            return Mesh(world.devices, self._axes)
        except BaseException:
            runtime.replace_world(self._before)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        runtime.replace_world(self._before)


def _checked_coordinates(
    given: Sequence[int] | Mapping[str, int] | None, axes: Mapping[str, int]
) -> tuple[int, ...]:
    if given is None:
        return (0,) * len(axes)
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in axes]
        if unknown:
            raise UsageError(
                f"simulate: there is no axis '{unknown[0]}'; the axes are "
                f"{', '.join(axes)}"
            )
        given = [given.get(name, 0) for name in axes]
    here = tuple(given)
    if len(here) != len(axes) or not all(
        0 <= place < size for place, size in zip(here, axes.values(), strict=True)
    ):
        raise UsageError(
            f"simulate: coordinates {here} are none of a mesh of "
            f"{' × '.join(f'{name}={size}' for name, size in axes.items())}; give one "
            "for each axis, counted from 0"
        )
    return here


class SimulatedWorld:
    """What a `World` is to its ranks, for one simulated rank.

    Attributes
    ----------
    rank, size, devices, group, channels
        As a world's.
    """

    is_simulated = True
    checker = None
    comm = None

    def __init__(self, size: int, rank: int, settings: DeviceSettings) -> None:
        from tparmpi.comm.device import Device

        self.size = size
        self.rank = rank
        self.user_comms: list[Any] = []
        self.channels: dict[tuple[int, ...], SimulatedChannel] = {}
        self.group: Group | None = None
        self.devices: tuple[Device, ...] = tuple(
            Device(
                number,
                _KIND,
                is_member=number == rank,
                settings=settings,
                supported_dtypes=get(_KIND).supported_dtypes,
                host="simulated",
                index=None,
                local_rank=0,
                transports=(),
            )
            for number in range(size)
        )

    def channel(self, members: tuple[int, ...]) -> SimulatedChannel:
        """Return the channel of `members`. Local."""
        if members not in self.channels:
            self.channels[members] = SimulatedChannel(members)
        return self.channels[members]

    def communicator(self, members: tuple[int, ...]) -> NoReturn:
        """Refuse: there is no MPI."""
        raise GroupError(
            "comm: a simulated mesh has no communicator; ask for one on real devices"
        )


class SimulatedChannel:
    """What a `Channel` is to its groups, with nothing behind it."""

    transport = None
    way = None

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.in_flight: set[int] = set()
        self.groups = 0
        self.call = SimulatedCall

    def take_id(self) -> int:
        """Return a number for a new group. Local."""
        self.groups += 1
        return self.groups - 1

    def give_back_id(self, group_id: int) -> None:
        """Forget a group. Local."""
        self.groups -= 1

    def free(self) -> None:
        """Do nothing."""


class SimulatedCall:
    """What a `Call` is to an operation: it returns at once, and counts."""

    def __init__(
        self,
        place: Members,
        channel: Any,
        kind: str,
        sequence: int,
        pair: tuple[int, int] | None = None,
    ) -> None:
        self.place = place
        self.kind = kind
        self.sent = 0
        self._entry = Entry() if active and place.size > 1 else None

    def run(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the operation would, and count what it would send. Local."""
        result = _OPERATIONS[operation](self, *arguments)
        if self._entry is not None:
            self._entry.close(self.kind, self.place.label, self.sent)
        return result

    def start(
        self, operation: Callable[..., Any], *arguments: Any, site: str | None = None
    ) -> Done:
        """Return a handle of the operation, which is done. Local."""
        return Done(self.run(operation, *arguments))

    def chunk(self, length: int, member: int | None = None) -> int:
        """Return a member's part of a dim of `length`; this rank's if None."""
        number = self.place.rank if member is None else member
        return chunk(length, self.place.size, number)[1]

    def give(
        self, shape: Sequence[int], dtype: np.dtype[Any], out: Any = None
    ) -> MetaArray:
        """Return the result, or `out` if it can hold it."""
        if out is None:
            return MetaArray(shape, dtype)
        if tuple(out.shape) != tuple(shape):
            raise ShapeError(
                f"{self.kind}: out must have the result's shape {tuple(shape)}, it has "
                f"{out.shape}"
            )
        return out  # type: ignore[no-any-return]

    def unknown(self, what: str) -> UsageError:
        """Return the error about what only another rank knows."""
        return UsageError(
            f"{self.kind}: a simulated mesh does not know what other ranks give; "
            f"pass {what}"
        )


class Done:
    """The handle of a call that is complete. See `Handle`."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> Any:
        """Return the result. Local."""
        return self._result


def _all_reduce(call: SimulatedCall, array: Any, op: str, out: Any) -> MetaArray:
    size = call.place.size
    if size > 1:
        own = call.chunk(array.size)
        call.sent = operations.summed_bytes(array.size, own, size, array.itemsize)
    return call.give(array.shape, array.dtype, out)


def _reduce_scatter(
    call: SimulatedCall, array: Any, dim: int, op: str, out: Any
) -> MetaArray:
    operations.check_dim(call, array.shape, dim)
    shape = operations.with_dim(array.shape, dim, call.chunk(array.shape[dim]))
    mine = call.give(shape, array.dtype, out)
    call.sent = array.nbytes - mine.nbytes
    return mine


def _lengths(
    call: SimulatedCall, length: int, sizes: Sequence[int] | None
) -> Sequence[int]:
    if call.place.size == 1:
        return [length]
    if sizes is None:
        raise call.unknown("sizes")
    if len(sizes) != call.place.size or sizes[call.place.rank] != length:
        raise ShapeError(
            f"{call.kind}: sizes {tuple(sizes)} must hold each of the "
            f"{call.place.size} members' lengths, and this one's (member "
            f"{call.place.rank}) is {length}"
        )
    return sizes


def _all_gather(
    call: SimulatedCall, array: Any, dim: int, sizes: Sequence[int] | None, out: Any
) -> MetaArray:
    operations.check_dim(call, array.shape, dim)
    length = sum(_lengths(call, array.shape[dim], sizes))
    call.sent = (call.place.size - 1) * array.nbytes
    return call.give(operations.with_dim(array.shape, dim, length), array.dtype, out)


def _all_to_all(
    call: SimulatedCall,
    array: Any,
    split_dim: int,
    concat_dim: int,
    sizes: Sequence[int] | None,
    out: Any,
) -> MetaArray:
    operations.check_dim(call, array.shape, split_dim)
    operations.check_dim(call, array.shape, concat_dim)
    lengths = _lengths(call, array.shape[concat_dim], sizes)
    kept = operations.with_dim(
        array.shape, split_dim, call.chunk(array.shape[split_dim])
    )
    call.sent = array.nbytes - prod(kept) * array.itemsize
    if split_dim == concat_dim:
        lengths = [call.chunk(length) for length in lengths]
    shape = operations.with_dim(kept, concat_dim, sum(lengths))
    return call.give(shape, array.dtype, out)


def _broadcast(call: SimulatedCall, array: Any, root: int, out: Any) -> MetaArray:
    known = array if call.place.rank == root else out
    if known is None:
        raise call.unknown("out")
    children = algorithms.tree(call.place.rank, call.place.size, root)[1]
    call.sent = len(children) * known.nbytes
    return call.give(known.shape, known.dtype, out)


def _gather(
    call: SimulatedCall, array: Any, root: int, dim: int, out: Any
) -> MetaArray | None:
    operations.check_dim(call, array.shape, dim)
    if call.place.rank != root:
        call.sent = array.nbytes
        return None
    if out is None and call.place.size > 1:
        raise call.unknown("out")
    return call.give((array if out is None else out).shape, array.dtype, out)


def _scatter(
    call: SimulatedCall, array: Any, root: int, dim: int, out: Any
) -> MetaArray:
    if call.place.rank != root:
        if out is None:
            raise call.unknown("out")
        return call.give(out.shape, out.dtype, out)
    operations.check_dim(call, array.shape, dim)
    shape = operations.with_dim(array.shape, dim, call.chunk(array.shape[dim]))
    mine = call.give(shape, array.dtype, out)
    call.sent = array.nbytes - mine.nbytes
    return mine


def _send(call: SimulatedCall, array: Any, to: int) -> None:
    call.sent = array.nbytes


def _send_arrays(call: SimulatedCall, arrays: Sequence[Any], to: int) -> None:
    call.sent = sum(array.nbytes for array in arrays)


def _recv(call: SimulatedCall, source: int, out: Any) -> MetaArray:
    if out is None:
        raise call.unknown("out")
    return call.give(out.shape, out.dtype, out)


def _recv_arrays(call: SimulatedCall, source: int) -> list[MetaArray]:
    """Nothing: who calls knows what would come."""
    return []


def _send_blocks(
    call: SimulatedCall, arrays: Sequence[Any], to: int, heads: Any, foreseen: bool
) -> None:
    call.sent = sum(array.nbytes for array in arrays)


def _recv_blocks(call: SimulatedCall, source: int, expected: Any) -> list[MetaArray]:
    """Nothing, as `_recv_arrays`."""
    return []


def _barrier(call: SimulatedCall) -> None:
    return None


def _broadcast_object(call: SimulatedCall, value: Any, root: int) -> Any:
    if call.place.rank != root:
        raise call.unknown(
            "it by another way: only the root of broadcast_object has it"
        )
    return value


def _all_gather_object(call: SimulatedCall, value: Any) -> list[Any]:
    """The members' objects, as if all gave the same."""
    frame, body = objects.pack(value)
    call.sent = (call.place.size - 1) * (frame.nbytes + body.nbytes)
    return [value] * call.place.size


_OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    operations.all_reduce: _all_reduce,
    operations.reduce_scatter: _reduce_scatter,
    operations.all_gather: _all_gather,
    operations.all_to_all: _all_to_all,
    operations.broadcast: _broadcast,
    operations.gather: _gather,
    operations.scatter: _scatter,
    operations.send: _send,
    operations.send_arrays: _send_arrays,
    operations.recv: _recv,
    operations.recv_arrays: _recv_arrays,
    blocks.send_blocks: _send_blocks,
    blocks.recv_blocks: _recv_blocks,
    operations.barrier: _barrier,
    operations.broadcast_object: _broadcast_object,
    operations.all_gather_object: _all_gather_object,
}
