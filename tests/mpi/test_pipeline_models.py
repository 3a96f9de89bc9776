"""Pipelines of an own model with signals of all kinds, against one plain pass."""

from __future__ import annotations

import tracemalloc
import weakref
from itertools import product

import numpy as np
import pytest

import tparmpi as tpm
from tests import layered
from tests.layered import KnownSquares, Squares, batch, build, laid, one_rank, trained
from tparmpi import nn
from tparmpi.comm import together
from tparmpi.optim import AdamW, clip_norm
from tparmpi.parallel import (
    DistributedLayeredModel,
    LayerPlacement,
    LayerSequence,
    Pipeline,
    measure,
    reduce_gradients,
)
from tparmpi.parallel.schedules import SCHEDULES
from tparmpi.parallel.simulation import simulate

pytestmark = pytest.mark.mpi(min_size=4)

N = len(layered.HIDDEN)
ONE_CHUNK = ("gpipe", "1f1b", "zero_bubble")


class Layouts:
    """Placements by name; axes ``dp`` split the batch."""

    def __init__(self) -> None:
        one, two, three, four = (device.autodiff() for device in tpm.devices()[:4])
        plain = tpm.devices()[:4]
        pair = tpm.mesh(plain[:2], dp=2).autodiff()
        later_pair = tpm.mesh(plain[1:3], dp=2).autodiff()
        group = tpm.group(plain[:2]).autodiff()
        wide = tpm.mesh(plain[:2], tp=2).autodiff()
        later_wide = tpm.mesh(plain[1:3], tp=2).autodiff()
        columns = tpm.mesh(plain, pp=2, tp=2).split("pp")
        rows = tpm.mesh(plain, pp=2, dp=2).split("pp")
        self.devices = [one, two, three, four]
        new = LayerPlacement.new
        self.all = {
            "one": new([(one, N)]),
            "two": new([(one, 2), (two, 2)]),
            "four": new([(one, 1), (two, 1), (three, 1), (four, 1)]),
            "three, first and last without hidden": new(
                [(one, 0), (two, 4), (four, 0)]
            ),
            "dp 2, dp 1": new([(pair, 2), (three, 2)]),
            "dp 1, dp 2": new([(one, 1), (later_pair, 3)]),
            "group of 2, 1": new([(group, 2), (three, 2)]),
            "tp 2, tp 1": new([(wide, 2), (three, 2)]),
            "tp 1, tp 2": new([(one, 2), (later_wide, 2)]),
            "pp 2, tp 2": LayerPlacement.even([c.autodiff() for c in columns], N),
            "pp 2, dp 2": LayerPlacement.even([r.autodiff() for r in rows], N),
            "no parameters": new([(one, 1), (two, 2), (three, 1)]),
        }


@pytest.fixture(scope="module")
def layouts() -> Layouts:
    return Layouts()


def is_member(placement: LayerPlacement) -> bool:
    return any(place.is_member for place in placement.places)


def compare(found, expected) -> None:
    """Mean losses and gradients of float64, summed in other orders."""
    assert found[0] == pytest.approx(expected[0], abs=1e-10)
    for name, gradient in found[1].items():
        assert gradient.shape == expected[1][name].shape
        assert np.abs(gradient - expected[1][name]).max() < 1e-10, name


@pytest.mark.parametrize("schedule", ONE_CHUNK)
def test_nests_ties_and_splits_give_the_numbers_of_one_rank(layouts, schedule):
    expected = one_rank()
    for placement, microbatches in product(layouts.all.values(), (1, 2, 3, 8)):
        if is_member(placement):
            model = build(placement)
            found = trained(model, placement, schedule, microbatches)
            compare(found, expected)
            held = [p for p in model.parameters() if not p.is_shell]
            assert len(found[1]) == len(held)


def test_several_chunks_give_the_numbers_of_one_rank(layouts):
    expected = one_rank()
    for schedule, microbatches in product(("interleaved", "gpipe"), range(1, 6)):
        placement = LayerPlacement.interleaved(layouts.devices[:2], N, 2)
        if is_member(placement):
            found = trained(build(placement), placement, schedule, microbatches)
            compare(found, expected)


def test_features_and_targets_may_be_split_in_one_of_them_only(layouts):
    expected = one_rank()
    for name in ("dp 2, dp 1", "dp 1, dp 2", "pp 2, dp 2"):
        placement = layouts.all[name]
        if not is_member(placement):
            continue
        for axis in ("dp", None):
            found = trained(build(placement), placement, "1f1b", 2, axis=axis)
            compare(found, expected)


@pytest.mark.parametrize("loss", [Squares(), KnownSquares()])
def test_gradients_accumulate_over_calls(layouts, loss):
    mean, gradients = one_rank()
    doubled = mean, {name: 2 * gradient for name, gradient in gradients.items()}
    for name in ("two", "pp 2, dp 2", "tp 2, tp 1"):
        placement = layouts.all[name]
        if is_member(placement):
            found = trained(build(placement), placement, "1f1b", 3, loss, times=2)
            compare(found, doubled)


@pytest.mark.parametrize("loss", [Squares(), KnownSquares()])
def test_nothing_is_learnt_from_a_batch_without_weight(layouts, loss):
    none = (0.0,) * layered.BATCH
    placement = layouts.all["two"]
    if is_member(placement):
        mean, found = trained(
            build(placement), placement, "1f1b", 2, loss, weights=none
        )
        assert mean == 0.0
        assert all(not gradient.any() for gradient in found.values())


class Unweighted:
    """Everything weighs 1, so that the weight is a plain number."""

    def __call__(self, predictions, targets):
        error = predictions["y"] - targets["y"]
        return (error * error).sum(), targets["y"].size


def test_weights_may_be_numbers(layouts):
    expected = trained(build(one_device()), one_device(), "1f1b", 1, Unweighted())
    placement = layouts.all["pp 2, dp 2"]
    if is_member(placement):
        found = trained(build(placement), placement, "1f1b", 3, Unweighted())
        compare(found, expected)


def one_device() -> LayerPlacement:
    return LayerPlacement.even([tpm.device().autodiff()], N)


# Frozen layers


@pytest.mark.parametrize("frozen", [(0,), (1, 2, 3), (4,), (0, 1, 2), (5,)])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_frozen_layers_pass_gradients_and_get_none(layouts, frozen, schedule):
    expected = one_rank(frozen=frozen, tied=False)
    for name in ("two", "four", "pp 2, tp 2"):
        placement = layouts.all[name]
        if is_member(placement):
            model = build(placement, frozen, tied=False)
            found = trained(model, placement, schedule, 3)
            compare(found, expected)
            names = [f"layers.{number}." for number in frozen]
            assert not [n for n in found[1] if n.startswith(tuple(names))]


def test_no_gradients_are_sent_to_a_stage_that_needs_none(layouts):
    placement = layouts.all["two"]
    if not is_member(placement):
        return
    sent = []
    for frozen in ((0, 1, 2), ()):
        with tpm.ledger() as ledger:
            trained(build(placement, frozen, tied=False), placement, "1f1b", 2)
        sent.append(ledger.count("send_blocks"))
    by_first, by_second = ((2, 2), (0, 2))
    assert sent == list(by_first if tpm.world().rank == 0 else by_second)


# Equal bit for bit


def test_recomputing_and_splitting_backwards_change_no_bit(layouts):
    for name in ("two", "four", "pp 2, dp 2", "no parameters"):
        placement = layouts.all[name]
        if not is_member(placement):
            continue
        plain = trained(build(placement), placement, "1f1b", 3)
        for schedule, options in (
            ("1f1b", {"recompute": True}),
            ("zero_bubble", {}),
            ("zero_bubble", {"recompute": True}),
        ):
            other = trained(build(placement), placement, schedule, 3, **options)
            assert other[0] == plain[0]
            for key, gradient in plain[1].items():
                assert np.array_equal(other[1][key], gradient), (key, schedule)


class Noisy(nn.Module):
    """Draws from streams without a name, twice."""

    def __init__(self, place):
        self.weight = nn.Parameter((3, 3), place, dtype="float64")

    def forward(self, x):
        return (x @ self.weight).dropout(0.3) + x.dropout(0.3)


class Total:
    def __call__(self, predictions, targets):
        return (predictions * targets).sum(), targets.shape[0]


def noisy(placement, microbatches, recompute=False):
    places = placement.places
    model = LayerSequence(*map(Noisy, places)).initialize(0)
    pipeline = Pipeline(
        DistributedLayeredModel(model, placement),
        "1f1b",
        microbatches,
        recompute=recompute,
    )
    rows = np.cos(np.arange(12.0)).reshape(4, 3)
    with tpm.random.scope(seed=5):
        mean = pipeline.forward_backward(
            tpm.tensor(rows, placement.input.inner()),
            tpm.tensor(rows, placement.output.inner()),
            Total(),
        )
    pipeline.close()
    return mean, layered.gradients_of(model)


def test_streams_without_a_name_are_those_of_the_layer(layouts):
    expected = noisy(LayerPlacement.even([tpm.device().autodiff()], 2), 1)
    for devices, recompute in product((1, 2), (False, True)):
        placement = LayerPlacement.even(layouts.devices[:devices], 2)
        if is_member(placement):
            compare(noisy(placement, 2, recompute), expected)


# Several pipelines, inference


def test_several_pipelines_run_one_model(layouts):
    placement = layouts.all["two"]
    if not is_member(placement):
        return
    expected_mean, expected = one_rank()
    model = build(placement)
    placed = DistributedLayeredModel(model, placement)
    pipelines = [Pipeline(placed, "1f1b", 2), Pipeline(placed, "zero_bubble", 5)]
    features, targets = batch()
    for times, pipeline in enumerate([*pipelines, pipelines[0]], 1):
        with tpm.random.scope(seed=1, step=2):
            mean = pipeline.forward_backward(
                laid(features, placement.input),
                laid(targets, placement.output),
                KnownSquares(),
            )
        assert mean == pytest.approx(expected_mean, abs=1e-10)
        for name, gradient in layered.gradients_of(model).items():
            assert np.abs(gradient - times * expected[name]).max() < 1e-10
    for pipeline in pipelines:
        pipeline.close()


def test_predictions_and_evaluation_are_those_of_one_rank(layouts):
    features, targets = batch()
    device = tpm.device()
    alone = build(one_device()).eval()
    predictions = alone(laid(features, device))
    total, weight = Squares()(predictions, laid(targets, device))
    wanted, mean = predictions["y"].numpy(), (total / weight).item()
    for placement in layouts.all.values():
        if not is_member(placement):
            continue
        model = build(placement).eval()
        placed = DistributedLayeredModel(model, placement)
        found = placed(laid(features, placement.input, "dp"))["y"]
        assert found.shape == wanted.shape
        assert found.is_shell == (not placement.output.is_member)
        assert not found.requires_grad
        if placement.output.is_member:
            assert np.abs(found.numpy() - wanted).max() < 1e-12
        for microbatches in (1, 3, 8):
            pipeline = Pipeline(placed, "1f1b", microbatches)
            evaluated = pipeline.evaluate(
                laid(features, placement.input, "dp"),
                laid(targets, placement.output, "dp"),
                Squares(),
            )
            assert evaluated == pytest.approx(mean, abs=1e-12)
            assert layered.gradients_of(model) == {}
            pipeline.close()


def test_stages_and_layers_can_be_had(layouts):
    placement = layouts.all["no parameters"]
    if not is_member(placement):
        return
    model = build(placement)
    placed = DistributedLayeredModel(model, placement)
    assert placed.into_inner() is model
    stages = placed.into_stages()
    assert [place for place, _ in stages] == placement.devices()
    assert [layer for _, layers in stages for layer in layers] == model.layers
    assert [len(layers) for _, layers in stages] == [2, 2, 2]


# What is held


class Watched(nn.Module):
    """Notes at each forward how many of its earlier arrays are still there."""

    def __init__(self, place):
        self.weight = nn.Parameter((3, 3), place, dtype="float64")
        self.of_activations = Count()
        self.of_weights = Count()

    def forward(self, x):
        inner = (x * 0.1).exp()
        operand = inner + 1.0
        if not inner.is_shell:
            self.of_activations.note(inner.array)
            self.of_weights.note(operand.array)
        return operand @ self.weight


class Count:
    def __init__(self):
        self.references = []
        self.most = 0

    def note(self, array):
        self.references.append(weakref.ref(array))
        alive = sum(reference() is not None for reference in self.references)
        self.most = max(self.most, alive)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_more_is_held_than_the_schedule_says(layouts, schedule):
    for stages, microbatches in ((2, 5), (3, 7), (4, 9), (4, 2)):
        chunks = 2 if schedule == "interleaved" else 1
        devices = layouts.devices[:stages]
        placement = LayerPlacement.interleaved(devices, 2 * stages, chunks)
        if not is_member(placement):
            continue
        model = LayerSequence(*map(Watched, placement.places)).initialize(0)
        pipeline = Pipeline(
            DistributedLayeredModel(model, placement), schedule, microbatches
        )
        x = np.ones((microbatches, 3))
        pipeline.forward_backward(
            tpm.tensor(x, placement.input.inner()),
            tpm.tensor(x, placement.output.inner()),
            Total(),
        )
        stage = tpm.world().rank
        p, m = stages, microbatches
        most = simulate(SCHEDULES[schedule], p, m, chunks).live[stage]
        assert pipeline.most_live == most
        bounds = {
            "gpipe": (m, m),
            "1f1b": (min(m, p - stage),) * 2,
            "interleaved": (most, most),
            "zero_bubble": (min(m, p - stage), min(m, p)),
        }[schedule]
        own = [layer for layer in model.layers if not layer.weight.is_shell]
        for layer in own:
            assert layer.of_activations.most <= bounds[0]
            assert layer.of_weights.most <= bounds[1]
        # Microbatches' worth of this stage's layers.
        worth = p * (1 + (p - 1) / (p * chunks)) if chunks > 1 else bounds[1]
        assert most / chunks <= worth
        pipeline.close()


def test_a_rank_allocates_its_own_layers_only(layouts):
    class Big(nn.Module):
        def __init__(self, place):
            self.weight = nn.Parameter(
                (4096, 4096), place, initializer=without_values, dtype="float64"
            )

        def forward(self, x):
            return x @ self.weight

    def without_values(seed, name, spec):
        return spec.place.backend.empty(spec.local_shape, spec.dtype)

    placement = LayerPlacement.even(layouts.devices, 6)
    share = sum(place.is_member for place in placement.places) * 4096 * 4096 * 8
    tracemalloc.start()
    model = LayerSequence(*map(Big, placement.places)).initialize(0)
    placed = DistributedLayeredModel(model, placement)
    pipeline = Pipeline(placed, "1f1b", 4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(parameter.size * 8 for parameter in model.parameters()) == 2**30
    assert share <= peak < share + 2**20
    pipeline.close()


def test_the_peak_of_1f1b_does_not_grow_with_the_microbatches():
    few, many = (measure.peak_bytes(tpm.world(), "1f1b", m) for m in (8, 32))
    assert many == pytest.approx(few, rel=0.05)
    assert measure.peak_bytes(tpm.world(), "gpipe", 32) > 2 * many


# Ways in which pipelines of others go wrong


class Sized(nn.Module):
    """Signals of one size in bytes, of another form after each layer."""

    def __init__(self, number, place):
        self.weight = nn.Parameter((4,), place, dtype="float64")
        self.folds = number % 2 == 0

    def forward(self, x):
        x = (x.reshape((x.shape[0], 4)) * self.weight).tanh()
        return x.reshape((x.shape[0], 2, 2)) if self.folds else x


def sized(placement, schedule, microbatches):
    layers = [Sized(number, place) for number, place in enumerate(placement.places)]
    model = LayerSequence(*layers).initialize(1)
    pipeline = Pipeline(
        DistributedLayeredModel(model, placement), schedule, microbatches
    )
    x = np.sin(np.arange(24.0)).reshape(6, 4)
    mean = pipeline.forward_backward(
        tpm.tensor(x, placement.input.inner()),
        tpm.tensor(x, placement.output.inner()),
        Total(),
    )
    pipeline.close()
    return mean, layered.gradients_of(model)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_microbatches_neither_hang_nor_cross(layouts, schedule):
    expected = sized(LayerPlacement.even([tpm.device().autodiff()], 8), "1f1b", 1)
    chunks = 2 if schedule == "interleaved" else 1
    for stages, microbatches in product((2, 3, 4), range(1, 8)):
        devices = layouts.devices[:stages]
        placement = LayerPlacement.interleaved(devices, 8, chunks)
        if is_member(placement):
            compare(sized(placement, schedule, microbatches), expected)


def stepped(model, placement):
    """Values after five steps of AdamW with clipping, and the norms."""
    placed = DistributedLayeredModel(model, placement)
    pipeline = Pipeline(placed, "1f1b", 2)
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    norms = []
    features, targets = batch()
    for step in range(5):
        with tpm.random.scope(seed=1, step=step):
            pipeline.forward_backward(
                laid(features, placement.input, "dp"),
                laid(targets, placement.output, "dp"),
                KnownSquares(),
            )
        reduce_gradients(model.parameters())
        norm, scale = clip_norm(model.parameters(), 0.1)
        norms.append(norm)
        optimizer.step(scale=scale)
        model.zero_grad()
    placed.ties.give_values()
    pipeline.close()
    return norms


def test_tied_weights_do_not_drift_apart(layouts):
    alone = build(one_device())
    expected = stepped(alone, one_device())
    assert min(expected) > 0.1
    values = {name: p.numpy() for name, p in alone.named_parameters()}
    for name in ("two", "pp 2, tp 2", "pp 2, dp 2", "tp 2, tp 1", "tp 1, tp 2"):
        placement = layouts.all[name]
        if not is_member(placement):
            continue
        model = build(placement)
        assert stepped(model, placement) == pytest.approx(expected, rel=1e-12)
        for key, parameter in model.named_parameters():
            if not parameter.is_shell:
                assert np.abs(parameter.numpy() - values[key]).max() < 1e-12
        owner, copy = model.layers[0].table.weight, model.layers[-1].table
        assert copy.copy_of is owner
        both = [t.numpy().tobytes() for t in (owner, copy) if not t.is_shell]
        everyone = together(placement.devices())
        assert (
            len({each for own in everyone.all_gather_object(both) for each in own}) == 1
        )
