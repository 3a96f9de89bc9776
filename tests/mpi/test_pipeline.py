"""Layers on several places, trained in microbatches, against one rank."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import samples
from tparmpi.models import GPT, GPTConfig
from tparmpi.parallel import DistributedLayeredModel, LayerPlacement, Pipeline
from tparmpi.sharding import Shard

pytestmark = pytest.mark.mpi(min_size=4)

CONFIG = GPTConfig(
    n_layer=4, d_model=12, n_head=2, seq_len=5, vocab_size=11, d_ff=10, dropout=0.2
)
BATCH = 5
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class MeanLoss:
    """Cross-entropy, with the weight known in advance."""

    def __call__(self, logits, targets):
        return tpm.cross_entropy(logits, targets).sum(), self.weight(targets)

    def weight(self, targets):
        return targets.size


def data():
    tokens = samples(0, CONFIG, BATCH)
    return tokens[:, :-1], tokens[:, 1:]


def on(array, place):
    tensor = tpm.tensor(array, place.inner())
    return tensor.with_sharding(dp=Shard(0)) if "dp" in place.axes else tensor


def trained(placement, schedule, microbatches, loss, **options):
    """Loss and whole gradients by name, after one step."""
    model = GPT(CONFIG, placement, dtype="float64").initialize(seed=3)
    placed = DistributedLayeredModel(model, placement)
    pipeline = Pipeline(placed, schedule, microbatches, **options)
    features, targets = data()
    with tpm.random.scope(seed=1, step=2):
        mean = pipeline.forward_backward(
            on(features, placement.input), on(targets, placement.output), loss
        )
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_shell:
            assert parameter.grad is not None, name
            gradients[name] = parameter.grad.numpy()
    pipeline.close()
    return mean, gradients


_ONE = {}


def one_rank():
    if not _ONE:
        device = tpm.device().autodiff()
        placement = LayerPlacement.even([device], CONFIG.n_layer)
        _ONE["it"] = trained(placement, "1f1b", 1, MeanLoss())
    return _ONE["it"]


def stages_of(pp, dp, tp):
    devices = tpm.devices()[: pp * dp * tp]
    mesh = tpm.mesh(devices, pp=pp, dp=dp, tp=tp)
    return mesh, mesh.split("pp") if mesh.is_member else []


SIZES = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)]
SIZES += [(2, 2, 1), (2, 1, 2)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_are_those_of_one_rank(schedule):
    expected, expected_gradients = one_rank()
    for pp, dp, tp in SIZES:
        mesh, parts = stages_of(pp, dp, tp)
        if not mesh.is_member:
            continue
        places = [part.autodiff() for part in parts]
        chunks = 2 if schedule == "interleaved" and pp < 3 else 1
        placement = LayerPlacement.interleaved(places, CONFIG.n_layer, chunks)
        for microbatches in (1, 2, 3, 5, 8):
            mean, gradients = trained(placement, schedule, microbatches, MeanLoss())
            assert abs(mean - expected) < 1e-10, (pp, dp, tp, microbatches)
            for name, gradient in gradients.items():
                error = np.abs(gradient - expected_gradients[name]).max()
                assert error < 1e-10, (name, pp, dp, tp, microbatches)
