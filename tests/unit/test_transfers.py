"""Transfers between places: every element comes once, from the right one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tparmpi.sharding import PARTIAL, REPLICATE, Shard, block
from tparmpi.sharding.transfers import (
    Held,
    elements_moved,
    layout_on,
    leader,
    pieces,
)

LAYOUTS = {
    1: [(REPLICATE,), (Shard(0),), (Shard(1),)],
    2: list(product((REPLICATE, Shard(0), Shard(1)), repeat=2)),
}
PLACES = [
    ((1,), (0,)),
    ((2,), (0, 1)),
    ((2,), (2, 3)),
    ((3,), (3, 1, 0)),
    ((2, 2), (0, 1, 2, 3)),
    ((2, 2), (4, 5, 6, 7)),
]


def blocks(array, layout, sizes):
    made = []
    for coordinates in np.ndindex(*sizes):
        offset, extent = block(array.shape, layout, sizes, coordinates)
        made.append(array[tuple(map(slice, offset, np.add(offset, extent)))])
    return made


@pytest.mark.parametrize("shape", [(5, 3), (1, 2), (0, 4)])
def test_every_block_is_completed(shape):
    array = np.arange(np.prod(shape)).reshape(shape) + 1
    for (sizes_a, ranks_a), (sizes_b, ranks_b) in product(PLACES, repeat=2):
        for a, b in product(LAYOUTS[len(sizes_a)], LAYOUTS[len(sizes_b)]):
            source, target = Held(a, sizes_a, ranks_a), Held(b, sizes_b, ranks_b)
            given = blocks(array, a, sizes_a)
            wanted = blocks(array, b, sizes_b)
            made = [np.zeros_like(part) for part in wanted]
            for piece in pieces(shape, source, target):
                assert not made[piece.target][piece.put].any()
                made[piece.target][piece.put] = given[piece.source][piece.taken]
            for found, expected in zip(made, wanted, strict=True):
                assert np.array_equal(found, expected)


def test_like_layouts_send_one_piece_to_each():
    layout = (Shard(0), REPLICATE)
    source = Held(layout, (2, 2), (0, 1, 2, 3))
    target = Held(layout, (2, 2), (4, 5, 6, 7))
    found = pieces((4, 2), source, target)
    assert [(piece.source, piece.target) for piece in found] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert elements_moved((4, 2), source, target) == 16
    assert elements_moved((4, 2), source, source) == 0


def test_leaders():
    assert [leader(n, (0, 1), (2, 3, 4, 5)) for n in range(4)] == [0, 0, 1, 1]
    assert [leader(n, (0, 1, 2, 3), (4, 5)) for n in range(2)] == [0, 2]
    assert leader(1, (3, 7), (5, 3)) == 0


def test_layouts_follow_the_names_of_axes():
    layout = (Shard(0), PARTIAL)
    assert layout_on(layout, ("dp", "tp"), ("tp", "dp")) == (REPLICATE, Shard(0))
    assert layout_on(layout, ("dp", "tp"), ("device",)) == (REPLICATE,)
