"""Every collective equals what NumPy does to all members' arrays, on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.comm import algorithms
from tparmpi.comm.group import Group
from tparmpi.comm.transports import host
from tparmpi.errors import CommunicationError, GroupError, ShapeError, UsageError
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
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda n: f"{n}-members")
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """The first ranks, the last one first: member order is not rank order."""
    made = tpm.group(tpm.devices()[: request.param][::-1])
    yield made
    made.close()


@pytest.fixture(params=["whole", "pieces", "limits"])
def paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every way through the algorithms with small arrays."""
    if request.param != "whole":
        monkeypatch.setattr(algorithms, "WHOLE_BYTES", 0)
        monkeypatch.setattr(algorithms, "PIECE_BYTES", 40)
    if request.param == "limits":
        monkeypatch.setattr(host, "MESSAGE_BYTES", 24)


def of_member(member: int, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Different values at every place of every member, small enough for int8."""
    size = int(np.prod(shape))
    values = (np.arange(size) * 7 + member * 3) % 23 - (0 if dtype == "uint16" else 9)
    return values.reshape(shape).astype(dtype)


def bits(array: np.ndarray) -> tuple[object, ...]:
    """All that two equal arrays share."""
    return array.shape, array.dtype, array.tobytes()


def same(got: np.ndarray, wanted: np.ndarray) -> bool:
    return bits(np.asarray(got)) == bits(np.asarray(wanted))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("paths")
def test_sums_are_left_folds(group, shape):
    if not group.is_member:
        return
    for dtype in DTYPES:
        arrays = [of_member(member, shape, dtype) for member in range(group.size)]
        own = arrays[group.rank].copy()
        wide = "float32" if own.dtype in (np.float16, BFLOAT16) else own.dtype
        wanted = reduce(np.add, [array.astype(wide) for array in arrays])
        got = group.all_reduce(own)
        assert same(got, wanted.astype(dtype)), dtype
        assert same(own, arrays[group.rank])
        assert not np.shares_memory(got, own)


@pytest.mark.parametrize("op", ["max", "min", "mean"])
@pytest.mark.parametrize("dtype", ["float64", "float16", ml_dtypes.bfloat16], ids=str)
@pytest.mark.usefixtures("paths")
def test_other_reductions(group, op, dtype):
    if not group.is_member:
        return
    arrays = [of_member(member, (5, 3), dtype) for member in range(group.size)]
    wide = np.stack(arrays).astype("float64" if dtype == "float64" else "float32")
    wanted = getattr(np, op)(wide, 0).astype(dtype)
    assert same(group.all_reduce(arrays[group.rank], op), wanted)
    start, size = chunk(5, group.size, group.rank)
    scattered = group.reduce_scatter(arrays[group.rank], 0, op)
    assert same(scattered, wanted[start : start + size])


@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (1, 4)])
def test_the_short_and_the_long_way_meet(group, shape):
    """Members whose calls are counted take another way through the same messages."""
    if not group.is_member:
        return
    arrays = [of_member(member, shape, "float32") for member in range(group.size)]
    own = arrays[group.rank]
    for op, wanted in [
        ("sum", reduce(np.add, arrays)),
        ("max", reduce(np.maximum, arrays)),
        ("mean", reduce(np.add, arrays) / np.float32(group.size)),
    ]:
        results = []
        for number in range(4):
            if (group.rank + number) % 2:
                results.append(group.all_reduce(own, op))
            else:
                with tpm.ledger() as led:
                    results.append(group.all_reduce(own, op))
                assert led.count() == (group.size > 1)
        assert all(same(got, np.asarray(wanted)) for got in results)
        assert not any(np.shares_memory(results[0], later) for later in results[1:])


def cut_and_joined(
    group: Group, dtype: str, dim: int, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[object, ...], np.ndarray]]:
    """Calls that cut or join along a dim, and what they return."""
    n, me = group.size, group.rank
    given = [of_member(member, shape, dtype) for member in range(n)]
    wide = np.float32 if dtype == "float16" else np.dtype(dtype)
    total = reduce(np.add, [array.astype(wide) for array in given]).astype(dtype)
    before = (slice(None),) * dim
    parts = [array[(*before, chunk_of(shape[dim], n, me))] for array in given]
    yield (
        "reduce_scatter",
        (given[me], dim),
        total[(*before, chunk_of(shape[dim], n, me))],
    )
    other = 0 if dim else given[me].ndim - 1
    lengths = [shape[other]] * n
    if other != dim:
        joined = np.concatenate(parts, other)
        yield "all_to_all", (given[me], dim, other, lengths), joined
    sizes = [(member + 3) % 4 for member in range(n)]
    some = [given[m][(*before, slice(sizes[m]))].copy() for m in range(n)]
    yield "all_gather", (some[me], dim, sizes), np.concatenate(some, dim)
    parts = [part[(*before, chunk_of(part.shape[dim], n, me))] for part in some]
    yield "all_to_all", (some[me], dim, dim, sizes), np.concatenate(parts, dim)


def chunk_of(length: int, n: int, member: int) -> slice:
    start, size = chunk(length, n, member)
    return slice(start, start + size)


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("dtype", ["bool", "float16", "float64", "complex64"])
def test_the_ways_of_other_calls_meet(group, dtype):
    """As above, where arrays are cut or joined, with and without empty parts."""
    if not group.is_member:
        return
    for dim, shape in [(0, (5, 3)), (1, (2, 9)), (2, (1, 2, 4)), (0, (64,))]:
        for name, arguments, wanted in cut_and_joined(group, dtype, dim, shape):
            results = []
            for number in range(4):
                if (group.rank + number) % 2:
                    results.append(getattr(group, name)(*arguments))
                else:
                    with tpm.ledger():
                        results.append(getattr(group, name)(*arguments))
            assert all(same(got, wanted) for got in results), (name, shape)
            assert not any(np.shares_memory(results[0], got) for got in results[1:])


def test_halves_are_rounded_once(group):
    """1 and three times 2**-9: bfloat16 alone would lose each small term."""
    if not group.is_member:
        return
    small = 2.0**-9
    own = np.full(3, 1.0 if group.rank == 0 else small, BFLOAT16)
    exact = np.float32(1.0 + (group.size - 1) * small)
    got = group.all_reduce(own)
    assert same(got, np.full(3, exact).astype(BFLOAT16))
    if group.size == 4:
        assert float(got[0]) > 1.0


def test_half_sums_overflow_as_one_rounding_does(group):
    if not group.is_member:
        return
    values = np.array([1, 0.1, 65504], np.float16)
    exact = values.astype(np.float32) * 1
    for _ in range(group.size - 1):
        exact = exact + values.astype(np.float32)
    with np.errstate(over="ignore"):
        assert same(group.all_reduce(values), exact.astype(np.float16))


@pytest.mark.usefixtures("paths")
def test_every_member_has_the_same_bits_and_not_by_luck(group):
    """Terms whose sum depends on the order, so that another order would show."""
    if not group.is_member:
        return
    rng = [np.random.default_rng(member) for member in range(group.size)]
    arrays = [(r.normal(size=301) * 10.0 ** r.integers(-8, 8, 301)) for r in rng]
    arrays = [array.astype(np.float32) for array in arrays]
    wanted = reduce(np.add, arrays)
    assert same(group.all_reduce(arrays[group.rank]), wanted)
    if group.size > 2:
        assert not same(reduce(np.add, arrays[::-1]), wanted)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bool", "float64", ml_dtypes.bfloat16], ids=str)
@pytest.mark.usefixtures("paths")
def test_reduce_scatter(group, dim, dtype):
    if not group.is_member:
        return
    shape = (4, 3, 5)
    arrays = [of_member(member, shape, dtype) for member in range(group.size)]
    wide = "float32" if dtype is ml_dtypes.bfloat16 else dtype
    total = reduce(np.add, [array.astype(wide) for array in arrays]).astype(dtype)
    start, size = chunk(shape[dim], group.size, group.rank)
    wanted = np.take(total, range(start, start + size), dim)
    assert same(group.reduce_scatter(arrays[group.rank], dim), wanted)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "complex128", ml_dtypes.bfloat16], ids=str)
@pytest.mark.usefixtures("paths")
def test_all_gather_of_uneven_parts(group, dim, known, dtype):
    if not group.is_member:
        return
    # The second member's part is empty.
    sizes = [(member * 2 + 2) % 4 for member in range(group.size)]
    shapes = [tuple(size if d == dim else 3 for d in range(3)) for size in sizes]
    arrays = [of_member(m, shape, dtype) for m, shape in enumerate(shapes)]
    got = group.all_gather(arrays[group.rank], dim, sizes if known else None)
    assert same(got, np.concatenate(arrays, dim))


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (2, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("dtype", ["int32", ml_dtypes.bfloat16], ids=str)
@pytest.mark.usefixtures("paths")
def test_all_to_all(group, dims, dtype):
    if not group.is_member:
        return
    split, concat = dims
    lengths = [member % 3 + 1 for member in range(group.size)]
    shapes = [[3, 5, 2] for _ in lengths]
    for shape, length in zip(shapes, lengths, strict=True):
        shape[concat] = length
    arrays = [of_member(m, tuple(shape), dtype) for m, shape in enumerate(shapes)]

    def part(array: np.ndarray) -> np.ndarray:
        start, size = chunk(array.shape[split], group.size, group.rank)
        return np.take(array, range(start, start + size), split)

    wanted = np.concatenate([part(array) for array in arrays], concat)
    own = arrays[group.rank]
    assert same(group.all_to_all(own, split, concat), wanted)
    assert same(group.all_to_all(own, split, concat, lengths), wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float64", ml_dtypes.bfloat16], ids=str)
@pytest.mark.usefixtures("paths")
def test_broadcast_scatter_and_gather(group, shape, dtype):
    if not group.is_member:
        return
    for root in range(group.size):
        array = of_member(root, shape, dtype)
        own = array.copy() if group.rank == root else None
        got = group.broadcast(own, root)
        assert same(got, array)
        if not shape:
            continue
        start, size = chunk(shape[0], group.size, group.rank)
        part = group.scatter(own, root)
        assert same(part, array[start : start + size])
        joined = group.gather(part, root)
        assert (joined is None) == (group.rank != root)
        if joined is not None:
            assert same(joined, array)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: np.asfortranarray(a),
        lambda a: a.T,
        lambda a: a[:, 1:3],
        lambda a: a[::-1],
        lambda a: a[::2, ::-2],
    ],
    ids=["fortran", "transposed", "columns", "backwards", "steps"],
)
def test_strides_do_not_matter(group, view):
    if not group.is_member:
        return
    arrays = [view(of_member(m, (6, 4), "float64")) for m in range(group.size)]
    plain = [array.copy(order="C") for array in arrays]
    own, n = arrays[group.rank], group.size
    start, size = chunk(own.shape[0], n, group.rank)
    total = reduce(np.add, plain)
    assert same(group.all_reduce(own), total)
    assert same(group.reduce_scatter(own), total[start : start + size])
    assert same(group.all_gather(own, 1), np.concatenate(plain, 1))
    assert same(group.broadcast(own), plain[0])
    parts = [p[start : start + size] for p in plain]
    assert same(group.all_to_all(own, 0, 1), np.concatenate(parts, 1))
    if n > 1:
        if group.rank == 0:
            group.send(own, 1)
        elif group.rank == 1:
            assert same(group.recv(0), plain[0])


@pytest.mark.parametrize("nbytes", [8, 64 * 1024, 8 * 1024 * 1024])
def test_neighbours_exchange_arrays_of_any_size(group, nbytes):
    if not group.is_member:
        return
    own = np.arange(nbytes // 8, dtype=np.int64) * 4 + group.rank
    got = group.all_gather(own)
    for member in range(group.size):
        part = got[member * own.size : (member + 1) * own.size]
        assert np.array_equal(part, np.arange(own.size) * 4 + member)


def test_messages_keep_their_order_and_do_not_mix_with_collectives(group):
    if not group.is_member or group.size == 1:
        return
    target, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for number in range(20):
        text = np.array([number, group.rank])
        if group.rank == 0:
            # A blocking one might wait for the receiver, who comes later.
            sent = group.start.send(text, target)
            group.all_reduce(np.ones(3))
            got = group.recv(source)
            sent.wait()
        else:
            # The message waits while a collective goes through.
            group.all_reduce(np.ones(3))
            got = group.recv(source)
            group.send(text, target)
        assert got.tolist() == [number, source]


@pytest.mark.parametrize("bound", [3, 7, 32_767])
def test_few_tags_are_enough(group, bound):
    if not group.is_member or group.size == 1:
        return
    other = tpm.group(group.devices)
    channel = group._channel
    wide, channel.tag_bound = channel.tag_bound, bound
    for number in range(30):
        for place in (group, other):
            assert place.all_reduce(np.array(number)) == number * group.size
        assert group.all_gather(np.array([number])).tolist() == [number] * group.size
    assert not channel.in_flight
    channel.tag_bound = wide
    other.close()


def test_an_operation_waits_for_its_tag(group):
    import threading

    if not group.is_member or group.size == 1:
        return
    channel = group._channel
    tag = channel.begin(group.id, group.sequence)
    timer = threading.Timer(0.05, channel.end, [tag])
    timer.start()
    assert group.all_reduce(np.array(2)) == 2 * group.size
    assert timer.finished.is_set()
    timer.join()


def test_a_tag_of_what_broke_off_is_not_given_again(group):
    if not group.is_member or group.size == 1:
        return
    channel = group._channel
    channel.break_off(channel.begin(group.id, group.sequence))
    assert not channel.in_flight
    words = r"ended with an error before.* close\(\) the group"
    with pytest.raises(CommunicationError, match=words):
        group.all_reduce(np.array(2))
    channel.broken.clear()
    assert group.all_reduce(np.array(2)) == 2 * group.size


def test_objects(group):
    if not group.is_member:
        return
    values = [{"member": m, "text": "x" * 10**m} for m in range(group.size)]
    assert group.all_gather_object(values[group.rank]) == values
    for root in range(group.size):
        own = values[root] if group.rank == root else None
        assert group.broadcast_object(own, root) == values[root]


def test_what_is_refused_leaves_the_group_usable(group):
    if not group.is_member:
        return
    array = np.arange(6.0).reshape(2, 3)
    for call, error in [
        (lambda: group.all_reduce(array, "product"), UsageError),
        (lambda: group.all_reduce(np.arange(3), "mean"), UsageError),
        (lambda: group.all_gather(array, 2), ShapeError),
        (lambda: group.all_gather(np.array(1.0)), ShapeError),
        (lambda: group.all_gather(array, 0, [1] * (group.size + 1)), ShapeError),
        (lambda: group.reduce_scatter(array, -1), ShapeError),
        (lambda: group.all_to_all(array, 0, 5), ShapeError),
        (lambda: group.broadcast(array, group.size), UsageError),
        (lambda: group.gather(array, -1), UsageError),
        (lambda: group.send(array, group.rank), UsageError),
    ]:
        with pytest.raises(error):
            call()
        assert group.all_reduce(np.array(1)) == group.size
    if group.size > 1:
        assert not group._channel.in_flight


def test_arrays_that_do_not_fit_are_an_error():
    pair = tpm.group(tpm.devices()[:2])
    if pair.checker is not None:
        pair.close()
        pytest.skip("calls are checked: they say more, in test_comm_check")
    if pair.is_member and pair.rank == 0:
        # The longer message arrives here; the other member gets a short one.
        with pytest.raises(CommunicationError, match="all_reduce: a message does not"):
            pair.all_reduce(np.arange(3.0))
    elif pair.is_member:
        pair.all_reduce(np.arange(4.0))
    pair.close()


def test_only_members_of_an_open_group_may_call():
    pair = tpm.group(tpm.devices()[1:3])
    if pair.is_member:
        pair.close()
        with pytest.raises(GroupError, match="closed"):
            pair.all_reduce(np.ones(2))
    else:
        with pytest.raises(GroupError, match="is no member"):
            pair.barrier()
