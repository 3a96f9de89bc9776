from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tparmpi.errors import CheckpointError
from tparmpi.io.planner import (
    Block,
    Box,
    TensorDescription,
    blocks_of,
    digest_of,
    fills,
    make_plan,
)
from tparmpi.sharding import Replicate, Shard, block


@dataclass
class Device:
    rank: int


@dataclass
class Place:
    shape: tuple[int, ...]
    devices: tuple[Device, ...]


class Spec:
    def __init__(self, place, shape, layout):
        self.place, self.shape, self.layout = place, shape, layout

    def block(self, coordinates):
        return block(self.shape, self.layout, self.place.shape, coordinates)


def describe(name, shape, mesh, layout, ranks=None, itemsize=4):
    count = int(np.prod(mesh))
    ranks = range(count) if ranks is None else ranks
    place = Place(mesh, tuple(Device(rank) for rank in ranks))
    blocks = blocks_of(Spec(place, shape, layout))
    return TensorDescription(name, shape, "float32", itemsize, blocks)


@st.composite
def descriptions(draw):
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(int(np.prod(mesh)))))
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        kinds = [Replicate(), *map(Shard, range(len(shape)))]
        layout = tuple(draw(st.sampled_from(kinds)) for _ in mesh)
        tensors.append(describe(f"t{number}", shape, mesh, layout, ranks))
    return tensors


@given(descriptions(), st.sampled_from([1, 16, 1 << 18]))
def test_each_element_has_one_writer_that_holds_it(tensors, minimum):
    plan = make_plan(tensors, minimum)
    assert set(plan) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        writers = np.zeros(tensor.shape, int)
        for piece in plan[tensor.name]:
            writers[piece.box.slices()] += 1
            held = [b for b in tensor.blocks if piece.writer in b.holders]
            assert any(b.box.intersection(piece.box) == piece.box for b in held)
        assert (writers == 1).all()


def test_one_rank_writes_at_most_one_piece_of_a_tensor():
    layout = (Replicate(), Shard(0))
    plan = make_plan([describe("w", (64, 9), (3, 2), layout)], 1)
    writers = [piece.writer for piece in plan["w"]]
    assert sorted(writers) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("layout", [(Replicate(), Shard(0)), (Replicate(),) * 2])
def test_writers_are_level_within_a_tenth(layout):
    sizes = [(4096, 300), (700, 1000), (1000,), (33, 21, 500), (50257, 20)]
    tensors = [describe(f"t{i}", s, (4, 2), layout) for i, s in enumerate(sizes)]
    load = dict.fromkeys(range(8), 0)
    for pieces in make_plan(tensors).values():
        for piece in pieces:
            load[piece.writer] += piece.box.size * 4
    assert max(load.values()) <= 1.1 * sum(load.values()) / 8


@given(st.data())
def test_replicas_share_their_bytes_within_a_tenth(data):
    """Any mesh of which each tensor is whole along some axis, which differ."""
    mesh = data.draw(
        st.sampled_from([(2,), (5,), (4, 2), (2, 3), (2, 2, 2), (3, 1, 4)])
    )
    ranks = data.draw(st.permutations(range(int(np.prod(mesh)))))
    tensors = []
    for number in range(data.draw(st.integers(1, 6))):
        # Rows that divide, so that blocks are alike; columns that need not.
        shape = (480 * data.draw(st.integers(1, 40)), data.draw(st.integers(100, 999)))
        split = data.draw(st.sets(st.integers(0, len(mesh) - 1)))
        split = set() if len(split) == len(mesh) else split
        layout = tuple(
            Shard(0) if n in split else Replicate() for n in range(len(mesh))
        )
        tensors.append(describe(f"t{number}", shape, mesh, layout, ranks))
    load = dict.fromkeys(ranks, 0)
    for pieces in make_plan(tensors, 1).values():
        for piece in pieces:
            load[piece.writer] += piece.box.size * 4
    assert max(load.values()) <= 1.1 * sum(load.values()) / len(load)


def test_many_small_tensors_are_spread_over_the_holders():
    tensors = [describe(f"t{i:02}", (100,), (4,), (Replicate(),)) for i in range(40)]
    plan = make_plan(tensors)
    assert all(len(pieces) == 1 for pieces in plan.values())
    writers = [pieces[0].writer for pieces in plan.values()]
    assert [writers.count(rank) for rank in range(4)] == [10] * 4


def test_a_plan_does_not_depend_on_the_order_in_which_tensors_are_named():
    tensors = [
        describe(f"t{i}", (50 + i, 3), (2, 2), (Shard(0),) * 2) for i in range(5)
    ]
    assert make_plan(tensors) == make_plan(tensors[::-1])


def test_blocks_that_do_not_fill_a_tensor_are_refused():
    tensor = TensorDescription("w", (4,), "float32", 4, (Block(Box((0,), (3,)), (0,)),))
    with pytest.raises(CheckpointError, match="do not fill"):
        make_plan([tensor])


def test_digests_tell_layouts_apart():
    a = describe("w", (4, 4), (2,), (Shard(0),))
    b = describe("w", (4, 4), (2,), (Shard(1),))
    assert digest_of([a]) == digest_of([describe("w", (4, 4), (2,), (Shard(0),))])
    assert digest_of([a]) != digest_of([b])


@given(st.data())
def test_fills_agrees_with_counting(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cuts = [
        sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))})
        for n in shape
    ]
    ranges = [list(itertools.pairwise(c)) for c in cuts]
    boxes = [
        Box(tuple(a for a, _ in r), tuple(b - a for a, b in r))
        for r in itertools.product(*ranges)
    ]
    if data.draw(st.booleans()):
        number = data.draw(st.integers(0, len(boxes) - 1))
        change = data.draw(st.sampled_from(["drop", "repeat", "move"]))
        box = boxes.pop(number)
        if change == "repeat":
            boxes += [box, box]
        elif change == "move":
            boxes.append(Box(tuple(o + 1 for o in box.offset), box.shape))
    counts = np.zeros(tuple(n + 1 for n in shape), int)
    for box in boxes:
        counts[box.slices()] += 1
    inside = counts[tuple(slice(n) for n in shape)]
    expected = bool((inside == 1).all()) and counts.sum() == inside.sum()
    assert fills(shape, tuple(boxes)) == expected


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((), [], False),
        ((), [Box((), ())], True),
        ((), [Box((), ())] * 2, False),
        ((0, 3), [], True),
        ((0, 3), [Box((0, 0), (0, 3))], False),
        ((3,), [Box((0, 0), (3, 1))], False),
        ((3,), [Box((-1,), (3,))], False),
    ],
)
def test_fills_at_the_edges(shape, boxes, expected):
    assert fills(shape, tuple(boxes)) == expected
