"""What each collective does: the steps of one call on one rank.

Each is a generator function of the call and its arguments; see `algorithms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tparmpi.comm import algorithms, objects
from tparmpi.comm.algorithms import Link, Steps
from tparmpi.comm.call import Array, Call
from tparmpi.comm.folding import fold_of
from tparmpi.comm.tags import FIRST, MESSAGE
from tparmpi.errors import ShapeError
from tparmpi.sharding import chunk


class Kind(Protocol):
    """A call as errors name it."""

    kind: str


def all_reduce(call: Call, array: Array, op: str, out: Array | None) -> Steps[Array]:
    """See `Collectives.all_reduce`."""
    data = call.take_in(array)
    fold = fold_of(op, data.dtype, call.xp, "all_reduce")
    call.check_out(out, data.shape, data.dtype)
    link = call.link
    if link is None:
        return call.copy(array, out)
    flat = data.reshape(-1)
    size = link.size
    if algorithms.goes_whole(flat.nbytes, size, link.way):
        total = call.target(out, data.shape, data.dtype, data)
        yield from algorithms.reduce_whole(link, flat, total.reshape(-1), fold)
    elif call.is_over(out, data):
        total = data
        yield from algorithms.reduce_everywhere(link, flat, flat, fold)
    else:
        total = call.target(out, data.shape, data.dtype, data)
        yield from algorithms.reduce_everywhere(link, flat, total.reshape(-1), fold)
    if call.is_counted:
        own = chunk(flat.size, size, link.rank)[1]
        call.sent = summed_bytes(flat.size, own, size, flat.itemsize)
    return call.give_out(total, out)


def reduce_scatter(
    call: Call, array: Array, dim: int, op: str, out: Array | None
) -> Steps[Array]:
    """See `Collectives.reduce_scatter`."""
    data = call.take_in(array)
    check_dim(call, data.shape, dim)
    fold = fold_of(op, data.dtype, call.xp, "reduce_scatter")
    link = call.link
    if link is None:
        call.check_out(out, data.shape, data.dtype)
        return call.copy(array, out)
    blocks = cut(data, dim, link.size)
    mine = blocks[link.rank]
    call.check_out(out, mine.shape, data.dtype)
    total = call.target(out, mine.shape, data.dtype, data)
    flats = [block.reshape(-1) for block in blocks]
    yield from algorithms.reduce_blocks(link, flats, total.reshape(-1), fold)
    call.sent = data.nbytes - mine.nbytes
    return call.give_out(total, out)


def all_gather(
    call: Call,
    array: Array,
    dim: int,
    sizes: Sequence[int] | None,
    out: Array | None,
) -> Steps[Array]:
    """See `Collectives.all_gather`."""
    data = call.take_in(array)
    check_dim(call, data.shape, dim)
    lengths = yield from lengths_of(call, data.shape[dim], sizes)
    shapes = [with_dim(data.shape, dim, length) for length in lengths]
    call.check_out(out, with_dim(data.shape, dim, sum(lengths)), data.dtype)
    if call.link is None:
        return call.copy(array, out)
    outgoing = [data.reshape(-1)] * call.link.size
    joined = yield from join(call, outgoing, shapes, dim, data, data, out)
    call.sent = (call.link.size - 1) * data.nbytes
    return call.give_out(joined, out)


def all_to_all(
    call: Call,
    array: Array,
    split_dim: int,
    concat_dim: int,
    sizes: Sequence[int] | None,
    out: Array | None,
) -> Steps[Array]:
    """See `Collectives.all_to_all`."""
    data = call.take_in(array)
    check_dim(call, data.shape, split_dim)
    check_dim(call, data.shape, concat_dim)
    lengths = yield from lengths_of(call, data.shape[concat_dim], sizes)
    link = call.link
    if link is None:
        call.check_out(out, data.shape, data.dtype)
        return call.copy(array, out)
    blocks = cut(data, split_dim, link.size)
    mine = blocks[link.rank]
    if split_dim == concat_dim:
        lengths = [chunk(length, link.size, link.rank)[1] for length in lengths]
    shapes = [with_dim(mine.shape, concat_dim, length) for length in lengths]
    call.check_out(out, with_dim(mine.shape, concat_dim, sum(lengths)), data.dtype)
    outgoing = [block.reshape(-1) for block in blocks]
    joined = yield from join(call, outgoing, shapes, concat_dim, mine, data, out)
    call.sent = data.nbytes - mine.nbytes
    return call.give_out(joined, out)


def broadcast(
    call: Call, array: Array | None, root: int, out: Array | None
) -> Steps[Array]:
    """See `Collectives.broadcast`."""
    link = call.link
    if link is None:
        return call.copy(array, out)
    data = call.take_in(array) if link.rank == root else None
    received = yield from spread_array(call, data, root, out)
    call.sent = len(algorithms.tree(link.rank, link.size, root)[1]) * received.nbytes
    if link.rank == root:
        return call.copy(array, out)
    return call.give_out(received, out)


def gather(
    call: Call, array: Array, root: int, dim: int, out: Array | None
) -> Steps[Array | None]:
    """See `Collectives.gather`."""
    data = call.take_in(array)
    check_dim(call, data.shape, dim)
    link = call.link
    if link is None:
        return call.copy(array, out)
    if link.rank != root:
        call.sent = data.nbytes
        yield from send_array(link, data, root, FIRST)
        return None
    parts = []
    for member in range(link.size):
        if member == root:
            parts.append(data)
        else:
            part = yield from receive_array(call, member, FIRST)
            parts.append(part)
    total = sum(part.shape[dim] for part in parts)
    joined = call.target(out, with_dim(data.shape, dim, total), data.dtype, data)
    call.xp.concatenate(parts, dim, out=joined)
    return call.give_out(joined, out)


def scatter(
    call: Call, array: Array | None, root: int, dim: int, out: Array | None
) -> Steps[Array]:
    """See `Collectives.scatter`."""
    link = call.link
    if link is None:
        return call.copy(array, out)
    if link.rank != root:
        received = yield from receive_array(call, root, FIRST, out)
        return call.give_out(received, out)
    data = call.take_in(array)
    check_dim(call, data.shape, dim)
    blocks = cut(data, dim, link.size)
    for member in link.others():
        yield from send_array(link, blocks[member], member, FIRST)
    call.sent = data.nbytes - blocks[root].nbytes
    return call.copy(blocks[root], out)


def send(call: Call, array: Array, to: int) -> Steps[None]:
    """See `Collectives.send`."""
    assert call.link is not None
    data = call.take_in(array)
    call.sent = data.nbytes
    yield from send_array(call.link, data, to, MESSAGE)


def recv(call: Call, source: int, out: Array | None) -> Steps[Array]:
    """See `Collectives.recv`."""
    received = yield from receive_array(call, source, MESSAGE, out)
    return call.give_out(received, out)


def send_arrays(call: Call, arrays: Sequence[Array], to: int) -> Steps[None]:
    """See `Collectives.send_arrays`."""
    link = call.link
    assert link is not None
    count, _ = objects.pack(len(arrays))
    pending = link.pending()
    link.send(pending, count, to, MESSAGE)
    yield pending
    for array in arrays:
        data = call.take_in(array)
        call.sent += data.nbytes
        yield from send_array(link, data, to, MESSAGE)


def recv_arrays(call: Call, source: int) -> Steps[list[Array]]:
    """See `Collectives.recv_arrays`."""
    assert call.link is not None
    count = objects.frame_for()
    yield from _receive(call.link, count, source, MESSAGE)
    received = []
    for _ in range(objects.unpack(count, objects.body_for(count))):
        data = yield from receive_array(call, source, MESSAGE)
        received.append(call.give_out(data))
    return received


def barrier(call: Call) -> Steps[None]:
    """See `Collectives.barrier`."""
    if call.link is not None:
        yield from algorithms.meet(call.link)


def broadcast_object(call: Call, value: Any, root: int) -> Steps[Any]:
    """See `Collectives.broadcast_object`."""
    link = call.link
    if link is None:
        return value
    received = yield from spread_object(link, value, root)
    return value if link.rank == root else received


def all_gather_object(call: Call, value: Any) -> Steps[list[Any]]:
    """See `Collectives.all_gather_object`."""
    link = call.link
    if link is None:
        return [value]
    frame, body = objects.pack(value)
    frames = [np.empty_like(frame) for _ in range(link.size)]
    yield from algorithms.exchange(link, [frame] * link.size, frames)
    frames[link.rank] = frame
    bodies = [objects.body_for(other) for other in frames]
    yield from algorithms.exchange(link, [body] * link.size, bodies)
    bodies[link.rank] = body
    call.sent = (link.size - 1) * (frame.nbytes + body.nbytes)
    values = [objects.unpack(f, b) for f, b in zip(frames, bodies, strict=True)]
    values[link.rank] = value
    return values


# Parts


def cut(data: Array, dim: int, parts: int) -> list[Array]:
    """Return the contiguous chunks of a working array along `dim`."""
    blocks = []
    for part in range(parts):
        start, size = chunk(data.shape[dim], parts, part)
        block = data[(slice(None),) * dim + (slice(start, start + size),)]
        blocks.append(block if block.flags.c_contiguous else block.copy(order="C"))
    return blocks


def join(
    call: Call,
    outgoing: Sequence[Array],
    shapes: Sequence[tuple[int, ...]],
    dim: int,
    own: Array,
    data: Array,
    out: Array | None,
) -> Steps[Array]:
    """Exchange flat blocks and return the received ones joined along `dim`.

    Parameters
    ----------
    outgoing
        A flat block for each member.
    shapes
        Shape of the block that comes from each member.
    own
        This rank's block for itself.
    data
        What the blocks are parts of.
    out
        Where the user wants the result.
    """
    link = call.link
    assert link is not None
    total = sum(shape[dim] for shape in shapes)
    joined = call.target(out, with_dim(own.shape, dim, total), own.dtype, data)
    places = []
    stop = 0
    for block in shapes:
        start, stop = stop, stop + block[dim]
        places.append(joined[(slice(None),) * dim + (slice(start, stop),)])
    # Blocks that are contiguous in the result are received in place.
    received = [
        place if place.flags.c_contiguous else call.empty(place.shape, own.dtype)
        for place in places
    ]
    places[link.rank][...] = own
    incoming = [block.reshape(-1) for block in received]
    yield from algorithms.exchange(link, outgoing, incoming)
    for member in link.others():
        if received[member] is not places[member]:
            places[member][...] = received[member]
    return joined


def spread_object(link: Link, value: Any, root: int) -> Steps[Any]:
    """Return the root's `value` on every member."""
    if link.rank == root:
        frame, body = objects.pack(value)
        yield from algorithms.spread_whole(link, frame, root)
    else:
        frame = objects.frame_for()
        yield from algorithms.spread_whole(link, frame, root)
        body = objects.body_for(frame)
    if body.size:
        yield from algorithms.spread_whole(link, body, root)
    return objects.unpack(frame, body)


def spread_array(
    call: Call, data: Array | None, root: int, out: Array | None
) -> Steps[Array]:
    """Return the root's working array on every member; others give None."""
    link = call.link
    assert link is not None
    if data is not None:
        frame, body, holds_values = objects.pack_array(data)
        yield from algorithms.spread_whole(link, frame, root)
        if body.size:
            yield from algorithms.spread_whole(link, body, root)
        received = data
    else:
        frame = objects.frame_for()
        yield from algorithms.spread_whole(link, frame, root)
        body = objects.body_for(frame)
        if body.size:
            yield from algorithms.spread_whole(link, body, root)
        shape, dtype, values = objects.unpack_array(frame, body)
        holds_values = values is not None
        received = call.target(out, shape, dtype)
        if holds_values:
            received[...] = values
    if not holds_values and received.size:
        yield from algorithms.spread(link, received.reshape(-1), root)
    return received


def send_array(link: Link, data: Array, to: int, phase: int) -> Steps[None]:
    """Send a working array with its shape and dtype."""
    frame, body, holds_values = objects.pack_array(data)
    pending = link.pending()
    link.send(pending, frame, to, phase)
    if body.size:
        link.send(pending, body, to, phase)
    if not holds_values:
        link.send(pending, data.reshape(-1), to, phase)
    yield pending


def receive_array(
    call: Call, source: int, phase: int, out: Array | None = None
) -> Steps[Array]:
    """Return the working array that `send_array` sends."""
    link = call.link
    assert link is not None
    frame = objects.frame_for()
    yield from _receive(link, frame, source, phase)
    body = objects.body_for(frame)
    if body.size:
        yield from _receive(link, body, source, phase)
    shape, dtype, values = objects.unpack_array(frame, body)
    data = call.target(out, shape, dtype)
    if values is not None:
        data[...] = values
    elif data.size:
        yield from _receive(link, data.reshape(-1), source, phase)
    return data


def _receive(link: Link, flat: Array, source: int, phase: int) -> Steps[None]:
    pending = link.pending()
    link.receive(pending, flat, source, phase)
    yield pending


def lengths_of(
    call: Call, length: int, sizes: Sequence[int] | None
) -> Steps[Sequence[int]]:
    """Return every member's length of the dim that is joined."""
    place, link = call.place, call.link
    if sizes is not None:
        if len(sizes) != place.size or sizes[place.rank] != length:
            raise ShapeError(
                f"{call.kind}: sizes {tuple(sizes)} must hold each of the {place.size} "
                f"members' lengths, and this one's (member {place.rank}) is {length}"
            )
        return sizes
    if link is None:
        return [length]
    own = np.array([length], np.int64)
    lengths = np.empty((link.size, 1), np.int64)
    lengths[link.rank] = own
    yield from algorithms.exchange(link, [own] * link.size, list(lengths))
    return [int(other) for other in lengths[:, 0]]


def summed_bytes(count: int, own: int, size: int, itemsize: int) -> int:
    """Return the payload that a member of `size` sends for an ``all_reduce``. Local.

    Parameters
    ----------
    count, own
        Elements of the array, and of the member's chunk of it.
    """
    return (count + (size - 2) * own) * itemsize


def check_dim(call: Kind, shape: tuple[int, ...], dim: int) -> None:
    """Refuse a dim that the array does not have. Local."""
    if not 0 <= dim < len(shape):
        raise ShapeError(f"{call.kind}: an array of shape {shape} has no dim {dim}")


def with_dim(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """Return `shape` with another size of `dim`. Local."""
    return (*shape[:dim], size, *shape[dim + 1 :])
