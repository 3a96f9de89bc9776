"""Moves along one dim, without ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tparmpi.sharding import Span, chunks_over, find_moves


def carried(sources, targets, arrays, moves):
    """The outputs' blocks after the moves, and how often each element was written."""
    made = [[np.full(size, -1) for _, size in chunks] for chunks in targets]
    written = [[np.zeros(size, int) for _, size in chunks] for chunks in targets]
    for source, target, length in moves:
        offset, size = sources[source.array][source.member]
        block = arrays[source.array][offset : offset + size]
        into = target.indices(length)
        made[target.array][target.member][into] = block[source.indices(length)]
        written[target.array][target.member][into] += 1
    return made, written


@st.composite
def chunks_of(draw, length, members):
    """Cut a dim at any places, empty pieces too."""
    count = members - 1
    cuts = draw(st.lists(st.integers(0, length), min_size=count, max_size=count))
    ends = [0, *sorted(cuts), length]
    return tuple((a, b - a) for a, b in pairwise(ends))


@given(st.data())
def test_every_element_comes_once_from_its_place(data):
    """Several operands, spans of any step with gaps between them, any chunks."""
    members = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    arrays = [np.arange(size) + 100 * number for number, size in enumerate(sizes)]
    sources = tuple(data.draw(chunks_of(size, members)) for size in sizes)
    spans = []
    expected = []
    for _ in range(data.draw(st.integers(0, 4))):
        operand = data.draw(st.integers(0, len(sizes) - 1))
        picked = range(sizes[operand])[
            data.draw(st.slices(sizes[operand]).filter(lambda s: s.step != 0))
        ]
        expected += [-1] * data.draw(st.integers(0, 3))
        spans.append(
            Span(picked.start, len(expected), len(picked), picked.step, operand)
        )
        expected += list(arrays[operand][list(picked)])
    expected = np.array(expected, int)
    targets = (data.draw(chunks_of(len(expected), members)),)
    moves = find_moves(tuple(spans), sources, targets)
    (made,), (written,) = carried(sources, targets, arrays, moves)
    np.testing.assert_array_equal(np.concatenate(made), expected)
    np.testing.assert_array_equal(np.concatenate(written), expected >= 0)
    assert all(move.length > 0 for move in moves)
    for member in range(members):
        part = [m for m in moves if member in (m.source.member, m.target.member)]
        assert list(find_moves(tuple(spans), sources, targets, member)) == part


@given(st.data())
def test_the_way_back_is_the_adjoint(data):
    """<move x, y> = <x, move back y> for what reads no element twice."""
    members = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(1, 12))
    picked = range(size)[data.draw(st.slices(size).filter(lambda s: s.step != 0))]
    sources = (chunks_over(size, members),)
    targets = (chunks_over(len(picked), members),)
    spans = (Span(picked.start, 0, len(picked), picked.step),)
    moves = find_moves(spans, sources, targets)
    y = np.arange(len(picked)) + 1
    back = [move.reversed() for move in moves]
    (made,), _ = carried(targets, sources, [y], back)
    found = np.concatenate(made)
    expected = np.full(size, -1)
    expected[list(picked)] = y
    np.testing.assert_array_equal(found, expected)


def test_what_stays_with_its_member_goes_nowhere_else():
    moves = find_moves((Span(1, 0, 9),), (chunks_over(10, 3),), (chunks_over(9, 3),))
    ends = [(m.source.member, m.target.member, m.length) for m in moves]
    assert ends == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_chunks_that_overlap_get_the_same_elements():
    needed = ((0, 3), (2, 3))
    moves = find_moves((Span(0, 0, 5),), (chunks_over(5, 2),), (needed,))
    made, _ = carried((chunks_over(5, 2),), (needed,), [np.arange(5)], moves)
    assert [list(block) for block in made[0]] == [[0, 1, 2], [2, 3, 4]]
