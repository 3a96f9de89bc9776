"""Fully sharded parameters: stored in pieces, gathered for use, the same numbers."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG, Run, Trained, with_dropout
from tparmpi import nn
from tparmpi.io import checkpoint
from tparmpi.models import GPTLayout
from tparmpi.sharding import Partial, Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

LAYOUTS = (
    {"dp": 1},
    {"dp": 2},
    {"dp": 3},
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"tp": 2, "dp": 2},
    {"tp": 4},
)
SHARDED = GPTLayout(fully_sharded="dp")
BOTH = GPTLayout(fully_sharded="dp", sequence=True)


def mesh(axes: dict[str, int]) -> tpm.Mesh:
    return tpm.mesh(tpm.devices()[: int(np.prod(list(axes.values())))], **axes)


@cache
def alone(steps: int, tied: bool = True) -> Trained:
    """The same training on this rank's device, without any communication."""
    return Run(replace(with_dropout(), tied=tied)).train(tpm.device(), steps)


@pytest.fixture
def folder(tmp_path):
    """One folder that all ranks see."""
    everyone = tpm.world()
    shared = Path(everyone.broadcast_object(str(tmp_path)))
    yield shared / "checkpoints"
    everyone.barrier()


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("layout", [SHARDED, BOTH], ids=["", "sequence"])
def test_losses_and_norms_are_those_of_one_rank(axes, layout):
    place = mesh(axes)
    trained = Run(with_dropout(), layout=layout).train(place, 20)
    if place.is_member:
        expected = alone(20)
        np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-10)
        np.testing.assert_allclose(trained.norms[:1], expected.norms[:1], rtol=1e-12)
        np.testing.assert_allclose(trained.norms, expected.norms, rtol=1e-10)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches_change_nothing(microbatches):
    place = mesh({"dp": 2, "tp": 2})
    run = Run(with_dropout(), microbatches=microbatches, layout=SHARDED)
    np.testing.assert_allclose(
        run.train(place, 10).losses, alone(10).losses, rtol=1e-10
    )


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_values_and_gradients_lie_and_are_as_they_should(axes, tied):
    place = mesh(axes)
    run = Run(replace(with_dropout(), tied=tied), layout=SHARDED)
    reference = run.model(tpm.device())
    run.backward(reference, 0)
    model = run.model(place)
    run.backward(model, 0)
    expected = reference.state_dict()
    assert list(model.state_dict()) == list(expected)
    for name, parameter in model.named_parameters():
        stored = parameter.kind in ("weight", "embedding") and "dp" in place.axes
        assert (parameter.stored_over is not None) == stored
        if not place.is_member:
            continue
        assert parameter.numpy().tobytes() == expected[name].numpy().tobytes()
        assert parameter.grad.layout == parameter.layout
        np.testing.assert_allclose(
            parameter.grad.numpy(),
            expected[name].grad.numpy(),
            rtol=1e-9,
            atol=1e-14,
            err_msg=name,
        )


@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_replicas_stay_the_same_bytes_and_pieces_are_small(axes):
    place = mesh(axes)
    trained = Run(with_dropout(), layout=BOTH).train(place, 5)
    whole = held = 0
    for name, parameter in trained.model.named_parameters():
        blocks = place.all_gather_object(
            (parameter.spec.local_offset, parameter.local.tobytes())
        )
        assert len(set(blocks)) == len({offset for offset, _ in blocks}), name
        if parameter.kind in ("weight", "embedding"):
            whole += parameter.spec.nbytes
            held += parameter.spec.local_nbytes
            assert parameter.grad is None
            state = trained.optimizer.state_dict()[f"{name}/m"]
            assert state.layout == parameter.layout
    assert held < 1.2 * whole / 4


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_two_gathers_and_one_scatter_a_parameter(axes):
    """The embeddings' backward does not need their values: one gather."""
    place = mesh(axes)
    run = Run(replace(CONFIG, tied=False), layout=SHARDED)
    model = run.model(place)
    rows = tpm.from_local(
        np.arange(24).reshape(2, 12),
        model.input.positions.device,
        shape=(2 * place.shape[place.axes.index("dp")], 12),
        dp=Shard(0),
    )
    with tpm.no_implicit_gather(), tpm.ledger() as forward:
        logits = model(rows)
    losses = tpm.cross_entropy(logits, rows).mean()
    with tpm.ledger() as backward:
        losses.backward()
    with tpm.ledger() as reduction:
        tpm.parallel.reduce_gradients(model.parameters())
    if not place.is_member:
        return
    kinds = [parameter.kind for parameter in model.parameters()]
    weights, tables = kinds.count("weight"), kinds.count("embedding")
    assert (weights, tables) == (6 * CONFIG.n_layer + 1, 2)
    assert forward.count(axis="dp") == weights + tables
    assert forward.count("all_gather", "dp") == weights + tables
    assert backward.count("all_gather", "dp") == weights
    assert backward.count("reduce_scatter", "dp") == weights + tables
    assert backward.count(axis="dp") == 2 * weights + tables
    # Biases and norms, in one bucket.
    assert 1 <= reduction.count("all_reduce", "dp") <= 2
    assert reduction.count() == reduction.count("all_reduce", "dp")


def test_the_tape_keeps_no_gathered_weight():
    place = mesh({"dp": 4}).autodiff()
    layer = nn.Linear(8, 12, place, dtype="float64")
    nn.fully_shard(layer, "dp")
    layer.initialize(0)
    assert layer.weight.sharding == Shard(1) and layer.bias.sharding == Replicate()
    x = tpm.tensor(np.ones((4, 8)), place).with_sharding(dp=Shard(0))
    y = layer(x)
    _, weight = y.node.saved
    assert weight.regather.array is layer.weight.array
    y.sum().backward()
    assert layer.weight.grad.sharding == Shard(1)
    assert layer.bias.grad.sharding == Partial()


def test_one_more_gather_serves_all_readers_in_the_backward():
    place = mesh({"dp": 4}).autodiff()
    weight = nn.Parameter((6, 6), place, dtype="float64")
    weight.store_over("dp")
    weight.initialize(0, "w")
    array = np.arange(24.0).reshape(4, 6)
    x = tpm.tensor(array, place).with_sharding(dp=Shard(0))
    gathered = weight.gathered()
    y = ((x @ gathered).gelu() @ gathered) @ gathered
    whole = tpm.tensor(weight.numpy(), tpm.device().autodiff()).require_grad()
    expected = ((tpm.tensor(array, tpm.device()) @ whole).gelu() @ whole) @ whole
    with tpm.ledger() as ledger:
        y.sum().backward()
    assert ledger.count("all_gather", "dp") == 1
    # The three gradients are added before they are scattered.
    assert ledger.count("reduce_scatter", "dp") == 1 and ledger.count() == 2
    expected.sum().backward()
    np.testing.assert_allclose(
        weight.grad.numpy(), whole.grad.numpy(), rtol=1e-12, atol=1e-14
    )


def test_no_member_ever_holds_all_weights_or_gradients():
    place = mesh({"dp": 4}).autodiff()
    model = nn.Module()
    model.layers = [nn.Linear(300, 300, place, dtype="float64") for _ in range(12)]
    nn.fully_shard(model, "dp")
    model.initialize(0)
    one = 300 * 300 * 8
    x = tpm.tensor(np.ones((4, 300)), place).with_sharding(dp=Shard(0))
    peaks = []
    for _ in range(2):
        model.zero_grad()
        y = x
        tracemalloc.start()
        for layer in model.layers:
            y = layer(y)
        y.sum().backward()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # A quarter of the gradients, and of one layer the weight, its gradient, and the
    # copies that a message takes.
    assert min(peaks) < (12 / 4 + 5) * one
    held = sum(layer.weight.grad.local.nbytes for layer in model.layers)
    assert held == 12 * one / 4


def test_storage_is_split_before_there_are_values_and_once():
    place = mesh({"dp": 4})
    layer = nn.Linear(6, 4, place)
    nn.fully_shard(layer, "xx")
    assert layer.weight.sharding == Replicate()
    nn.fully_shard(layer, "dp")
    assert layer.weight.sharding == Shard(0)
    with pytest.raises(tpm.UsageError, match="stored over axis 'dp' already"):
        nn.fully_shard(layer, "dp")
    ready = nn.Linear(6, 4, place).initialize(0)
    with pytest.raises(tpm.UsageError, match=r"'weight' has values already; split"):
        nn.fully_shard(ready, "dp")


def test_a_run_goes_on_on_other_ranks(folder):
    """Saved on dp=4, resumed on layouts of other sizes, sharded or not."""
    first = Run(with_dropout(), layout=SHARDED).train(mesh({"dp": 4}), 3)
    path = checkpoint.step_path(folder, 3)
    checkpoint.save(path, first.model, first.optimizer, step=3)
    expected = alone(6)
    for axes, layout in (
        ({"dp": 2}, SHARDED),
        ({"dp": 3}, SHARDED),
        ({"dp": 2, "tp": 2}, BOTH),
        ({"tp": 3}, GPTLayout()),
        ({"dp": 1}, SHARDED),
    ):
        run = Run(with_dropout(), layout=layout)
        place = mesh(axes)
        resumed = run.start(place)
        report = checkpoint.load(path, resumed.model, resumed.optimizer)
        for step in range(report.step, 6):
            run.advance(resumed, step)
        if place.is_member:
            np.testing.assert_allclose(
                resumed.losses, expected.losses[3:], rtol=1e-10, err_msg=str(axes)
            )
