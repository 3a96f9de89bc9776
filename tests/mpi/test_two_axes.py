"""Layers of which two axes split both dims of each weight, against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG, Run, with_dropout
from tests.mpi.test_nn import fill, values
from tparmpi import nn
from tparmpi.models import GPTLayout
from tparmpi.sharding import Partial, Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

TWO = GPTLayout(other_axis="tq")
AXES = ({"tp": 2, "tq": 2}, {"tq": 2, "tp": 2}, {"tp": 1, "tq": 3}, {"tp": 3, "tq": 1})


def mesh(axes: dict[str, int]) -> tpm.Mesh:
    return tpm.mesh(tpm.devices()[: int(np.prod(list(axes.values())))], **axes)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("split", ["columns", "rows"])
def test_linear(axes, split):
    """Uneven dims; forward and backward without communication but the pending sums."""
    place = mesh(axes).autodiff()
    layer = nn.Linear(5, 7, place, split=split, other_axis="tq", dtype="float64")
    made = fill(layer)
    if not place.is_member:
        return
    inputs, outputs = ("tq", "tp") if split == "columns" else ("tp", "tq")
    layout = dict(zip(place.axes, layer.weight.sharding, strict=True))
    assert layout == {inputs: Shard(0), outputs: Shard(1)}
    array = values(2, 3, 5)
    x = tpm.tensor(array, place).require_grad()
    with tpm.no_implicit_gather(), tpm.ledger() as forward:
        y = layer(x.with_sharding(**{inputs: Shard(2)}))
    assert forward.count() == 0
    layout = dict(zip(place.axes, y.sharding, strict=True))
    assert layout == {inputs: Partial(), outputs: Shard(2)}
    expected = array @ made["weight"] + made["bias"]
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-13, atol=1e-14)
    done = y.with_sharding(**{inputs: Replicate()})
    loss = (done * done).sum()
    with tpm.ledger() as backward:
        loss.backward()
    assert backward.count() == 0
    layout = dict(zip(place.axes, x.grad.sharding, strict=True))
    assert layout == {inputs: Shard(2), outputs: Partial()}
    assert layer.weight.grad.layout == layer.weight.layout
    grad = 2 * expected
    for tensor, wanted in (
        (x, grad @ made["weight"].T),
        (layer.weight, np.einsum("bti,bto->io", array, grad)),
        (layer.bias, grad.sum((0, 1))),
    ):
        np.testing.assert_allclose(tensor.grad.numpy(), wanted, rtol=1e-12, atol=1e-13)


def test_one_all_reduce_along_each_axis_and_direction():
    place = mesh({"tp": 2, "tq": 2}).autodiff()
    mlp = nn.MLP(10, 14, place, split="hidden", other_axis="tq", dtype="float64")
    made = fill(mlp)
    array = values(2, 3, 10)
    x = tpm.tensor(array, place).require_grad()
    with tpm.no_implicit_gather(), tpm.ledger() as forward:
        y = mlp(x).with_sharding(tp=Replicate())
    assert y.sharding == (Replicate(), Shard(2))
    counts = [forward.count("all_reduce", axis) for axis in ("tp", "tq")]
    assert counts == [1, 1] and forward.count() == 2
    # Half the width, and half the inner features.
    assert forward.bytes(axis="tp") == 2 * 3 * 5 * 8
    assert forward.bytes(axis="tq") == 2 * 3 * 7 * 8
    loss = (y * y).sum()
    with tpm.ledger() as backward:
        loss.backward()
    assert backward.count() == backward.count("all_reduce", "tq") == 1
    with tpm.ledger() as reading:
        grad = x.grad.numpy()
    assert reading.count("all_reduce", "tp") == reading.count("all_gather", "tq") == 1
    alone = tpm.device().autodiff()
    reference = nn.MLP(10, 14, alone, dtype="float64")
    assert fill(reference).keys() == made.keys()
    whole = tpm.tensor(array, alone).require_grad()
    expected = reference(whole)
    (expected * expected).sum().backward()
    np.testing.assert_allclose(y.numpy(), expected.numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(grad, whole.grad.numpy(), rtol=1e-11, atol=1e-12)
    for name, parameter in mlp.named_parameters():
        np.testing.assert_allclose(
            parameter.grad.numpy(),
            reference.state_dict()[name].grad.numpy(),
            rtol=1e-11,
            atol=1e-12,
            err_msg=name,
        )


@pytest.mark.parametrize("axes", [*AXES, {"dp": 2, "tq": 2}], ids=str)
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_losses_of_a_gpt_are_those_of_one_rank(axes, sequence):
    place = mesh(axes)
    config = replace(with_dropout(), n_layer=1)
    trained = Run(config, layout=replace(TWO, sequence=sequence)).train(place, 10)
    if place.is_member:
        expected = Run(config).train(tpm.device(), 10)
        np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)
        np.testing.assert_allclose(trained.norms[:1], expected.norms[:1], rtol=1e-12)


def test_every_gradient_of_a_gpt_is_that_of_one_rank():
    place = mesh({"tp": 2, "tq": 2})
    run = Run(CONFIG, layout=TWO)
    reference, model = run.model(tpm.device()), run.model(place)
    run.backward(reference, 0)
    run.backward(model, 0)
    assert model.blocks[0].attn.q.weight.sharding == (Shard(1), Shard(0))
    assert model.blocks[0].attn.out.weight.sharding == (Shard(0), Shard(2))
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(
            parameter.grad.numpy(),
            reference.state_dict()[name].grad.numpy(),
            rtol=1e-9,
            atol=1e-14,
            err_msg=name,
        )


def test_one_axis_cannot_be_both():
    with pytest.raises(tpm.UsageError, match="'tp' is given as both axes"):
        nn.Linear(4, 4, mesh({"tp": 4}), split="rows", axis="tp", other_axis="tp")
    layer = nn.Linear(4, 4, tpm.group(tpm.devices()), split="rows", other_axis="tq")
    assert layer.weight.sharding == Shard(0)
