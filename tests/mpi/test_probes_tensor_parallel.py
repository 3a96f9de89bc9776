"""Faults that users of comparable software met under tensor parallelism.

What is not here is in the tests of the parts: the bias added once, split vocabularies
and initial values in `test_nn`, gradients of norms in `test_sequence_parallel`, initial
losses, replicas and heads that do not divide in `test_models`.
"""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import h5py
import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG, Run, samples, with_dropout
from tests.mpi.test_nn import values
from tparmpi import nn
from tparmpi.io import checkpoint
from tparmpi.models import GPTLayout
from tparmpi.optim import clip_norm
from tparmpi.sharding import Replicate, Shard
from tparmpi.testing import check_gradient

pytestmark = pytest.mark.mpi(min_size=4)

SEQUENCE = GPTLayout(sequence=True)
EVERYTHING = (
    ({"tp": 1}, GPTLayout()),
    ({"tp": 2}, GPTLayout()),
    ({"tp": 4}, GPTLayout()),
    ({"tp": 3}, SEQUENCE),
    ({"dp": 2, "tp": 2}, GPTLayout(sequence=True, fully_sharded="dp")),
    ({"tp": 2, "tq": 2}, GPTLayout(other_axis="tq")),
    ({"tp": 2, "cp": 2}, GPTLayout(context="heads")),
    ({"cp": 2, "tp": 2}, GPTLayout(context="ring", sequence=True, fully_sharded="cp")),
)
each_way = pytest.mark.parametrize(
    ("axes", "layout"), EVERYTHING, ids=[str(axes) for axes, _ in EVERYTHING]
)


def mesh(axes: dict[str, int]) -> tpm.Mesh:
    return tpm.mesh(tpm.devices()[: int(np.prod(list(axes.values())))], **axes)


@each_way
def test_the_initial_loss_is_that_of_a_uniform_guess(axes, layout):
    """It falls as one over the members where replicas are not alike."""
    place = mesh(axes)
    run = Run(layout=layout)
    loss = run.backward(run.model(place), 0)
    if place.is_member:
        assert loss == pytest.approx(log(CONFIG.vocab_size), rel=0.02)


@each_way
def test_initial_values_are_the_same_bytes(axes, layout):
    place = mesh(axes)
    reference = Run().model(tpm.device()).state_dict()
    model = Run(layout=layout).model(place)
    if not place.is_member:
        return
    for name, parameter in model.named_parameters():
        assert parameter.numpy().tobytes() == reference[name].numpy().tobytes(), name


@each_way
def test_replicas_stay_the_same_bytes(axes, layout):
    place = mesh(axes)
    trained = Run(with_dropout(), layout=layout).train(place, 3)
    if not place.is_member:
        return
    for name, parameter in trained.model.named_parameters():
        held = place.all_gather_object(
            (parameter.spec.local_offset, parameter.local.tobytes())
        )
        assert len(set(held)) == len({offset for offset, _ in held}), name


@each_way
def test_the_norm_counts_tied_and_replicated_weights_once(axes, layout):
    place = mesh(axes)
    norms = []
    for where, how in ((tpm.device(), GPTLayout()), (place, layout)):
        run = Run(layout=how)
        model = run.model(where)
        run.backward(model, 0)
        assert model.output.weight is model.input.tokens.weight
        norms.append(clip_norm(model.parameters(), 1e-3) if where.is_member else None)
    if place.is_member:
        np.testing.assert_allclose(norms[1], norms[0], rtol=1e-12)
        assert norms[1][1] == pytest.approx(1e-3 / norms[1][0])


@pytest.mark.parametrize("members", [2, 3])
def test_both_splits_have_the_gradients_of_finite_differences(members):
    """Columns then rows, the sum finished by an all_reduce or by positions."""
    place = tpm.group(tpm.devices()[:members])
    if not place.is_member:
        return
    arrays = [values(2, 3, 4), values(4, 5), values(5, 4)]

    def half(x, up, down, then):
        up, down = up.with_sharding(Shard(1)), down.with_sharding(Shard(0))
        return ((x @ up).gelu() @ down).with_sharding(then) * x

    for then in (Replicate(), Shard(1)):
        check_gradient(lambda *t, then=then: half(*t, then), arrays, place.autodiff())


@each_way
def test_recomputation_changes_no_bit(axes, layout):
    """Masks are drawn again, gathered operands gathered again."""
    place = mesh(axes)
    run = Run(replace(with_dropout(), n_layer=1), layout=layout)
    kept, again = run.model(place), run.model(place)
    again.blocks = [tpm.recompute(block) for block in again.blocks]
    assert run.backward(kept, 0) == run.backward(again, 0)
    if not place.is_member:
        return
    for name, parameter in again.named_parameters():
        expected = kept.state_dict()[name].grad.local
        assert parameter.grad.local.tobytes() == expected.tobytes(), name


def test_masks_of_split_positions_are_those_of_one_rank():
    """And differ between members, along both axes that split something."""
    place = mesh({"dp": 2, "tp": 2})
    ones = np.ones((4, 6, 8))
    with tpm.random.scope(3):
        serial = tpm.dropout(tpm.tensor(ones, tpm.device()), 0.5, "s").numpy()
    x = tpm.tensor(ones, place).with_sharding(dp=Shard(0), tp=Shard(1))
    with tpm.random.scope(3):
        thinned = tpm.dropout(x, 0.5, "s")
    assert thinned.numpy().tobytes() == serial.tobytes()
    assert len(set(place.all_gather_object(thinned.local.tobytes()))) == 4


def test_fewer_heads_of_keys_than_members():
    """8 heads of queries, 2 of keys and values, over 4 members: 2 times 2."""
    four = tpm.mesh(tp=4).factor("tp", kv=2, rep=2)
    shapes = ((2, 5, 2, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3))
    arrays = [values(*shape) + 0.1 * i for i, shape in enumerate(shapes)]
    gradients = []
    for place in (tpm.device(), four):
        q, k, v = (tpm.tensor(a, place.autodiff()).require_grad() for a in arrays)
        operands = q, k, v
        if place is four:
            operands = (
                q.with_sharding(kv=Shard(2), rep=Shard(3)),
                k.with_sharding(kv=Shard(2)),
                v.with_sharding(kv=Shard(2)),
            )
        with tpm.no_implicit_gather(), tpm.ledger() as ledger:
            y = tpm.attention(*operands)
        assert ledger.count() == 0
        (y * y).sum().backward()
        gradients.append([y.numpy(), *(t.grad.numpy() for t in (q, k, v))])
    assert y.sharding == (Shard(2), Shard(3))
    for found, expected in zip(*gradients[::-1], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


def test_heads_of_keys_that_members_cannot_share_are_refused():
    three = mesh({"tp": 3})
    with pytest.raises(
        tpm.ShardingError, match=r"2 heads cannot be split over the 3 members of axis"
    ):
        nn.CausalSelfAttention(16, 2, three, split="heads")
    q, k = (tpm.tensor(values(1, 4, heads, 2), three) for heads in (8, 2))
    split = q.with_sharding(Shard(2))
    with tpm.no_implicit_gather(), pytest.raises(tpm.ShardingError, match="operand 0"):
        tpm.attention(split, k, k)


@pytest.mark.parametrize("vocab_size", [5, 3, 1021])
@pytest.mark.parametrize("layout", [GPTLayout(), SEQUENCE], ids=["", "sequence"])
def test_a_vocabulary_that_does_not_divide(vocab_size, layout):
    config = replace(CONFIG, n_layer=1, vocab_size=vocab_size, tied=False)
    trained = Run(config, layout=layout).train(mesh({"tp": 4}), 3)
    expected = Run(config).train(tpm.device(), 3)
    np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)


def test_a_checkpoint_of_such_a_vocabulary_holds_its_rows_only(tmp_path):
    everyone = tpm.world()
    path = Path(everyone.broadcast_object(str(tmp_path))) / "step-00000001"
    two, whole = mesh({"tp": 2}), values(65535, 2)
    table = nn.Embedding(65535, 2, two, split="vocabulary", dtype="float64")
    if two.is_member:
        table.weight.write_local(whole[table.weight.spec.local_slices])
    checkpoint.save(path, table)
    everyone.barrier()
    with h5py.File(path / "index.h5") as file:
        assert file["model/weight"].shape == (65535, 2)
    for axes in ({"tp": 1}, {"tp": 4}):
        place = mesh(axes)
        other = nn.Embedding(65535, 2, place, split="vocabulary", dtype="float64")
        checkpoint.load(path, other)
        if place.is_member:
            np.testing.assert_array_equal(other.weight.numpy(), whole)
    everyone.barrier()


def test_a_row_parallel_bias_is_added_once_under_a_scatter():
    place = mesh({"tp": 3}).autodiff()
    layer = nn.Linear(6, 4, place, split="rows", dtype="float64").initialize(0)
    if not place.is_member:
        return
    layer.weight.write_local(np.zeros(layer.weight.spec.local_shape))
    layer.bias.write_local(np.ones(4))
    x = tpm.tensor(values(2, 5, 6), place).with_sharding(Shard(2))
    y = layer(x).with_sharding(Shard(1))
    np.testing.assert_array_equal(y.numpy(), np.ones((2, 5, 4)))
    y.sum().backward()
    np.testing.assert_array_equal(layer.bias.grad.numpy(), np.full(4, 10.0))


def test_tokens_beyond_the_vocabulary_are_refused_on_every_member():
    place = mesh({"tp": 4})
    model = Run().model(place)
    wrong = samples(0)[:, :-1]
    wrong[0, 0] = CONFIG.vocab_size
    with pytest.raises(tpm.UsageError, match="outside the vocabulary of 53"):
        model(tpm.tensor(wrong, place))
