"""Positions split from end to end, meeting in attention by heads or in a ring."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG, Run, Trained, samples, with_dropout
from tests.mpi.test_nn import fill, values
from tparmpi import nn
from tparmpi.models import GPT, GPTLayout
from tparmpi.sharding import Partial, Shard

pytestmark = pytest.mark.mpi(min_size=4)

HEADS = GPTLayout(context="heads")
RING = GPTLayout(context="ring")
BOTH = GPTLayout(context="ring", sequence=True, fully_sharded="cp")
LONG = replace(with_dropout(), seq_len=11, n_layer=1)
"""11 positions over 2, 3 and 4 members."""
LAYOUTS = (
    ({"cp": 1}, HEADS),
    ({"cp": 2}, HEADS),
    ({"cp": 3}, HEADS),
    ({"cp": 4}, HEADS),
    ({"tp": 2, "cp": 2}, HEADS),
    ({"dp": 2, "cp": 2}, HEADS),
    ({"cp": 2}, RING),
    ({"cp": 3}, RING),
    ({"cp": 4}, RING),
    ({"tp": 2, "cp": 2}, RING),
    ({"cp": 2, "tp": 2}, RING),
    ({"cp": 2, "tp": 2}, BOTH),
    ({"dp": 2, "cp": 2}, BOTH),
)
each_layout = pytest.mark.parametrize(
    ("axes", "layout"), LAYOUTS, ids=lambda value: str(getattr(value, "context", value))
)


def mesh(axes: dict[str, int]) -> tpm.Mesh:
    return tpm.mesh(tpm.devices()[: int(np.prod(list(axes.values())))], **axes)


@cache
def alone(config, steps) -> Trained:
    """The same training on this rank's device, without any communication."""
    return Run(config).train(tpm.device(), steps)


@each_layout
def test_losses_are_those_of_one_rank(axes, layout):
    place = mesh(axes)
    trained = Run(LONG, layout=layout).train(place, 10)
    if place.is_member:
        expected = alone(LONG, 10)
        np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)
        np.testing.assert_allclose(trained.norms[:1], expected.norms[:1], rtol=1e-12)


@each_layout
def test_every_gradient_is_that_of_one_rank(axes, layout):
    """Attention is causal across members, and each knows its positions' numbers."""
    place = mesh(axes)
    run = Run(replace(LONG, tied=False), layout=layout)
    reference, model = run.model(tpm.device()), run.model(place)
    run.backward(reference, 0)
    run.backward(model, 0)
    if not place.is_member:
        return
    for name, parameter in model.named_parameters():
        assert parameter.grad.layout == parameter.layout
        np.testing.assert_allclose(
            parameter.grad.numpy(),
            reference.state_dict()[name].grad.numpy(),
            rtol=1e-9,
            atol=1e-14,
            err_msg=name,
        )


@pytest.mark.parametrize("layout", [HEADS, RING], ids=["heads", "ring"])
def test_fewer_positions_than_members(layout):
    short = replace(LONG, seq_len=5)
    place = mesh({"cp": 4}).autodiff()
    model, reference = Run(short, layout=layout).model(place), alone(short, 0).model
    for length in (5, 3, 1):
        tokens = samples(1, short)[:, :length]
        logits = model.eval()(tpm.tensor(tokens, place))
        assert logits.sharding == Shard(1)
        expected = reference.eval()(tpm.tensor(tokens, tpm.device()))
        np.testing.assert_allclose(
            logits.numpy(), expected.numpy(), rtol=1e-11, atol=1e-13
        )


def attention(place, context, **keywords):
    """A layer, an input whose positions are split, and the result of one rank."""
    layer = nn.CausalSelfAttention(
        12, 6, place, context=context, dtype="float64", **keywords
    )
    reference = nn.CausalSelfAttention(12, 6, tpm.device().autodiff(), dtype="float64")
    fill(layer), fill(reference)
    array = values(2, 8, 12)
    x = tpm.tensor(array, place).require_grad()
    whole = tpm.tensor(array, tpm.device().autodiff()).require_grad()
    return layer, x, reference(whole), whole


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 3}, {"cp": 4}], ids=str)
def test_two_exchanges_each_way(axes):
    place = mesh(axes).autodiff()
    layer, x, expected, whole = attention(place, "heads")
    split = x.with_sharding(cp=Shard(1))
    with tpm.no_implicit_gather(), tpm.ledger() as forward:
        y = layer(split)
    if not place.is_member:
        return
    assert y.sharding == Shard(1)
    np.testing.assert_allclose(y.numpy(), expected.numpy(), rtol=1e-12, atol=1e-13)
    loss = (y * y).sum()
    with tpm.ledger() as backward:
        loss.backward()
    (expected * expected).sum().backward()
    for ledger in (forward, backward):
        assert ledger.count() == ledger.count("all_to_all", "cp") == 2
    np.testing.assert_allclose(
        x.grad.numpy(), whole.grad.numpy(), rtol=1e-11, atol=1e-12
    )
    # q, k and v, and what comes back: each member sends what it does not keep.
    members = place.size
    if 8 % members == 6 % members == 0:
        size = 2 * 8 * 12 * 8 * (members - 1) // members**2
        sent = [record.bytes for record in forward.records]
        assert sent == [3 * size, size]


def test_heads_split_over_tp_are_exchanged_in_their_pieces():
    place = mesh({"tp": 2, "cp": 2}).autodiff()
    layer, x, expected, _ = attention(place, "heads", split="heads")
    with tpm.no_implicit_gather(), tpm.ledger() as ledger:
        y = layer(x.with_sharding(cp=Shard(1)))
    assert y.sharding == (Partial(), Shard(1))
    assert ledger.count() == ledger.count("all_to_all", "cp") == 2
    np.testing.assert_allclose(y.numpy(), expected.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 3}, {"cp": 4}], ids=str)
def test_a_ring_gathers_nothing(axes):
    place = mesh(axes).autodiff()
    layer, x, expected, whole = attention(place, "ring")
    split = x.with_sharding(cp=Shard(1))
    with tpm.no_implicit_gather(), tpm.ledger() as ledger:
        y = layer(split)
        loss = (y * y).sum()
        loss.backward()
    if not place.is_member:
        return
    assert {record.kind for record in ledger.records} <= {"send", "recv"}
    assert y.sharding == Shard(1)
    np.testing.assert_allclose(y.numpy(), expected.numpy(), rtol=1e-12, atol=1e-13)
    (expected * expected).sum().backward()
    np.testing.assert_allclose(
        x.grad.numpy(), whole.grad.numpy(), rtol=1e-11, atol=1e-12
    )


def test_only_attention_communicates_along_the_axis():
    place = mesh({"cp": 4}).autodiff()
    model = Run(layout=HEADS).model(place)
    tokens = tpm.tensor(samples(0)[:, :-1], place)
    with tpm.no_implicit_gather(), tpm.ledger() as ledger:
        losses = tpm.cross_entropy(model(tokens), tokens)
    assert losses.sharding == Shard(1)
    assert ledger.count() == ledger.count("all_to_all") == 2 * CONFIG.n_layer


@pytest.mark.parametrize(
    ("axes", "layout", "error", "words"),
    [
        (
            {"cp": 2, "tp": 2},
            HEADS,
            tpm.UsageError,
            "axis 'cp' stands before 'tp' in the mesh.*after 'tp', or give",
        ),
        (
            {"tp": 2, "cp": 2},
            BOTH,
            tpm.UsageError,
            "sequence splits over 'tp' what 'cp' has.*'cp' must stand before 'tp'",
        ),
        (
            {"tp": 2, "cp": 2},
            HEADS,
            tpm.ShardingError,
            "3 heads cannot be exchanged over 2 members of axis 'cp' where 2",
        ),
        ({"cp": 4}, replace(HEADS, context="x"), tpm.UsageError, "context must be"),
    ],
)
def test_what_cannot_be_is_refused_when_the_model_is_made(axes, layout, error, words):
    config = replace(CONFIG, d_model=12, n_head=3)
    with pytest.raises(error, match=words):
        GPT(config, mesh(axes), layout=layout)
