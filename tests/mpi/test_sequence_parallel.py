"""Sequence parallelism: the same numbers, other communication."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG, Run, Trained, samples, with_dropout
from tparmpi.models import GPTLayout
from tparmpi.nn.splitting import scatter_tokens
from tparmpi.sharding import Partial, Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

LAYOUTS = (
    {"tp": 1},
    {"tp": 2},
    {"tp": 3},
    {"tp": 4},
    {"dp": 2, "tp": 2},
    {"tp": 2, "dp": 2},
    {"dp": 3},
)
SEQUENCE = GPTLayout(sequence=True)
UNEVEN = replace(with_dropout(), seq_len=11)
"""11 positions over 2, 3 and 4 members."""
BATCHES = pytest.mark.parametrize("batch", [3, 12], ids=["positions", "rows"])
"""Of 12 rows as many are on each member; 3 are not, so that positions are split."""
SHORT = replace(UNEVEN, seq_len=3, n_layer=1)
"""One member of four has no position."""


def mesh(axes: dict[str, int]) -> tpm.Mesh:
    return tpm.mesh(tpm.devices()[: int(np.prod(list(axes.values())))], **axes)


@cache
def alone(config, steps, batch=3) -> Trained:
    """The same training on this rank's device, without any communication."""
    return Run(config, batch).train(tpm.device(), steps)


@BATCHES
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_losses_are_those_of_one_rank(axes, batch):
    place = mesh(axes)
    trained = Run(UNEVEN, batch, layout=SEQUENCE).train(place, 20)
    if place.is_member:
        expected = alone(UNEVEN, 20, batch)
        np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)
        np.testing.assert_allclose(trained.norms[:1], expected.norms[:1], rtol=1e-12)
        np.testing.assert_allclose(trained.norms, expected.norms, rtol=1e-10)


@pytest.mark.parametrize("axes", [{"tp": 4}, {"tp": 2, "dp": 2}], ids=str)
def test_fewer_positions_than_members_and_than_the_model_has(axes):
    trained = Run(SHORT, layout=SEQUENCE).train(mesh(axes), 4)
    expected = alone(SHORT, 4)
    np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)
    data = samples(0, SHORT)[:, :2]
    logits = trained.model.eval()(tpm.tensor(data, trained.model.output.weight.device))
    whole = expected.model.eval()(tpm.tensor(data, tpm.device()))
    np.testing.assert_allclose(logits.numpy(), whole.numpy(), rtol=1e-8, atol=1e-10)


def test_a_group_is_split_over_as_its_only_axis():
    trained = Run(UNEVEN, layout=SEQUENCE).train(tpm.group(tpm.devices()), 3)
    np.testing.assert_allclose(trained.losses, alone(UNEVEN, 3).losses, rtol=1e-10)


@BATCHES
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_gradient_is_that_of_one_rank(axes, tied, batch):
    """Those of norms and biases too, of which each member has a part: added once."""
    place = mesh(axes)
    run = Run(replace(UNEVEN, tied=tied), batch, layout=SEQUENCE)
    reference = run.model(tpm.device())
    run.backward(reference, 0)
    model = run.model(place)
    run.backward(model, 0)
    if not place.is_member:
        return
    expected = reference.state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.grad.layout == parameter.layout
        exact = parameter.kind in ("norm", "bias")
        np.testing.assert_allclose(
            parameter.grad.numpy(),
            expected[name].grad.numpy(),
            rtol=1e-12 if exact else 1e-9,
            atol=1e-15 if exact else 1e-14,
            err_msg=name,
        )


@pytest.mark.parametrize("half", ["attn", "mlp"])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_one_gather_and_one_scatter_per_half_block_and_direction(half, members):
    """And one more gather, of what the backward needs and was not kept."""
    place = mesh({"tp": members}).autodiff()
    block = Run(layout=SEQUENCE).model(place).blocks[0]
    norm, inner = getattr(block, f"{half}_norm"), getattr(block, half)
    array = np.sin(np.arange(2 * 12 * CONFIG.d_model)).reshape(2, 12, -1)
    x = tpm.tensor(array, place).require_grad()
    split = x.with_sharding(tp=Shard(1))
    with tpm.no_implicit_gather(), tpm.ledger() as forward:
        y = split + block._inner(inner, norm(split))
    if not place.is_member:
        return
    assert y.sharding == Shard(1)
    loss = (y * y).sum()
    with tpm.ledger() as backward:
        loss.backward()
    assert forward.count() == 2
    assert forward.count("all_gather", "tp") == forward.count("reduce_scatter") == 1
    assert backward.count() == 3
    assert backward.count("reduce_scatter", "tp") == 1
    assert backward.count("all_gather", "tp") == 2
    assert x.grad.sharding == Shard(1)
    assert norm.gain.grad.sharding == norm.bias.grad.sharding == Partial()


@BATCHES
@pytest.mark.parametrize("members", [2, 4])
def test_calls_and_bytes_of_a_whole_model(members, batch):
    """Forward as many bytes as with all_reduces; nothing else than the two calls."""
    place = mesh({"tp": members}).autodiff()
    data = samples(0, batch=batch)
    tokens, targets = (tpm.tensor(half, place) for half in (data[:, :-1], data[:, 1:]))
    with tpm.ledger() as reduced:
        Run().model(place)(tokens)
    model = Run(layout=SEQUENCE).model(place)
    with tpm.no_implicit_gather(), tpm.ledger() as forward:
        logits = model(tokens)
    loss = tpm.cross_entropy(logits, targets).mean()
    with tpm.ledger() as backward:
        loss.backward()
    if not place.is_member:
        return
    assert logits.sharding == Shard(2)
    layers = 2 * CONFIG.n_layer + 1
    assert forward.count("all_gather", "tp") == layers
    assert forward.count("reduce_scatter", "tp") == layers
    assert forward.count() == 2 * layers
    assert forward.bytes() == reduced.bytes()
    assert backward.count("reduce_scatter", "tp") == layers
    assert backward.count("all_gather", "tp") == 2 * layers
    assert backward.count() == 3 * layers


@pytest.mark.parametrize(("batch", "gathers"), [(6, 1), (8, 0)])
def test_gradients_of_norms_are_reduced_once_in_a_bucket(batch, gathers):
    place = mesh({"dp": 2, "tp": 2}).autodiff()
    run = Run(UNEVEN, layout=SEQUENCE)
    model = run.model(place)
    data = samples(0, UNEVEN, batch)
    tokens = tpm.tensor(data[:, :-1], place).with_sharding(dp=Shard(0))
    targets = tpm.tensor(data[:, 1:], place).with_sharding(dp=Shard(0))
    with tpm.random.scope(7, 0):
        tpm.cross_entropy(model(tokens), targets).mean().backward()
    gain = model.blocks[0].attn_norm.gain
    assert gain.grad.sharding == (Partial(), Partial())
    with tpm.ledger() as ledger:
        tpm.parallel.reduce_gradients(model.parameters())
    assert gain.grad.sharding == (Replicate(), Replicate())
    assert ledger.count("all_reduce", "tp") == 1
    # Where positions are split so is their table's gradient: no pending sum along tp.
    assert ledger.count("all_gather", "tp") == gathers
    with tpm.ledger() as again:
        tpm.parallel.reduce_gradients(model.parameters())
    assert again.count() == 0


def test_rows_are_split_where_each_member_gets_as_many():
    place = tpm.mesh(dp=2, tp=2)
    for rows, sharding, dim in (
        (12, Replicate(), 0),
        (12, Shard(0), 0),
        (10, Shard(0), 1),
        (10, Replicate(), 0),
        (3, Replicate(), 1),
        (2, Shard(0), 1),
    ):
        x = tpm.tensor(np.zeros((rows, 5, 3)), place).with_sharding(dp=sharding)
        assert scatter_tokens(x, "tp").sharding == (sharding, Shard(dim))
    # Rows that a later axis has split stay where they are.
    x = tpm.tensor(np.zeros((12, 5, 3)), tpm.mesh(tp=2, dp=2)).with_sharding(
        dp=Shard(0)
    )
    assert scatter_tokens(x, "tp").sharding == (Shard(1), Shard(0))
