"""What pipelines refuse: one sentence, the same on all ranks, nothing done."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tests import layered
from tests.layered import KnownSquares, Squares, batch, build, laid
from tparmpi import nn
from tparmpi.parallel import (
    DistributedLayeredModel,
    LayerPlacement,
    LayerSequence,
    Pipeline,
)

pytestmark = pytest.mark.mpi(min_size=4)

N = len(layered.HIDDEN)


@pytest.fixture(scope="module")
def devices() -> list:
    return [device.autodiff() for device in tpm.devices()[:4]]


class Plain(nn.Module):
    def __init__(self, place):
        self.weight = nn.Parameter((3, 3), place, dtype="float64")

    def forward(self, x):
        return x @ self.weight


def placed(placement, *layers) -> DistributedLayeredModel:
    made = layers or map(Plain, placement.places)
    return DistributedLayeredModel(LayerSequence(*made).initialize(0), placement)


def test_models_that_do_not_fit_their_placement(devices):
    a, b, _, _ = devices
    placement = LayerPlacement.even([a, b], 3)
    layers = [Plain(place) for place in placement.places]
    words = "the model has 2 hidden layers, the placement gives 3 places"
    with pytest.raises(tpm.UsageError, match=words):
        placed(placement, *layers[1:])
    words = "hidden layer 2 must be built on .* rank 1.* it is on .* rank 0"
    with pytest.raises(tpm.UsageError, match=words):
        placed(placement, *layers[:3], Plain(a), layers[4])
    with pytest.raises(tpm.UsageError, match="the input layer must be built on"):
        placed(placement, Plain(b), *layers[1:])
    with pytest.raises(tpm.UsageError, match="the output layer must be built on"):
        placed(placement, *layers[:4], Plain(a))
    with pytest.raises(tpm.UsageError, match="an input layer and an output layer"):
        LayerSequence(layers[0])


class Elsewhere:
    """A layer that is no module, and says where it lives."""

    def __init__(self, place):
        self.input = self.output = place

    def forward(self, x):
        return x * 2.0


def test_layers_need_not_be_modules(devices):
    a, b, _, _ = devices
    placement = LayerPlacement.even([a, b], 2)
    with pytest.raises(tpm.UsageError, match="hidden layer 1 must be built on"):
        placed(placement, Plain(a), Elsewhere(a), Elsewhere(a), Plain(b))
    if tpm.world().rank > 1:
        return
    model = placed(placement, Plain(a), Elsewhere(a), Elsewhere(b), Plain(b))
    pipeline = Pipeline(model, "1f1b", 2)
    x, y = (tpm.tensor(np.ones((3, 3)), place.inner()) for place in (a, b))

    class Known:
        def __call__(self, predictions, targets):
            return predictions.sum(), self.weight(targets)

        def weight(self, targets):
            return targets.size

    assert pipeline.forward_backward(x, y, Known()) != 0
    with pytest.raises(tpm.UsageError, match=r"weight\(targets\) needs layers"):
        pipeline.forward_backward(x, y, Known().__call__)
    pipeline.close()


def test_ranks_must_give_the_same_placement(devices):
    a, b, c, d = devices
    mine = [a, b, c, d] if tpm.world().rank else [b, a, c, d]
    placement = LayerPlacement.even(mine, 4)
    with pytest.raises(tpm.CommunicationError, match="places the layers otherwise"):
        placed(placement)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (
            lambda d, g: LayerPlacement.even(d, 4),
            {"microbatches": 0},
            "microbatches must be at least 1, it is 0",
        ),
        (
            lambda d, g: LayerPlacement.even(d, 4),
            {"schedule": "pipe"},
            "there is no schedule 'pipe'; the schedules are gpipe, 1f1b",
        ),
        (
            lambda d, g: LayerPlacement.interleaved(d, 8, 2),
            {"schedule": "1f1b"},
            "'1f1b' has one chunk of layers a stage, not 2; use 'interleaved'",
        ),
        (
            lambda d, g: LayerPlacement.interleaved(d, 8, 2),
            {"schedule": "zero_bubble"},
            "'zero_bubble' has one chunk",
        ),
        (
            lambda d, g: LayerPlacement.new([(g, 2), (d[1], 2), (d[2], 1), (d[3], 1)]),
            {},
            "must have no ranks in common",
        ),
        (
            lambda d, g: LayerPlacement(d[0], [d[1], d[2], d[3]], d[0]),
            {},
            "must take turns",
        ),
        (
            lambda d, g: LayerPlacement.new(
                [(d[0], 1), (d[1].inner(), 1), (d[2], 1), (d[3], 1)]
            ),
            {},
            r"no gradient passes .* rank 1.* autodiff\(\)",
        ),
    ],
)
def test_pipelines_that_cannot_be(devices, make, options, words):
    pair = tpm.group(tpm.devices()[:2])
    model = placed(make(devices, pair.autodiff()))
    with pytest.raises(tpm.UsageError, match=words):
        Pipeline(model, **options)
    pair.close()


def test_batches_that_do_not_fit(devices):
    mesh = tpm.mesh(pp=2, dp=2)
    parts = [part.autodiff() for part in mesh.split("pp")]
    placement = LayerPlacement.even(parts, N)
    model = build(placement)
    pipeline = Pipeline(DistributedLayeredModel(model, placement), "1f1b", 2)
    whole, targets = batch()
    features = laid(whole, placement.input, "dp")
    few = {"y": targets["y"][:4], "w": targets["w"][:4]}
    output = placement.output
    with pytest.raises(tpm.ShapeError, match="features have 5 rows, the targets 4"):
        pipeline.forward_backward(features, laid(few, output), KnownSquares())
    mixed = laid({"y": targets["y"], "w": few["w"]}, output)
    with pytest.raises(tpm.ShapeError, match="targets have tensors of 4 and 5 rows"):
        pipeline.forward_backward(features, mixed, KnownSquares())
    with pytest.raises(tpm.UsageError, match="targets have no tensor whose dim 0"):
        pipeline.forward_backward(features, {"y": None}, KnownSquares())
    other = tpm.mesh(a=4)
    split = laid(targets, other, "a")
    with pytest.raises(tpm.ShapeError, match=r"split in \(2,\) and in \(4,\)"):
        pipeline.forward_backward(features, split, KnownSquares())
    assert layered.gradients_of(model) == {}
    # It goes on as if nothing had been.
    mean = pipeline.forward_backward(features, laid(targets, output, "dp"), Squares())
    assert mean > 0
    pipeline.close()
