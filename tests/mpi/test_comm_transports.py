"""One suite over every transport; those of GPUs run on a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from tests import ways
from tests.ways import Way
from tparmpi.comm import algorithms
from tparmpi.comm.device import Device
from tparmpi.comm.group import Group
from tparmpi.comm.settings import DeviceSettings
from tparmpi.comm.transports import choice, host, staged
from tparmpi.errors import CommunicationError, ShapeError, UsageError
from tparmpi.sharding import chunk

pytestmark = pytest.mark.mpi(min_size=4)

SHAPES = [(), (1,), (7,), (0, 3), (5, 3), (2, 0, 3), (4, 3, 5)]
DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    ml_dtypes.bfloat16,
]
VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda a: a,
    "fortran": np.asfortranarray,
    "transposed": lambda a: a.T,
    "columns": lambda a: a[:, 1:3],
    "backwards": lambda a: a[::-1],
    "steps": lambda a: a[::2, ::-2],
}


@pytest.fixture(params=ways.NAMES)
def way(request, monkeypatch) -> Iterator[Way]:
    made = Way(request.param, monkeypatch)
    yield made
    made.check()
    made.close()


@pytest.fixture(params=[2, 3, 4], ids=lambda n: f"{n}-members")
def group(request, way) -> Group:
    """The first ranks, the last one first: member order is not rank order."""
    return way.group(range(request.param)[::-1])


@pytest.fixture
def trio(way) -> Group:
    return way.group([2, 0, 1])


@pytest.fixture(params=["pieces", "limits"])
def paths(request, monkeypatch) -> None:
    """Takes the other ways through the algorithms with small arrays."""
    monkeypatch.setattr(algorithms, "WHOLE_BYTES", 0)
    monkeypatch.setattr(algorithms, "PIECE_BYTES", 40)
    if request.param == "limits":
        monkeypatch.setattr(host, "MESSAGE_BYTES", 24)
        monkeypatch.setattr(staged, "STAGE_BYTES", 24)


def of_member(member: int, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Different values at every place of every member, small enough for int8."""
    size = int(np.prod(shape))
    values = (np.arange(size) * 7 + member * 3) % 23 - (0 if dtype == "uint16" else 9)
    return values.reshape(shape).astype(dtype)


def same(got: np.ndarray, wanted: np.ndarray) -> bool:
    got, wanted = np.asarray(got), np.asarray(wanted)
    return (got.shape, got.dtype, got.tobytes()) == (
        wanted.shape,
        wanted.dtype,
        wanted.tobytes(),
    )


def total_of(arrays: list[np.ndarray]) -> np.ndarray:
    """The defined sum: a left fold, in float32 for halves, rounded once."""
    dtype = arrays[0].dtype
    halves = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    wide = np.float32 if dtype in halves else dtype
    return reduce(np.add, [array.astype(wide) for array in arrays]).astype(dtype)


def part_of(array: np.ndarray, group: Group, dim: int = 0) -> np.ndarray:
    start, size = chunk(array.shape[dim], group.size, group.rank)
    return np.take(array, range(start, start + size), dim)


# Values


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_collective_dtype_and_shape(way, group, dtype):
    check_values(way, group, dtype)


@pytest.mark.parametrize("dtype", ["int8", "float64", ml_dtypes.bfloat16], ids=str)
@pytest.mark.usefixtures("paths")
def test_every_way_through_the_algorithms(way, trio, dtype):
    check_values(way, trio, dtype)


def check_values(way: Way, group: Group, dtype: object) -> None:
    """Compare every collective, of every shape, with what NumPy makes of the arrays."""
    if not group.is_member:
        return
    n, me, root = group.size, group.rank, group.size - 1
    for shape in SHAPES:
        arrays = [of_member(member, shape, dtype) for member in range(n)]
        own = way.put(arrays[me].copy())
        total = total_of(arrays)
        assert same(way.fetch(group.all_reduce(own)), total), shape
        largest = reduce(np.maximum, arrays)
        assert same(way.fetch(group.all_reduce(own, "max")), largest), shape
        given = own if me == root else None
        assert same(way.fetch(group.broadcast(given, root)), arrays[root]), shape
        if not shape:
            continue
        scattered = group.reduce_scatter(own)
        assert same(way.fetch(scattered), part_of(total, group)), shape
        assert same(way.fetch(group.all_gather(own)), np.concatenate(arrays)), shape
        last = len(shape) - 1
        parts = [part_of(array, group, last) for array in arrays]
        exchanged = group.all_to_all(own, last, 0)
        assert same(way.fetch(exchanged), np.concatenate(parts)), shape
        part = group.scatter(given, root)
        assert same(way.fetch(part), part_of(arrays[root], group)), shape
        gathered = way.fetch(group.gather(part, root))
        assert gathered is None if me != root else same(gathered, arrays[root]), shape
        assert same(way.fetch(own), arrays[me])


@pytest.mark.parametrize("known", [False, True], ids=["asked", "known"])
@pytest.mark.usefixtures("paths")
def test_uneven_parts_along_every_dim(way, trio, known):
    group = trio
    if not group.is_member:
        return
    n, me = group.size, group.rank
    # The second member's part is empty.
    sizes = [(member * 2 + 2) % 4 for member in range(n)]
    for dim in range(3):
        shapes = [tuple(size if d == dim else 3 for d in range(3)) for size in sizes]
        arrays = [of_member(m, shape, "int32") for m, shape in enumerate(shapes)]
        own, told = way.put(arrays[me]), sizes if known else None
        joined = np.concatenate(arrays, dim)
        assert same(way.fetch(group.all_gather(own, dim, told)), joined)
        got = way.fetch(group.gather(own, 0, dim))
        assert got is None if me else same(got, joined)
        for split in range(3):
            parts = [part_of(array, group, split) for array in arrays]
            got = group.all_to_all(own, split, dim, told)
            assert same(way.fetch(got), np.concatenate(parts, dim)), (split, dim)


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(way, group, view):
    if not group.is_member:
        return
    n, me = group.size, group.rank
    views = [VIEWS[view](of_member(m, (6, 4), "float64")) for m in range(n)]
    plain = [array.copy(order="C") for array in views]
    own = way.put(views[me])
    total = total_of(plain)
    assert same(way.fetch(group.all_reduce(own)), total)
    assert same(way.fetch(group.reduce_scatter(own, 1)), part_of(total, group, 1))
    assert same(way.fetch(group.all_gather(own, 1)), np.concatenate(plain, 1))
    parts = [part_of(array, group) for array in plain]
    assert same(way.fetch(group.all_to_all(own, 0, 1)), np.concatenate(parts, 1))
    assert same(way.fetch(group.broadcast(own, 1)), plain[1])
    part = way.fetch(group.scatter(own, 1, 1))
    assert same(part, part_of(plain[1], group, 1))
    got = way.fetch(group.gather(own, 1, 1))
    assert got is None if me != 1 else same(got, np.concatenate(plain, 1))
    if me == 0:
        group.send(own, n - 1)
    elif me == n - 1:
        assert same(way.fetch(group.recv(0)), plain[0])


@pytest.mark.parametrize("view", VIEWS)
def test_results_in_place_into_a_view(way, group, view):
    """`out` has strides and neighbours, which keep their values."""
    if not group.is_member:
        return
    n, me = group.size, group.rank

    def check(call: Callable[..., object], wanted: np.ndarray | None) -> None:
        if wanted is None:
            call(None)
            return
        # A frame of ones around a view of the result's shape.
        around = np.full([length + 2 for length in wanted.shape], 1.0)
        if view in ("fortran", "transposed"):
            around = np.asfortranarray(around)
        inner = (slice(1, -1),) * wanted.ndim
        if view in ("backwards", "steps"):
            inner = (slice(-2, 0, -1), *inner[1:])
        there = way.put(around)
        out = there[inner]
        assert call(out) is out
        around[inner] = wanted
        assert same(way.fetch(there.copy()), around.copy(order="C"))

    arrays = [of_member(m, (6, 4), "float64") for m in range(n)]
    own, total = way.put(arrays[me]), total_of(arrays)
    joined = np.concatenate(arrays)
    parts = [part_of(array, group, 1) for array in arrays]
    check(lambda out: group.all_reduce(own, out=out), total)
    check(lambda out: group.reduce_scatter(own, out=out), part_of(total, group))
    check(lambda out: group.all_gather(own, out=out), joined)
    check(lambda out: group.all_to_all(own, 1, 0, out=out), np.concatenate(parts))
    check(lambda out: group.broadcast(own, 1, out=out), arrays[1])
    check(lambda out: group.scatter(own, 1, out=out), part_of(arrays[1], group))
    check(lambda out: group.gather(own, 1, out=out), joined if me == 1 else None)
    if me == 0:
        group.send(own, n - 1)
    elif me == n - 1:
        check(lambda out: group.recv(0, out=out), arrays[0])


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int32"])
def test_a_sum_over_the_input(way, group, dtype):
    """Some members have more pieces than others, and some none."""
    if not group.is_member:
        return
    for size in (0, 1, 3, 5, 7, 40, 41, 93):
        arrays = [of_member(m, (size,), dtype) for m in range(group.size)]
        own = way.put(arrays[group.rank].copy())
        assert group.all_reduce(own, out=own) is own
        assert same(way.fetch(own), total_of(arrays))


@pytest.mark.usefixtures("paths")
def test_results_over_the_input(way, trio):
    group = trio
    if not group.is_member:
        return
    n, me = group.size, group.rank
    arrays = [of_member(m, (4 * n, 3), "float32") for m in range(n)]
    own = way.put(arrays[me].copy())
    assert group.all_reduce(own, out=own) is own
    assert same(way.fetch(own), total_of(arrays))
    own = way.put(arrays[me].copy())
    mine = own[4 * me : 4 * me + 4]
    group.all_gather(mine, out=own)
    wanted = [array[4 * m : 4 * m + 4] for m, array in enumerate(arrays)]
    assert same(way.fetch(own), np.concatenate(wanted))
    own = way.put(arrays[me].copy())
    group.reduce_scatter(own, out=own[:4])
    total = total_of(arrays)[4 * me : 4 * me + 4]
    assert same(way.fetch(own), np.concatenate([total, arrays[me][4:]]))


@pytest.mark.parametrize("nbytes", [8, 64 * 1024, 8 * 1024 * 1024])
def test_both_send_and_receive(way, nbytes):
    """In both directions at a time, each member with both of its neighbours."""
    group = way.group([2, 0, 1])
    if not group.is_member:
        return
    me = group.rank
    values = np.arange(nbytes // 8, dtype=np.int64)
    own = way.put(values * 4 + me)
    for step in (1, -1):
        to, source = (me + step) % 3, (me - step) % 3
        handles = [group.start.recv(source), group.start.send(own, to)]
        got, _ = [handle.wait() for handle in handles]
        assert np.array_equal(way.fetch(got), values * 4 + source)
    if me == 0:
        group.send(own, 1)
        assert np.array_equal(way.fetch(group.recv(1)), values * 4 + 1)
    elif me == 1:
        assert np.array_equal(way.fetch(group.recv(0)), values * 4)
        group.send(own, 0)


def test_several_arrays_in_one_message(way):
    """Of any shapes and dtypes, none at all too, in the order they were sent."""
    group = way.group([2, 0, 1])
    if not group.is_member:
        return
    me = group.rank
    to, source = (me + 1) % 3, (me - 1) % 3
    arrays = [
        np.arange(70_000.0).reshape(7, -1) + me,
        np.array(me, np.int8),
        np.empty((0, 3), np.float32),
        np.arange(6).reshape(2, 3).T * me,
    ]
    for count in (4, 0, 1):
        wanted = group.start.recv_arrays(source)
        sent = group.start.send_arrays([way.put(a) for a in arrays[:count]], to)
        got = wanted.wait()
        sent.wait()
        assert len(got) == count
        for found, own in zip(got, arrays, strict=False):
            found = way.fetch(found)
            assert (found.shape, found.dtype) == (own.shape, own.dtype)
    if me == 0:
        group.send_arrays([way.put(arrays[0])], 1)
    elif me == 1:
        (got,) = group.recv_arrays(0)
        assert np.array_equal(way.fetch(got), arrays[0] - 1)


def test_objects_and_barriers(way, group):
    if not group.is_member:
        return
    values = [{"member": m, "text": "x" * 10**m} for m in range(group.size)]
    assert group.all_gather_object(values[group.rank]) == values
    group.barrier()
    assert group.broadcast_object(values[group.rank], 1) == values[1]


@pytest.mark.usefixtures("paths")
def test_many_at_a_time(way, trio):
    """Started in one order, waited for in another."""
    group = trio
    if not group.is_member:
        return
    n, me = group.size, group.rank
    arrays = [[of_member(m + k, (5, 3), "int64") for m in range(n)] for k in range(6)]
    own = [way.put(of_all[me]) for of_all in arrays]
    start = group.start
    handles = [
        start.all_reduce(own[0]),
        start.all_gather(own[1]),
        start.broadcast(own[2], 1),
        start.all_to_all(own[3], 0, 1),
        start.reduce_scatter(own[4]),
        start.gather(own[5], 0),
    ]
    parts = [part_of(array, group) for array in arrays[3]]
    wanted = [
        total_of(arrays[0]),
        np.concatenate(arrays[1]),
        arrays[2][1],
        np.concatenate(parts, 1),
        part_of(total_of(arrays[4]), group),
        None if me else np.concatenate(arrays[5]),
    ]
    order = range(6) if me % 2 else reversed(range(6))
    for number in order:
        got = way.fetch(handles[number].wait())
        if wanted[number] is None:
            assert got is None
        else:
            assert same(got, wanted[number]), number


def test_mpi_is_given_the_memory_of_the_transport(way):
    group = way.group([0, 1, 2])
    if not group.is_member or way.device is None:
        return
    group.all_reduce(way.put(np.arange(100.0)))
    group.reduce_scatter(way.put(np.arange(99.0).reshape(3, 33)), 1)
    given = dict(way.messages)
    # Two to and two from others for the sum, and as many for the parts of it.
    assert given == {"device" if way.name == "cuda_aware" else "host": 8}
    group.barrier()
    group.broadcast_object("small")
    assert way.messages["device"] == given.get("device", 0)


def test_it_says_who_is_waited_for(way):
    """By the world's numbers, so that one that has left is noticed."""
    trio = way.group([3, 0, 2])
    if not trio.is_member:
        return
    transport = trio._channel.transport
    pending, tag = transport.pending(), 300
    arrays = [np.zeros(3) for _ in range(3)]
    others = [member for member in range(3) if member != trio.rank]
    for member in others:
        transport.start_receive(pending, arrays[member], member, tag)
    ranks = [trio.devices[member].rank for member in others]
    assert sorted(pending.awaited()) == sorted(ranks)
    assert not pending.done("a test")
    trio.barrier()
    sent = transport.pending()
    for member in others:
        transport.start_send(sent, np.ones(3), member, tag)
    for messages in (pending, sent):
        messages.wait(transport.control, "a test")
        assert messages.awaited() == []
    for member in others:
        assert arrays[member].tolist() == [1, 1, 1]


def test_two_groups_in_opposite_orders(way):
    one, two = way.group([2, 0, 1]), way.group([2, 0, 1])
    if not one.is_member:
        return
    sums = {one: 0.0, two: 0.5}
    order = [one, two] if one.rank % 2 else [two, one]
    handles = [
        (group, number, group.start.all_reduce(way.put(np.full(50, number + add))))
        for number in range(4)
        for group, add in [(group, sums[group]) for group in order]
    ]
    for group, number, handle in handles[::-1]:
        wanted = np.full(50, 3 * (number + sums[group]))
        assert same(way.fetch(handle.wait()), wanted)


# Which one


def bound(rank: int, kind: str, *transports: str) -> Device:
    return Device(
        rank,
        kind,
        is_member=False,
        settings=DeviceSettings(),
        supported_dtypes=frozenset(),
        host="elsewhere",
        index=None,
        local_rank=0,
        transports=transports,
    )


def test_a_group_takes_the_best_that_all_members_have():
    aware = [bound(rank, "cuda", "cuda_aware", "staged") for rank in range(2)]
    plain = bound(2, "cuda", "staged")
    choice._say_slower.cache_clear()
    assert choice.best([bound(0, "cpu", "host"), bound(1, "cpu", "host")]) == "host"
    assert choice.best(aware) == "cuda_aware"
    assert choice.best([plain, plain]) == "staged"
    with pytest.warns(UserWarning, match="cuda_aware, others do not: its messages go"):
        assert choice.best([*aware, plain]) == "staged"
    # Said once.
    assert choice.best([plain, *aware]) == "staged"
    choice._say_slower.cache_clear()


# Refusals


def test_what_is_refused_leaves_the_group_usable(way, group):
    if not group.is_member:
        return
    n = group.size
    own = way.put(np.arange(6.0).reshape(2, 3))
    for call, error in [
        (lambda: group.all_reduce(own, "product"), UsageError),
        (lambda: group.all_gather(own, 2), ShapeError),
        (lambda: group.all_reduce(own, out=own[:1]), ShapeError),
        (lambda: group.all_reduce(own, out=way.put(np.ones((2, 3), "f4"))), UsageError),
        (lambda: group.all_reduce(own, out=[0.0]), UsageError),
        (lambda: group.broadcast(own, n), UsageError),
    ]:
        with pytest.raises(error):
            call()
    if way.device is not None:
        with pytest.raises(UsageError, match="out must be an array of simulated"):
            group.all_reduce(own, out=np.ones((2, 3)))
    assert way.fetch(group.all_reduce(way.put(np.array(2)))) == 2 * n


def test_a_longer_message_than_expected_is_an_error(way):
    pair = way.group([0, 1])
    if pair.checker is not None:
        pytest.skip("calls are checked: they say more, in test_comm_check")
    if pair.is_member and pair.rank == 0:
        with pytest.raises(CommunicationError, match="all_reduce: a message does not"):
            pair.all_reduce(way.put(np.arange(3.0)))
    elif pair.is_member:
        pair.all_reduce(way.put(np.arange(4.0)))
