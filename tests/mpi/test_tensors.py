"""Tensors: making, laying out, reading, refusing."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.sharding import REPLICATE, Partial, Replicate, Shard
from tparmpi.testing import all_layouts, laid_out

pytestmark = pytest.mark.mpi(min_size=4)


def groups():
    """Groups of the first 1 to 4 ranks that this rank is in."""
    made = [tpm.group(tpm.devices()[:n]) for n in (1, 2, 3, 4)]
    return [group for group in made if group.is_member]


def test_every_layout_reaches_every_other_with_the_same_value():
    """Uneven and empty blocks: 5 and 3 over up to 4."""
    whole = np.arange(15.0).reshape(5, 3) + 1
    places = [*groups(), tpm.mesh(dp=2, tp=2)]
    for place in places:
        axes = len(place.shape)
        for source in all_layouts(2, axes):
            tensor = laid_out(whole, place, source)
            np.testing.assert_allclose(tensor.numpy(), whole, rtol=1e-15)
            for target in all_layouts(2, axes, partial=False):
                moved = tensor.with_sharding(target, allow_empty=True)
                assert moved.layout == target
                expected = whole[moved.spec.local_slices]
                assert moved.local.shape == expected.shape
                np.testing.assert_allclose(moved.local, expected, rtol=1e-15)


def test_a_tensor_copies_its_array_and_keeps_the_dtype():
    (*_, group) = groups()
    array = np.arange(4, dtype=np.float16)
    tensor = tpm.tensor(array, group)
    array[:] = 9
    assert tensor.dtype == np.float16
    np.testing.assert_array_equal(tensor.numpy(), [0, 1, 2, 3])
    assert tpm.tensor([1.0, 2.0], group).dtype == group.settings.float
    assert tpm.tensor([1, 2], group).dtype == group.settings.int
    tensor.numpy()[:] = 7
    np.testing.assert_array_equal(tensor.numpy(), [0, 1, 2, 3])


def test_dtypes_are_promoted_as_numpy_does():
    """The dtype is that of the data on every member, with blocks or without."""
    group = tpm.group(tpm.devices())
    ints = np.array([3, 5, 6], np.int32)
    small = np.array([1.5, 2.5, 3.5], np.float32)
    wide = np.array([0.5, 0.25, 2.0])
    for layout in all_layouts(1, partial=False):

        def at(array, layout=layout):
            return laid_out(array, group, layout)

        for made, expected in [
            (at(ints) / 2, ints / 2),
            (at(ints) * 0.5, ints * 0.5),
            (at(ints) * 2, ints * 2),
            (at(ints) + 0.5, ints + 0.5),
            (at(ints).sum(), ints.sum()),
            (at(ints).mean(), ints.mean()),
            (at(ints > 4).sum(), (ints > 4).sum()),
            (at(small) + at(wide), small + wide),
            (at(small) * 2.0, small * 2.0),
            (at(small) @ at(wide), small @ wide),
            (at(ints).gelu(), at(ints.astype(float)).gelu().numpy()),
            (at(ints).softmax(0), at(ints.astype(float)).softmax(0).numpy()),
        ]:
            assert made.dtype == expected.dtype == made.local.dtype
            np.testing.assert_allclose(made.numpy(), expected, rtol=1e-6)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4) ** 2
    x = laid_out(rows, group, (Shard(0),))
    one, zero = tpm.tensor(np.ones(4), group), tpm.tensor(np.zeros(4), group)
    normed = tpm.layer_norm(x, one, zero)
    assert normed.dtype == normed.local.dtype == np.float64
    reference = (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)
    np.testing.assert_allclose(normed.numpy(), reference, rtol=1e-5)
    linear = tpm.linear(
        x, laid_out(rows.T, group), tpm.tensor(wide, group), "ab,bc->ac"
    )
    assert linear.dtype == linear.local.dtype == np.float64


def test_halves_are_summed_in_float32():
    group = tpm.group(tpm.devices())
    ones = np.ones(100_000, np.float16)
    for layout in all_layouts(1, partial=False):
        assert laid_out(ones, group, layout).mean().item() == 1


def test_byte_order_is_the_machines():
    group = tpm.group(tpm.devices())
    tensor = tpm.tensor(np.arange(4.0).astype(">f8"), group)
    assert tensor.dtype == np.dtype("=f8") == tensor.local.dtype
    np.testing.assert_array_equal(tensor.numpy(), np.arange(4.0))
    big = np.arange(4.0).astype(">f8")
    block = tpm.from_local(big, group, Replicate(), shape=(4,))
    np.testing.assert_array_equal(block.numpy(), np.arange(4.0))


def test_local_is_read_only():
    (*_, group) = groups()
    tensor = tpm.tensor(np.arange(4.0), group)
    with pytest.raises(ValueError, match="read-only"):
        tensor.local[0] = 1


def test_mesh_shardings_are_named_by_axis():
    mesh = tpm.mesh(dp=2, tp=2)
    tensor = tpm.tensor(np.arange(24.0).reshape(4, 6), mesh)
    sharded = tensor.with_sharding(dp=Shard(0)).with_sharding(tp=Shard(-1))
    assert sharded.sharding == (Shard(0), Shard(1))
    dp, tp = mesh.coordinates
    rows = np.arange(24.0).reshape(4, 6)[2 * dp : 2 * dp + 2, 3 * tp : 3 * tp + 3]
    np.testing.assert_array_equal(sharded.local, rows)


def test_an_axis_of_one_member_communicates_nothing():
    mesh = tpm.mesh(dp=1, tp=4)
    with tpm.ledger() as ledger:
        tensor = tpm.tensor(np.arange(4.0), mesh).with_sharding(dp=Shard(0))
        tensor = (tensor * tensor).sum()
        assert tensor.layout == (Partial(), REPLICATE)
        assert tensor.item() == 14
    assert ledger.count() == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.with_sharding(Shard(2)), "names no dim of a tensor of 2 dims"),
        (lambda t: t.with_sharding(Partial()), "only ever the result of an operator"),
        (lambda t: t.with_sharding(tp=Shard(0)), "no axis 'tp'"),
        (lambda t: t.with_sharding((Shard(0), Shard(1))), "2 shardings for 1 axes"),
        (lambda t: t.with_sharding("rows"), "is no sharding"),
        (lambda t: t.with_sharding(), "say how"),
        (lambda t: t.with_sharding(Shard(0)), "would leave a member empty"),
        (lambda t: t.item(), "not one"),
        (lambda t: t.backward(), "nothing was recorded"),
        (lambda t: t.require_grad(), r"device.autodiff\(\)"),
        (lambda t: t.nonsense(), "no attribute or operator 'nonsense'"),
        (lambda t: t + np.ones(2), "make it one with tpm.tensor"),
        (lambda t: np.ones(2) + t, "make it one with tpm.tensor"),
        (lambda t: t @ np.ones(2), "make it one with tpm.tensor"),
        (lambda t: t.softmax(2), "no dim 2"),
        (lambda t: t.gelu(exact=True), "unknown argument 'exact'"),
        (lambda t: t.reshape((4, 4)), "do not fit the shape"),
        (lambda t: t.dropout(1.0), "below 1"),
        (lambda t: t.split((1, 1), 1), "do not add up"),
        (
            lambda t: tpm.embedding(t, tpm.tensor(np.array([0, 3]), t.device)),
            "id 3 is outside the vocabulary of 3",
        ),
        (
            lambda t: tpm.cross_entropy(t, tpm.tensor(np.array([0, -1, 2]), t.device)),
            "id -1 is outside the vocabulary of 5",
        ),
        (lambda t: tpm.tensor(np.ones(2, np.int8), t.device) + 300, "does not fit"),
        (lambda t: tpm.embedding(t, t), "ids must be integers, they are float64"),
        (lambda t: t.with_sharding(Shard("x")), "names no dim"),
        (lambda t: tpm.tensor(np.ones(2), "cpu"), "'cpu' is no place for a tensor"),
        (lambda t: tpm.tensor(np.array(["a"]), t.device), "no array of numbers"),
        (lambda t: tpm.tensor(np.zeros(2, "f4,f4"), t.device), "no array of numbers"),
        (lambda t: tpm.einsum("ab,bc->ad", t, t), "'d' in the output only"),
        (lambda t: tpm.einsum("aa->a", t), "names two dims of one operand"),
        (lambda t: t.write_local(np.ones(3)), "block has the shape"),
    ],
)
def test_what_is_refused_says_why_and_changes_nothing(call, words):
    group = tpm.group(tpm.devices())
    array = np.arange(15.0).reshape(3, 5)
    tensor = tpm.tensor(array, group)
    with (
        pytest.raises((tpm.TparmpiError, TypeError, AttributeError), match=words),
        tpm.ledger() as ledger,
    ):
        call(tensor)
    assert ledger.count() == 0
    assert tensor.layout == (REPLICATE,) and tensor.version == 0
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_from_local_takes_blocks_of_the_chunk_rule():
    for group in groups():
        whole = np.arange(10.0).reshape(5, 2)
        block = laid_out(whole, group, (Shard(0),)).local
        tensor = tpm.from_local(block, group, Shard(0))
        assert tensor.shape == (5, 2)
        np.testing.assert_array_equal(tensor.numpy(), whole)
        pending = tpm.from_local(np.full(3, group.rank + 1.0), group, Partial())
        total = group.size * (group.size + 1) / 2
        np.testing.assert_array_equal(pending.numpy(), [total] * 3)
    group = tpm.group(tpm.devices())
    uneven = np.zeros((3 if group.rank == 3 else 1, 2))
    with pytest.raises(tpm.ShapeError, match="one element more"):
        tpm.from_local(uneven, group, Shard(0), shape=(9, 2))


def test_from_local_refuses_alike_on_all_ranks():
    group = tpm.group(tpm.devices())
    first = group.rank == 0
    for block, words in [
        (np.zeros((3 if group.rank == 1 else 2, 3)), "by the chunk rule they hold"),
        (np.zeros((2, 4 if first else 3)), "must agree in their dtype and all other"),
        (np.zeros((2, 3), "f4" if first else "f8"), "must agree in their dtype"),
        (np.zeros((2, 3, 1) if first else (2, 3)), "must agree in their dtype"),
    ]:
        with pytest.raises(tpm.ShapeError, match=words):
            tpm.from_local(block, group, Shard(0))
    with pytest.raises(tpm.UsageError, match="the block is a list"):
        tpm.from_local([1.0, 2.0], group, Shard(0))


def test_shapes_and_slices_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr("tparmpi.tensors.spec.MOST_SPECS", 16)
    monkeypatch.setattr("tparmpi.tensors.dispatch.MOST_PLANS", 8)
    group = tpm.group(tpm.devices())
    rows = np.arange(240.0).reshape(80, 3)
    x = tpm.tensor(rows, group.autodiff()).require_grad()
    for i in range(1, 40):
        part = x[i : 2 * i].with_sharding(Shard(0), allow_empty=True)
        (part.tanh() * 2).sum().backward()
        np.testing.assert_array_equal(part.numpy(), rows[i : 2 * i])
    assert len(x.spec.plans) <= 8 and len(group.specs) <= 16
    turns = np.array([sum(i <= row < 2 * i for i in range(1, 40)) for row in range(80)])
    expected = turns[:, None] * 2 * (1 - np.tanh(rows) ** 2)
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_ranks_outside_a_group_hold_shells():
    group = tpm.group(tpm.devices()[1:3])
    tensor = tpm.tensor(np.arange(12.0).reshape(3, 4), group.autodiff()).require_grad()
    weight = tpm.tensor(np.ones((4, 6)), group).with_sharding(Shard(1))
    result = (tensor @ weight).gelu()
    assert result.shape == (3, 6)
    assert result.layout == (Shard(1),)
    first, second = result.split((1, 2), 0)
    assert (first.shape, second.shape) == ((1, 6), (2, 6))
    if group.is_member:
        result.sum().backward()
        assert tensor.grad.numpy().shape == (3, 4)
    else:
        assert result.is_shell
        result.sum().backward()
        for read in (lambda: result.local, result.numpy, result.sum().item):
            with pytest.raises(tpm.ShardingError, match="no member"):
                read()
    assert "shape=(3, 6)" in repr(result)


def test_operands_on_different_places_are_refused():
    a = tpm.tensor(np.ones(2), tpm.group(tpm.devices()))
    b = tpm.tensor(np.ones(2), tpm.group(tpm.devices()))
    with pytest.raises(tpm.ShardingError, match="operand 0 lives on"):
        a + b


def test_gathering_unasked_warns_and_can_be_forbidden():
    group = tpm.group(tpm.devices())
    x = tpm.tensor(np.arange(20.0).reshape(4, 5), group).with_sharding(Shard(1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result, _ = tpm.sort(x)
    assert len(seen) == (1 if group.rank == 0 else 0)
    for warning in seen:
        assert warning.category is tpm.ImplicitGatherWarning
        assert "sort: operand 0" in str(warning.message)
        assert warning.filename == __file__
    assert result.sharding == Replicate()
    with (
        tpm.no_implicit_gather(),
        tpm.ledger() as ledger,
        pytest.raises(tpm.ShardingError, match="where you mean to gather"),
    ):
        tpm.sort(x)
    assert ledger.count() == 0


def test_dropout_masks_do_not_depend_on_the_layout():
    """Also not on how the batch is cut into microbatches."""
    ones = np.ones((6, 5, 4))

    def masks(place, layout, rows=None, array=ones):
        with tpm.random.scope(seed=3, step=7, rows=rows):
            x = laid_out(array, place, layout)
            first, second = x.dropout(0.4, "a"), x.dropout(0.4, "a")
            other = x.dropout(0.4, "b")
        return [m.numpy() for m in (first, second, other)]

    expected = masks(tpm.device(), (REPLICATE,))
    assert not np.array_equal(expected[0], expected[1])
    assert not np.array_equal(expected[0], expected[2])
    assert 0.2 < (expected[0] == 0).mean() < 0.6
    for place in [*groups(), tpm.mesh(dp=2, tp=2)]:
        for layout in all_layouts(3, len(place.shape), partial=False):
            for mask, wanted in zip(masks(place, layout), expected, strict=True):
                np.testing.assert_array_equal(mask, wanted)
    for count in (1, 2, 3, 5):
        pieces = np.array_split(np.arange(6), count)
        made = [
            masks(tpm.device(), (REPLICATE,), [(int(p[0]), len(p))], ones[p])
            for p in pieces
        ]
        for number, wanted in enumerate(expected):
            joined = np.concatenate([m[number] for m in made])
            np.testing.assert_array_equal(joined, wanted)


def test_dropout_masks_of_rows_that_are_not_neighbours():
    """On every layout, as those rows' in the whole batch."""
    ones = np.ones((9, 4))
    with tpm.random.scope(seed=3):
        whole = tpm.tensor(ones, tpm.device()).dropout(0.4, "a").numpy()
    runs = [(1, 2), (4, 0), (5, 3)]
    expected = whole[[1, 2, 5, 6, 7]]
    for place in [tpm.device(), *groups(), tpm.mesh(dp=2, tp=2)]:
        for layout in all_layouts(2, len(place.shape), partial=False):
            with tpm.random.scope(seed=3, rows=runs):
                x = laid_out(ones[:5], place, layout).dropout(0.4, "a")
            np.testing.assert_array_equal(x.numpy(), expected)


def test_initial_values_do_not_depend_on_the_layout():
    shape = (7, 6)
    for distribution in ("normal", "uniform"):
        whole = None
        for place in [tpm.device(), *groups(), tpm.mesh(dp=2, tp=2)]:
            for layout in all_layouts(2, len(place.shape), partial=False):
                spec = laid_out(np.zeros(shape), place, layout).spec
                block = tpm.random.draw(distribution, 5, "w", spec, 0.5)
                if whole is None:
                    whole = block
                np.testing.assert_array_equal(block, whole[spec.local_slices])
        assert len(np.unique(whole)) == whole.size


def test_all_pairs_of_layouts_on_three_ranks_move_only_what_they_must():
    """Bytes by the ledger: what the table of redistributions says."""
    place = tpm.group(tpm.devices()[:3])
    if not place.is_member:
        return
    whole = np.arange(36.0).reshape(6, 6)
    kinds = {
        ("Partial", "Replicate"): "all_reduce",
        ("Partial", "Shard"): "reduce_scatter",
        ("Shard", "Replicate"): "all_gather",
        ("Shard", "Shard"): "all_to_all",
    }
    targets = all_layouts(2, 1, partial=False)
    for source, target in product(all_layouts(2, 1), targets):
        tensor = laid_out(whole, place, source)
        with tpm.ledger() as ledger:
            tensor.with_sharding(target)
        names = type(source[0]).__name__, type(target[0]).__name__
        expected = [] if source == target else [kinds.get(names)]
        made = [record.kind for record in ledger.records]
        assert made == [kind for kind in expected if kind]
