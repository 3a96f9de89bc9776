"""Layout algebra: chunks, routes, rules and choices, without ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tparmpi.errors import ShapeError, ShardingError
from tparmpi.sharding import (
    PARTIAL,
    REPLICATE,
    Layout,
    Operand,
    Partial,
    Replicate,
    Shard,
    Traits,
    bind,
    block,
    choose,
    chunk,
    chunk_sizes,
    find_route,
)

R, P = REPLICATE, PARTIAL


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_cover_a_dim_once_and_differ_by_at_most_one(length, parts):
    ends = 0
    for index in range(parts):
        offset, size = chunk(length, parts, index)
        assert offset == ends
        ends += size
    assert ends == length
    sizes = chunk_sizes(length, parts)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_the_left_axis_splits_first():
    offset, extent = block((10,), (Shard(0), Shard(0)), (2, 2), (1, 1))
    assert (offset, extent) == ((8,), (2,))


def layouts(ndim: int, axes: int, partial: bool = True) -> list[Layout]:
    choices = [R, *([P] if partial else []), *(Shard(d) for d in range(ndim))]
    return list(product(choices, repeat=axes))


class Simulated:
    """All members' blocks of one array, moved by the rules of each step."""

    def __init__(self, whole: np.ndarray, layout: Layout, sizes: tuple[int, ...]):
        self.whole, self.sizes = whole, sizes
        self.coordinates = list(product(*map(range, sizes)))
        self.blocks = {}
        for c in self.coordinates:
            array = whole[self.slices(layout, c)].astype(float)
            for axis, placement in enumerate(layout):
                if isinstance(placement, Partial):
                    # distinct summands that add up to the value
                    n, i = sizes[axis], c[axis]
                    array = array * (2 * (i + 1) / (n * (n + 1)))
            self.blocks[c] = array

    def slices(self, layout, c):
        offset, extent = block(self.whole.shape, layout, self.sizes, c)
        return tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))

    def run(self, step):
        axis, n = step.axis, self.sizes[step.axis]
        blocks = {}
        for c in self.coordinates:
            peers = [self.blocks[(*c[:axis], i, *c[axis + 1 :])] for i in range(n)]
            blocks[c] = getattr(self, step.kind)(peers, c[axis], step)
        self.blocks = blocks

    def piece(self, array, dim, index, n):
        start, size = chunk(array.shape[dim], n, index)
        return array.take(range(start, start + size), axis=dim)

    def all_gather(self, peers, index, step):
        return np.concatenate(peers, axis=step.source.dim)

    def all_reduce(self, peers, index, step):
        return sum(peers)

    def reduce_scatter(self, peers, index, step):
        return self.piece(sum(peers), step.target.dim, index, len(peers))

    def all_to_all(self, peers, index, step):
        whole = np.concatenate(peers, axis=step.source.dim)
        return self.piece(whole, step.target.dim, index, len(peers))

    def slice(self, peers, index, step):
        return self.piece(peers[index], step.target.dim, index, len(peers))

    def embed(self, peers, index, step):
        if isinstance(step.source, Replicate):
            return peers[index] if index == 0 else np.zeros_like(peers[index])
        dim = step.source.dim
        return np.concatenate(
            [p if i == index else np.zeros_like(p) for i, p in enumerate(peers)], dim
        )


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("embed", [False, True])
def test_every_route_ends_at_the_right_blocks(sizes, embed):
    """Uneven and empty blocks included: (5, 3) over up to 8 members."""
    whole = np.arange(15.0).reshape(5, 3) + 1
    for source in layouts(2, len(sizes)):
        for target in layouts(2, len(sizes)):
            route = find_route(whole.shape, sizes, source, target, embed)
            becomes_partial = any(
                isinstance(t, Partial) and not isinstance(s, Partial)
                for s, t in zip(source, target, strict=True)
            )
            if becomes_partial and not embed:
                assert route is None
                continue
            assert route is not None
            state = Simulated(whole, source, sizes)
            for step in route.steps:
                state.run(step)
            # what is still pending is added up here
            for axis in reversed(range(len(sizes))):
                if isinstance(target[axis], Partial):
                    state.blocks = {
                        c: sum(
                            state.blocks[(*c[:axis], i, *c[axis + 1 :])]
                            for i in range(sizes[axis])
                        )
                        for c in state.coordinates
                    }
            for c in state.coordinates:
                expected = whole[state.slices(target, c)]
                np.testing.assert_allclose(state.blocks[c], expected, rtol=1e-14)


def test_routes_take_the_cheap_way():
    def kinds(source, target, sizes=(4,)):
        return [s.kind for s in find_route((8, 8), sizes, source, target).steps]

    assert kinds((P,), (Shard(0),)) == ["reduce_scatter"]
    assert kinds((Shard(0),), (Shard(1),)) == ["all_to_all"]
    assert kinds((R,), (Shard(1),)) == ["slice"]
    # the outer axis can only leave a dim that no inner axis splits
    assert kinds((Shard(0), Shard(0)), (R, Shard(0)), (2, 2)) == [
        "all_gather",
        "all_gather",
        "slice",
    ]


def test_rules_bind_letters_to_sizes():
    rule = bind("btd,dhe + he->bthe", [(2, 3, 4), (4, 5, 6), (5, 6)], "linear")
    assert rule.output_shapes == ((2, 3, 5, 6),)
    assert rule.terms == (0, 0, 1)
    assert rule.term_has(0, "d") and not rule.term_has(1, "d")


def test_rules_broadcast_as_numpy():
    rule = bind("...,...->...", [(4, 1, 3), (2, 3)], "mul")
    assert rule.output_shapes == ((4, 2, 3),)
    assert rule.operands[0][1] == ()


def test_composite_dims_split_their_leading_factor_only():
    rule = bind("b(hd)->bhd", [(2, 12)], "reshape", {"h": 4})
    assert rule.sizes["d"] == 3
    assert rule.shardable("h", [2]) and not rule.shardable("h", [3])
    assert not rule.shardable("d", [3])
    alone = bind("b(hd)->bhd", [(2, 5)], "reshape", {"h": 5})
    assert alone.shardable("h", [3])


def test_moved_dims_have_a_size_in_each_operand_and_output():
    rule = bind("<d>e,<d>e-><d>e,<d>e", [(5, 2), (3, 2)], "concat", {"d": (6, 2)})
    assert rule.output_shapes == ((6, 2), (2, 2))
    assert rule.shardable("d", [2]) and not rule.shardable("d", [2, 2])


@pytest.mark.parametrize(
    ("text", "shapes", "words"),
    [
        (
            "mk,kn->mn",
            [(2, 3), (4, 5)],
            "is 4, but 3 is needed to fit the others; the operands' shapes are (2, 3)",
        ),
        ("mk,kn->mn", [(2, 3)], "takes 2 operands, but 1"),
        ("mk,kn->mn", [(2,), (4, 5)], "operand 0 has 1 dims"),
        ("...,...->...", [(2,), (3,)], "dim 0 of operand 1 is 3, but 2"),
        ("mk", [(2, 3)], "no '->'"),
        ("m[k->m", [(2, 3)], "lacks a ']'"),
    ],
)
def test_rules_say_what_does_not_fit(text, shapes, words):
    with pytest.raises(ShapeError) as error:
        bind(text, shapes, "op")
    assert words in str(error.value)


def operand(shape, layout, parameter=False, itemsize=8):
    return Operand(shape, layout, itemsize, parameter)


def chosen(text, operands, sizes, traits=Traits()):  # noqa: B008
    rule = bind(text, [o.shape for o in operands], "op")
    names = tuple(f"a{i}" for i in range(len(sizes)))
    return choose("op", rule, traits, operands, names, sizes)


def test_columns_then_rows_need_no_communication():
    x = operand((4, 8), (R,))
    first = chosen("mk,kn->mn", [x, operand((8, 6), (Shard(1),), True)], (3,))
    assert first.outputs == ((Shard(1),),)
    assert not first.routes[0].steps and not first.routes[1].steps
    hidden = operand((4, 6), first.outputs[0])
    second = chosen("mk,kn->mn", [hidden, operand((6, 8), (Shard(0),), True)], (3,))
    assert second.outputs == ((P,),)
    assert all(not route.steps for route in second.routes)
    assert second.output_gradients == ((R,),)
    assert second.operand_gradients == ((Shard(1),), (Shard(0),))
    assert first.operand_gradients == ((P,), (Shard(1),))


def test_pending_sums_pass_where_the_operator_is_linear():
    x, w = operand((4, 8), (P,)), operand((8, 6), (R,))
    passing = chosen("mk,kn->mn", [x, w], (2,), Traits((0, 1)))
    assert passing.outputs == ((P,),)
    assert passing.operand_gradients == ((R,), (P,))
    reducing = chosen("mk,kn->mn", [x, w], (2,))
    assert [s.kind for s in reducing.routes[0].steps] == ["all_reduce"]


def test_sums_pass_an_additive_operator_only_together():
    x, y = operand((4,), (P,)), operand((4,), (R,))
    assert chosen("a + a->a", [x, x], (2,), Traits((), True)).outputs == ((P,),)
    mixed = chosen("a + a->a", [x, y], (2,), Traits((), True))
    assert mixed.outputs == ((R,),)


def test_a_bias_lacks_the_contracted_factor():
    x, w = operand((4, 8), (Shard(1),)), operand((8, 6), (Shard(0),))
    choice = chosen("mk,kn + n->mn", [x, w, operand((6,), (R,))], (2,))
    assert choice.outputs == ((P,),)
    assert choice.operand_gradients[2] == (R,)
    operands = [
        operand((4, 8), (Shard(0),)),
        operand((8, 6), (R,)),
        operand((6,), (R,)),
    ]
    rows = chosen("mk,kn + n->mn", operands, (2,))
    assert rows.operand_gradients[2] == (P,)


def test_a_parameter_is_never_gathered():
    x = operand((4, 8), (Shard(0),))
    gathers = chosen("mk,kn->mn", [x, operand((8, 6), (Shard(1),), True)], (2,))
    assert gathers.gathered == (0,)
    with pytest.raises(ShardingError, match="never gathered unasked"):
        chosen("m[k]->m", [operand((4, 8), (Shard(1),), True)], (2,))


def test_the_choice_is_joint_over_axes():
    """A factor already split on one axis is free there, whatever the other does."""
    x = operand((4, 8, 16), (Shard(0), R))
    w = operand((16, 6), (R, Shard(1)), True)
    choice = chosen("btk,kn->btn", [x, w], (2, 2))
    assert choice.outputs == ((Shard(0), Shard(2)),)
    assert choice.operand_gradients == ((Shard(0), P), (P, Shard(1)))
