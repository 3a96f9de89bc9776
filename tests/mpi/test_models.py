"""A GPT gives the same numbers on every layout, with the communication it should."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import log

import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG, Run, Trained, samples, with_dropout
from tparmpi.models import GPT, GPTConfig
from tparmpi.sharding import Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

LAYOUTS = (
    {"tp": 1},
    {"tp": 2},
    {"tp": 3},
    {"tp": 4},
    {"dp": 2},
    {"dp": 3},
    {"dp": 2, "tp": 2},
    {"tp": 2, "dp": 2},
)
each_layout = pytest.mark.parametrize("axes", LAYOUTS, ids=str)
STEPS = 20


def mesh(axes: dict[str, int]) -> tpm.Mesh:
    return tpm.mesh(tpm.devices()[: int(np.prod(list(axes.values())))], **axes)


@cache
def alone(dropout: bool, dtype: str = "float64") -> Trained:
    """The same training on this rank's device, without any communication."""
    config = with_dropout() if dropout else CONFIG
    return Run(config, dtype=dtype).train(tpm.device(), STEPS)


@each_layout
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_losses_and_norms_are_those_of_one_rank(axes, dropout):
    place = mesh(axes)
    run = Run(with_dropout() if dropout else CONFIG)
    trained = run.train(place, STEPS)
    if place.is_member:
        expected = alone(dropout)
        np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)
        np.testing.assert_allclose(trained.norms[:1], expected.norms[:1], rtol=1e-12)
        np.testing.assert_allclose(trained.norms, expected.norms, rtol=1e-10)


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_a_group_is_split_over_as_its_only_axis(members):
    group = tpm.group(tpm.devices()[:members])
    trained = Run().train(group, 3)
    if group.is_member:
        assert trained.model.input.tokens.weight.sharding == Shard(0)
        np.testing.assert_allclose(trained.losses, alone(False).losses[:3], rtol=1e-10)


@each_layout
def test_losses_in_float32(axes):
    place = mesh(axes)
    trained = Run(with_dropout(), dtype="float32").train(place, STEPS)
    if place.is_member:
        expected = alone(True, "float32")
        np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-4)
        np.testing.assert_allclose(trained.losses, alone(True).losses, rtol=1e-4)


@pytest.mark.parametrize("axes", [{"tp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches_change_nothing(axes, microbatches):
    """Also where some are empty: 3 rows over dp=2 are 2 and 1."""
    place = mesh(axes)
    run = Run(with_dropout(), microbatches=microbatches)
    trained = run.train(place, STEPS)
    if place.is_member:
        np.testing.assert_allclose(trained.losses, alone(True).losses, rtol=1e-10)


@each_layout
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_gradient_is_that_of_one_rank(axes, tied):
    place = mesh(axes)
    run = Run(replace(with_dropout(), tied=tied))
    reference = run.model(tpm.device())
    run.backward(reference, 0)
    model = run.model(place)
    run.backward(model, 0)
    if not place.is_member:
        return
    assert (model.output.weight is model.input.tokens.weight) == tied
    expected = reference.state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.grad.layout == parameter.layout
        np.testing.assert_allclose(
            parameter.grad.numpy(),
            expected[name].grad.numpy(),
            rtol=1e-9,
            atol=1e-14,
            err_msg=name,
        )


@each_layout
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_initial_values_are_the_same_bytes(axes, dtype):
    place = mesh(axes)
    reference = Run(dtype=dtype).model(tpm.device()).state_dict()
    model = Run(dtype=dtype).model(place)
    assert list(model.state_dict()) == list(reference)
    if not place.is_member:
        return
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert parameter.numpy().tobytes() == reference[name].numpy().tobytes(), name


def test_shards_start_different():
    place = mesh({"tp": 4})
    model = Run().model(place)
    blocks = place.all_gather_object(model.blocks[0].attn.q.weight.local.tobytes())
    assert len(set(blocks)) == 4


@each_layout
def test_replicas_stay_the_same_bytes_and_tied_weights_one(axes):
    place = mesh(axes)
    trained = Run(with_dropout()).train(place, 5)
    if not place.is_member:
        return
    for name, parameter in trained.model.named_parameters():
        held = place.all_gather_object(
            (parameter.spec.local_offset, parameter.local.tobytes())
        )
        assert len(set(held)) == len({offset for offset, _ in held}), name
    assert "output.weight" not in trained.model.state_dict()


@each_layout
def test_the_initial_loss_is_that_of_a_uniform_guess(axes):
    place = mesh(axes)
    run = Run()
    loss = run.backward(run.model(place), 0)
    if place.is_member:
        assert loss == pytest.approx(log(CONFIG.vocab_size), rel=0.02)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_one_all_reduce_per_half_block_and_direction(members):
    place = mesh({"tp": members}).autodiff()
    model = Run().model(place)
    data = samples(0)
    tokens, targets = (tpm.tensor(half, place) for half in (data[:, :-1], data[:, 1:]))
    with tpm.no_implicit_gather(), tpm.ledger() as forward:
        logits = model(tokens)
    assert logits.sharding == Shard(2)
    with tpm.ledger() as loss_only:
        loss = tpm.cross_entropy(logits, targets).mean()
    with tpm.ledger() as backward:
        loss.backward()
    if not place.is_member:
        return
    halves = 2 * CONFIG.n_layer
    assert forward.count() == forward.count("all_reduce", "tp", "add") == halves + 1
    assert loss_only.count() == loss_only.count("all_reduce", "tp") == 2
    # One more for the product with the output's weight.
    assert backward.count() == backward.count("all_reduce", "tp") == halves + 1
    size = tokens.size * CONFIG.d_model * 8
    piece = size // members
    sent = {record.bytes for record in (*forward.records, *backward.records)}
    assert max(sent) - 2 * (members - 1) * piece <= members * 8
    assert min(sent) >= 2 * (members - 1) * piece - members * 8


@pytest.mark.parametrize("half", ["attn", "mlp"])
def test_half_a_block_alone(half):
    place = mesh({"tp": 4}).autodiff()
    block = Run().model(place).blocks[0]
    array = np.sin(np.arange(2 * 5 * CONFIG.d_model)).reshape(2, 5, -1)
    x = tpm.tensor(array, place).require_grad()
    norm, inner = getattr(block, f"{half}_norm"), getattr(block, half)
    with tpm.ledger() as forward:
        y = x + inner(norm(x))
    loss = (y * y).sum()
    with tpm.ledger() as backward:
        loss.backward()
    assert forward.count() == forward.count("all_reduce") == 1
    assert backward.count() == backward.count("all_reduce") == 1
    assert x.grad.sharding == Replicate()
    assert norm.gain.grad.sharding == norm.bias.grad.sharding == Replicate()


def test_one_all_reduce_per_bucket():
    place = mesh({"dp": 2, "tp": 2}).autodiff()
    run = Run()
    model = run.model(place)
    with tpm.ledger() as ledger:
        run.backward(model, 0)
    kinds = {record.kind for record in ledger.select(axis="dp")}
    assert kinds == {"all_reduce"}
    sizes = [p.spec.local_nbytes for p in model.parameters()]
    # One more is the loss, read as a number.
    assert ledger.count("all_reduce", "dp") - 1 < len(sizes) / 2
    payload = ledger.bytes("all_reduce", "dp") - 8
    assert payload == sum(sizes)


@pytest.mark.parametrize("vocab_size", [53, 5, 3])
@pytest.mark.parametrize("axes", [{"tp": 4}, {"tp": 2, "dp": 2}], ids=str)
def test_any_vocabulary_is_split(vocab_size, axes):
    """53 over 4, 5 over 4, and 3 over 4, where a member holds no token at all."""
    config = replace(CONFIG, n_layer=1, vocab_size=vocab_size)
    place = mesh(axes)
    trained = Run(config).train(place, 4)
    expected = Run(config).train(tpm.device(), 4)
    np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)
    table = trained.model.input.tokens.weight
    assert table.shape == (vocab_size, CONFIG.d_model)
    np.testing.assert_allclose(
        table.numpy(), expected.model.input.tokens.weight.numpy(), rtol=1e-8, atol=1e-12
    )


def test_heads_that_do_not_divide():
    config = GPTConfig(n_layer=1, d_model=50, n_head=25, seq_len=6, vocab_size=11)
    place = mesh({"tp": 2})
    trained = Run(config).train(place, 3)
    if not place.is_member:
        return
    heads = place.all_gather_object(trained.model.blocks[0].attn.q.weight.local.shape)
    assert heads == [(50, 13, 2), (50, 12, 2)]
    expected = Run(config).train(tpm.device(), 3)
    np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)


def test_fewer_heads_than_members_are_refused():
    config = GPTConfig(n_layer=1, d_model=12, n_head=3, seq_len=6, vocab_size=11)
    with pytest.raises(tpm.ShardingError, match=r"3 heads .* 4 members of axis 'tp'"):
        GPT(config, mesh({"tp": 4}))
    with pytest.raises(
        tpm.ShardingError, match=r"3 heads .* 4 members of axis 'group'"
    ):
        GPT(config, tpm.group(tpm.devices()))
    GPT(config, mesh({"dp": 4}))


def test_fewer_positions_than_the_model_has():
    place = mesh({"tp": 3})
    model = Run().model(place)
    reference = Run().model(tpm.device())
    data = samples(0)
    short = model(tpm.tensor(data[:, :5], place))
    if place.is_member:
        whole = reference(tpm.tensor(data[:, :-1], tpm.device()))
        np.testing.assert_allclose(
            short.numpy(), whole.numpy()[:, :5], rtol=1e-10, atol=1e-12
        )
    with pytest.raises(tpm.ShapeError, match=r"13 positions .* the model has 12"):
        model(tpm.tensor(data, place))


def test_ranks_that_are_no_members_hold_shells():
    place = mesh({"tp": 2})
    trained = Run().train(place, 1)
    if place.is_member:
        return
    weight = trained.model.blocks[1].attn.q.weight
    assert weight.is_shell and weight.shape == (40, 8, 5) and weight.grad is None
    assert weight.sharding == Shard(1)
    assert trained.optimizer.state_dict()["blocks.1.attn.q.weight/m"].is_shell
    data = samples(0)
    assert trained.model(tpm.tensor(data[:, :-1], place)).shape == (3, 12, 53)


def test_a_plain_place_records_nothing():
    model = GPT(CONFIG, mesh({"tp": 4})).initialize(0)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    logits = model(tpm.tensor(samples(0)[:, :-1], model.input.positions.device))
    assert logits.node is None
