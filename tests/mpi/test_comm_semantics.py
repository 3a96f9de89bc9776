"""What groups and meshes promise: apart, in order, freed, silent where alone."""

from __future__ import annotations

import random
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.comm.runtime import world_state
from tparmpi.errors import GroupError

pytestmark = pytest.mark.mpi(min_size=4)

ORDERED_SUBSETS = [
    ranks for size in (1, 2, 3, 4) for ranks in permutations(range(4), size)
]

CALLS = {
    "all_reduce": lambda place: place.all_reduce(np.ones(2)),
    "reduce_scatter": lambda place: place.reduce_scatter(np.ones(2)),
    "all_gather": lambda place: place.all_gather(np.ones(2)),
    "all_to_all": lambda place: place.all_to_all(np.ones((2, 2)), 0, 1),
    "broadcast": lambda place: place.broadcast(np.ones(2)),
    "gather": lambda place: place.gather(np.ones(2)),
    "scatter": lambda place: place.scatter(np.ones(2)),
    "send": lambda place: place.send(np.ones(2), 0),
    "recv": lambda place: place.recv(0),
    "send_arrays": lambda place: place.send_arrays([np.ones(2)], 0),
    "recv_arrays": lambda place: place.recv_arrays(0),
    "barrier": lambda place: place.barrier(),
    "broadcast_object": lambda place: place.broadcast_object(1),
    "all_gather_object": lambda place: place.all_gather_object(1),
    "start.all_reduce": lambda place: place.start.all_reduce(np.ones(2)).wait(),
    "comm": lambda place: place.comm,
}


def some(ranks: tuple[int, ...]) -> tpm.Group:
    return tpm.group([tpm.devices()[rank] for rank in ranks])


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_the_same_devices_are_apart(seed):
    """Each rank starts operations of six groups in an order of its own."""
    groups = [some((2, 0, 3, 1)) for _ in range(6)]
    me = groups[0].rank
    rounds = 8
    order = [number for number in range(len(groups)) for _ in range(rounds)]
    random.Random(seed * 100 + me).shuffle(order)
    handles = []
    counts = [0] * len(groups)
    for number in order:
        count = counts[number]
        counts[number] += 1
        own = np.full(count * 40 + 1, number * 1000.0 + count * 10 + me)
        handles.append((number, count, groups[number].start.all_gather(own)))
    random.Random(seed * 200 + me).shuffle(handles)
    for number, count, handle in handles:
        wanted = np.repeat(number * 1000.0 + count * 10 + np.arange(4), count * 40 + 1)
        assert np.array_equal(handle.wait(), wanted)
    for group in groups:
        group.close()


@pytest.mark.parametrize("ranks", ORDERED_SUBSETS, ids=str)
def test_members_are_in_the_order_given(ranks):
    group = some(ranks)
    here = tpm.device().rank
    assert [device.rank for device in group.devices] == list(ranks)
    assert group.is_member == (here in ranks)
    if group.is_member:
        assert group.rank == ranks.index(here)
        assert group.all_gather(np.array([here])).tolist() == list(ranks)
        assert group.all_gather_object(here) == list(ranks)
        for root, rank in enumerate(ranks):
            assert group.broadcast(np.array(here), root) == rank
        # The sum is folded in this order: the first loses the small ones.
        values = np.array([1e16, 1.0, -1e16, 1.0])[list(ranks)]
        wanted = values[0]
        for value in values[1:]:
            wanted += value
        own = np.array([1e16, 1.0, -1e16, 1.0][here])
        assert group.all_reduce(own) == wanted
    group.close()


def test_five_thousand_groups_leave_nothing_behind():
    """Over every ordered subset, more than MPI has communicators (2,046)."""
    state = world_state()

    def held() -> tuple[int, int, int]:
        return len(state.channels), len(state.user_comms), state._made

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before, rounds = held(), 0
    while rounds * len(ORDERED_SUBSETS) < 5000:
        for number, ranks in enumerate(ORDERED_SUBSETS):
            group = some(ranks)
            if group.is_member and number % 7 == rounds % 7:
                assert group.all_reduce(np.array(number)) == number * group.size
            group.close()
        rounds += 1
        assert held() == before
        if rounds == 1:
            opened = descriptors()
    # MPI opens a few whenever it first needs them; one a round would be 78.
    assert descriptors() - opened < 8


@pytest.mark.parametrize("name", CALLS)
def test_only_members_of_an_open_group_may_call(name):
    call = CALLS[name]
    pair = some((3, 1))
    if not pair.is_member:
        with pytest.raises(
            GroupError, match=r"is no member of <group group=2 of ranks"
        ):
            call(pair)
    pair.close()
    if pair.is_member:
        with pytest.raises(
            GroupError, match=r"<group group=2 of ranks \(3, 1\)> is cl"
        ):
            call(pair)


# Meshes


MESHES = [
    {"a": 4},
    {"a": 2, "b": 2},
    {"a": 1, "b": 4},
    {"a": 4, "b": 1},
    {"a": 2, "b": 1, "c": 2},
    {"a": 1, "b": 2, "c": 2},
    {"a": 2, "b": 1, "c": 2, "d": 1},
    {"a": 1, "b": 2, "c": 1, "d": 2},
]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=str)
def test_meshes_of_one_to_four_axes(sizes, ranks):
    """Axes, parts and factors, also over ranks that are not next to each other."""
    mesh = tpm.mesh([tpm.devices()[rank] for rank in ranks], **sizes)
    here = tpm.device().rank
    grid = np.array(ranks).reshape(tuple(sizes.values()))
    place = tuple(int(index[0]) for index in np.nonzero(grid == here))
    assert mesh.coordinates == place
    assert (mesh.axes, mesh.shape) == (tuple(sizes), tuple(sizes.values()))
    assert mesh.all_reduce(np.array(here)) == 6
    for number, name in enumerate(sizes):
        line = [*place]
        line[number] = slice(None)
        wanted = grid[tuple(line)].tolist()
        axis = mesh.axis(name)
        assert [device.rank for device in axis.devices] == wanted
        assert (axis.axes, axis.rank) == ((name,), place[number])
        assert axis.all_gather(np.array([here])).tolist() == wanted
        parts = mesh.split(name)
        assert [part.is_member for part in parts] == [
            number_of_part == place[number] for number_of_part in range(sizes[name])
        ]
        for part, block in zip(parts, np.moveaxis(grid, number, 0), strict=True):
            assert [device.rank for device in part.devices] == block.ravel().tolist()
            assert part.axes == tuple(axis for axis in sizes if axis != name)
            if part.is_member:
                assert part.all_reduce(np.array(here)) == block.sum()
        factored = mesh.factor(name, outer=sizes[name], inner=1)
        assert factored.coordinates == (*place[: number + 1], 0, *place[number + 1 :])
        assert factored.axis("outer").all_gather(np.array([here])).tolist() == wanted
        factored.close()
    mesh.close()


def test_an_axis_of_one_communicates_nothing():
    mesh = tpm.mesh(dp=4, tp=1)
    alone = mesh.axis("tp")
    own = np.arange(6.0).reshape(3, 2)
    with tpm.ledger() as led:
        for name, call in CALLS.items():
            if name.partition("_")[0] not in ("send", "recv", "comm"):
                call(alone)
        assert np.array_equal(alone.start.all_gather(own).wait(), own)
    assert led.count() == 0
    assert alone._channel.comm is None
    assert alone._channel.transport is None
    mesh.close()


def test_sub_meshes_of_sub_meshes():
    mesh = tpm.mesh(pp=2, dp=2, tp=1)
    here = tpm.device().rank
    for stage, first in zip(mesh.split("pp"), (0, 2), strict=True):
        for rank, part in enumerate(stage.split("dp"), first):
            assert [device.rank for device in part.devices] == [rank]
            assert part.is_member == (rank == here)
            assert (part.axes, part.shape) == (("tp",), (1,))
    mesh.close()


def test_a_closed_mesh_closes_all_of_it():
    before = len(world_state().channels)
    mesh = tpm.mesh(dp=2, tp=2)
    stage = mesh.split("dp")[tpm.device().rank // 2]
    groups = [mesh.axis("tp"), mesh.axis("dp"), stage, stage.axis("tp")]
    mesh.close()
    for group in (mesh, *groups):
        with pytest.raises(GroupError, match="closed"):
            group.barrier()
    assert len(world_state().channels) == before


def test_all_factors_of_an_axis():
    mesh = tpm.mesh(tp=4)
    here = tpm.device().rank
    for kv, rep in product((1, 2, 4), repeat=2):
        if kv * rep != 4:
            with pytest.raises(GroupError, match=f"kv={kv} × rep={rep}"):
                mesh.factor("tp", kv=kv, rep=rep)
            continue
        factored = mesh.factor("tp", kv=kv, rep=rep)
        assert factored.coordinates == (here // rep, here % rep)
        total = sum(rank for rank in range(4) if rank // rep == here // rep)
        assert factored.axis("rep").all_reduce(np.array(here)) == total
        factored.close()
    mesh.close()
