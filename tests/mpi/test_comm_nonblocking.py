"""Operations that go on while the rank does other things, on 1 to 4 ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.comm import algorithms, progress
from tparmpi.comm.group import Group
from tparmpi.comm.handle import Handle
from tparmpi.comm.transports import host
from tparmpi.errors import CommunicationError, GroupError, ShapeError, UsageError
from tparmpi.sharding import chunk

pytestmark = pytest.mark.mpi(min_size=4)

# More than any operation here takes, also where ranks exceed cores.
SECONDS = 20.0


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


@pytest.fixture
def alone() -> Iterator[None]:
    """No thread moves operations on."""
    with progress.thread(wanted=False):
        yield


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not progress.active
    assert not progress.unseen


def of_member(member: int, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    values = (np.arange(int(np.prod(shape))) * 7 + member * 3) % 23
    return values.reshape(shape).astype(dtype)


def same(got: np.ndarray, wanted: np.ndarray) -> bool:
    return (got.shape, got.dtype, got.tobytes()) == (
        wanted.shape,
        wanted.dtype,
        wanted.tobytes(),
    )


def until_done(handle: Handle) -> None:
    end = time.monotonic() + SECONDS
    while not handle.done():
        assert time.monotonic() < end
        time.sleep(0.0001)


@pytest.mark.parametrize("dtype", ["bool", "float32", ml_dtypes.bfloat16], ids=str)
@pytest.mark.usefixtures("paths")
def test_each_started_operation_gives_what_the_blocking_one_gives(group, dtype):
    if not group.is_member:
        return
    own = of_member(group.rank, (5, 3), dtype)
    arguments = {
        "all_reduce": [(own,), (own, "max")],
        "reduce_scatter": [(own,), (own, 1)],
        "all_gather": [(own,), (own, 1, [3] * group.size)],
        "all_to_all": [(own, 0, 1), (own, 1, 1)],
        "broadcast": [(own, root) for root in range(group.size)],
        "gather": [(own, root, 1) for root in range(group.size)],
        "scatter": [(own, root) for root in range(group.size)],
    }
    handles, wanted = [], []
    for name, each in arguments.items():
        for given in each:
            handles.append(getattr(group.start, name)(*given))
    for name, each in arguments.items():
        for given in each:
            wanted.append(getattr(group, name)(*given))
    for handle, want in zip(reversed(handles), reversed(wanted), strict=True):
        got = handle.wait()
        assert (got is None and want is None) or same(got, want), handle
        assert handle.done()
        assert handle.wait() is got


def test_objects_barriers_and_messages(group):
    if not group.is_member:
        return
    n, me = group.size, group.rank
    values = group.start.all_gather_object(("of", me))
    spread = group.start.broadcast_object("x" * 1000 if me == n - 1 else None, n - 1)
    meeting = group.start.barrier()
    messages = []
    if n > 1:
        target, source = (me + 1) % n, (me - 1) % n
        received = [group.start.recv(source) for _ in range(3)]
        sent = [group.start.send(np.array([me, i]), target) for i in range(3)]
        messages = [handle.wait().tolist() for handle in received]
        assert messages == [[source, i] for i in range(3)]
        assert [handle.wait() for handle in sent] == [None] * 3
    assert meeting.wait() is None
    assert spread.wait() == "x" * 1000
    assert values.wait() == [("of", member) for member in range(n)]


def test_two_groups_in_opposite_orders(group):
    """Each rank uses the two groups in an order of its own; no value crosses."""
    if not group.is_member:
        return
    other = tpm.group(group.devices)
    started = []
    places = [(group, 1.0), (other, 100.0)]
    for number in range(20):
        order = places if (group.rank + number) % 2 else places[::-1]
        for place, factor in order:
            array = np.full(50, factor * (number + group.rank))
            started.append((place, number, factor, place.start.all_reduce(array)))
    total = sum(range(group.size))
    # Waited for in another order than started, too.
    for place, number, factor, handle in sorted(started, key=lambda s: s[2] * s[1] % 7):
        wanted = factor * (number * group.size + total)
        assert np.array_equal(handle.wait(), np.full(50, wanted)), place
    other.close()


def test_blocking_calls_and_handles_mix(group):
    if not group.is_member or group.size == 1:
        return
    n = group.size
    handle = group.start.all_reduce(np.arange(200_000.0))
    # A message has tags of its own: it passes an operation that is under way.
    if group.rank == 0:
        group.send(np.array(1), 1)
    elif group.rank == 1:
        assert group.recv(0) == 1
    assert group.all_reduce(np.array(2)) == 2 * n
    assert np.array_equal(handle.wait(), np.arange(200_000.0) * n)


def test_a_message_does_not_wait_for_a_collective_that_waits_for_it(group):
    if not group.is_member or group.size == 1:
        return
    # The same number, and so the same tag, but for the pair.
    group.sequence = 0
    handle = None
    if group.rank == 0:
        handle = group.start.barrier()
        group.send(np.array(7), 1)
    elif group.rank == 1:
        assert group.recv(0) == 7
    if handle is None:
        handle = group.start.barrier()
    handle.wait()


@pytest.mark.usefixtures("alone")
def test_waiting_for_one_moves_all(group):
    if not group.is_member:
        return
    large = group.start.all_reduce(np.arange(300_000.0))
    small = [group.start.all_reduce(np.array(i)) for i in range(5)]
    if group.rank == 0:
        # Complete only if the others, who wait for its message, move theirs on.
        large.wait()
        for member in range(1, group.size):
            group.send(np.array(member), member)
    else:
        assert group.recv(0) == group.rank
    assert [handle.wait() for handle in small] == [i * group.size for i in range(5)]
    assert np.array_equal(large.wait(), np.arange(300_000.0) * group.size)


@pytest.mark.usefixtures("alone")
def test_asking_is_enough(group):
    if not group.is_member:
        return
    handle = group.start.all_reduce(np.arange(500_000, dtype=np.float32))
    until_done(handle)
    assert "done" in repr(handle)
    wanted = np.arange(500_000, dtype=np.float32)
    wanted = reduce(np.add, [wanted] * group.size)
    assert np.array_equal(handle.wait(), wanted)


@pytest.mark.usefixtures("alone")
def test_operators_move_operations_on(group):
    if not group.is_member:
        return
    x = tpm.tensor(np.ones(4), tpm.device())
    handle = group.start.all_reduce(np.arange(500_000.0))
    end = time.monotonic() + SECONDS
    while handle._steps is not None:
        assert time.monotonic() < end
        x = tpm.scale(x, factor=1.0)
    assert np.array_equal(handle.wait(), np.arange(500_000.0) * group.size)


def test_a_thread_moves_operations_on(group):
    if not group.is_member:
        return
    handle = group.start.all_reduce(np.arange(500_000.0))
    end = time.monotonic() + SECONDS
    while handle._steps is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert np.array_equal(handle.wait(), np.arange(500_000.0) * group.size)


def test_a_handle_owns_its_arrays(group):
    if not group.is_member or group.size == 1:
        return
    size = 2_000_000
    if group.rank == 0:
        handle = group.start.send(np.arange(size) * 3, 1)
        gc.collect()
        junk = [np.full(size, -1) for _ in range(4)]
        handle.wait()
        del junk
    elif group.rank == 1:
        time.sleep(0.3)
        assert np.array_equal(group.recv(0), np.arange(size) * 3)


@pytest.mark.parametrize("bound", [3, 7, 32_767])
def test_few_tags_are_enough(group, bound):
    if not group.is_member or group.size == 1:
        return
    channel = group._channel
    wide, channel.tag_bound = channel.tag_bound, bound
    handles = [group.start.all_reduce(np.array(number)) for number in range(30)]
    got = [int(handle.wait()) for handle in handles]
    assert got == [number * group.size for number in range(30)]
    assert not channel.in_flight
    channel.tag_bound = wide


def test_what_is_refused_is_refused_at_once(group):
    if not group.is_member:
        return
    if group.checker is not None:
        pytest.skip("calls are checked: the comparison comes first, wait refuses")
    array = np.arange(6.0).reshape(2, 3)
    start = group.start
    for call, error in [
        (lambda: start.all_reduce(array, "product"), UsageError),
        (lambda: start.all_reduce(array, out=np.empty(3)), ShapeError),
        (lambda: start.all_gather(array, 2), ShapeError),
        (lambda: start.gather(array, -1), UsageError),
        (lambda: start.send(array, group.rank), UsageError),
    ]:
        with pytest.raises(error):
            call()
        assert start.all_reduce(np.array(1)).wait() == group.size


def test_what_fails_later_is_raised_by_wait():
    pair = tpm.group(tpm.devices()[:2])
    if pair.checker is not None:
        pair.close()
        pytest.skip("calls are checked: they say more, in test_comm_check")
    if pair.is_member:
        handle = pair.start.all_reduce(np.arange(3.0 + pair.rank))
        if pair.rank == 0:
            until_done(handle)
            for _ in range(2):
                with pytest.raises(CommunicationError, match="a message does not fit"):
                    handle.wait()
        else:
            handle.wait()
    pair.close()


@pytest.mark.parametrize("blocking", [False, True])
def test_who_catches_an_error_goes_on_with_a_new_group(blocking):
    """Of the same members, while another of them is open: their channel stays."""
    kept, pair = (tpm.group(tpm.devices()[:2]) for _ in range(2))
    if pair.checker is None and pair.is_member:
        wrong = np.arange(3.0 + pair.rank)
        call = pair.all_reduce if blocking else pair.start.all_reduce(wrong).wait
        arguments = [wrong] if blocking else []
        if pair.rank == 0:
            with pytest.raises(CommunicationError, match="a message does not fit"):
                call(*arguments)
        else:
            call(*arguments)
    pair.close()
    again = tpm.group(tpm.devices()[:2])
    if again.is_member:
        for number in range(3):
            for place in (again, kept):
                assert place.all_reduce(np.array(number)) == 2 * number
                assert place.start.all_reduce(np.array(number)).wait() == 2 * number
    again.close()
    kept.close()


def test_groups_may_be_made_and_closed_in_another_order():
    """A new one is never taken for one that another member has not closed yet."""
    kept, old = (tpm.group(tpm.devices()[:2]) for _ in range(2))
    if tpm.device().rank == 0:
        old.close()
    new = tpm.group(tpm.devices()[:2])
    old.close()
    if new.is_member:
        assert new.all_reduce(np.array(3)) == 6
    for place in (new, kept):
        place.close()


def test_closing_waits_for_what_is_under_way():
    made = tpm.group(tpm.devices())
    handle = made.start.all_reduce(np.arange(100_000.0))
    made.close()
    assert np.array_equal(handle.wait(), np.arange(100_000.0) * 4)
    with pytest.raises(GroupError, match="closed"):
        made.start.barrier()


def test_meshes_start_operations_too():
    mesh = tpm.mesh(dp=2, tp=2)
    across = mesh.axis("dp").start.all_reduce(np.array(mesh.rank))
    along = mesh.axis("tp").start.all_reduce(np.array(mesh.rank))
    everywhere = mesh.start.all_reduce(np.array(mesh.rank))
    assert everywhere.wait() == 6
    assert along.wait() == 4 * mesh.coordinates[0] + 1
    assert across.wait() == 2 * mesh.coordinates[1] + 2
    mesh.close()


def test_the_ledger_counts_started_operations_once(group):
    if not group.is_member or group.size == 1:
        return
    n, me = group.size, group.rank
    with tpm.ledger() as led:
        handles = [group.start.all_reduce(np.arange(35.0)) for _ in range(3)]
    for handle in handles:
        handle.wait()
    own = chunk(35, n, me)[1]
    assert led.count("all_reduce") == 3
    assert led.bytes() == 3 * (35 + (n - 2) * own) * 8
    assert all(__file__ in record.site for record in led.records)


def test_leaks_are_described(group):
    if not group.is_member:
        return
    handle = group.start.barrier()
    ((call, site),) = progress.unseen.values()
    assert repr(call).startswith("barrier on <group")
    assert site.startswith(f"{__file__}:")
    handle.wait()
    assert not progress.unseen
