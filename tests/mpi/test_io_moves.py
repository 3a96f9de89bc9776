"""A training that moves between layouts is the one that never moved."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG as SAMPLE
from tests.gpt_samples import samples
from tparmpi.io import checkpoint
from tparmpi.models import GPT, GPTLayout
from tparmpi.models.gpt_layout import TENSOR_PARALLEL
from tparmpi.optim import AdamW, clip_norm
from tparmpi.parallel import (
    DistributedLayeredModel,
    LayerPlacement,
    Pipeline,
    reduce_gradients,
)
from tparmpi.sharding import Shard
from tparmpi.train.model import TokenLoss

pytestmark = pytest.mark.mpi(min_size=4)

# Three layers for three stages; rows, heads and widths that do not divide.
CONFIG = replace(SAMPLE, n_layer=3, dropout=0.2)
BATCH = 5
FROZEN = "input.positions"
SHARDED = GPTLayout(fully_sharded="dp")


class Training:
    """A GPT on some layout, with an optimizer that leaves one parameter alone."""

    def __init__(self, places, layout=TENSOR_PARALLEL, seed=3):
        places = [place.autodiff() for place in places]
        self.placement = LayerPlacement.even(places, CONFIG.n_layer)
        self.model = GPT(CONFIG, self.placement, layout=layout, dtype="float64")
        self.model.initialize(seed)
        named = self.model.named_parameters()
        self.trained = {name: p for name, p in named if name != FROZEN}
        self.optimizer = AdamW(self.trained.items(), lr=1e-3)

    @property
    def is_member(self):
        return any(place.is_member for place in self.placement.places)

    def advance(self, steps):
        if not self.is_member:
            return
        placed = DistributedLayeredModel(self.model, self.placement)
        pipeline = Pipeline(placed, "1f1b", 2)
        for step in steps:
            data = samples(step, CONFIG, BATCH)
            tokens = on(data[:, :-1], self.placement.input)
            targets = on(data[:, 1:], self.placement.output)
            with tpm.random.scope(7, step):
                pipeline.forward_backward(tokens, targets, TokenLoss())
            parameters = list(self.trained.values())
            reduce_gradients(parameters)
            _, scale = clip_norm(parameters, 0.5)
            self.optimizer.step(scale=scale)
            self.model.zero_grad()
        pipeline.close()

    def tensors(self):
        """Every tensor by its path in a checkpoint."""
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {
            f"{part}/{name.replace('.', '/')}": tensor
            for part, of in parts.items()
            for name, tensor in of.state_dict().items()
        }


def on(array, place):
    tensor = tpm.tensor(array, place.inner())
    return tensor.with_sharding(dp=Shard(0)) if "dp" in place.axes else tensor


def mesh(ranks, **axes):
    return tpm.mesh(tpm.devices()[:ranks], **axes)


LAYOUTS = {
    "1": lambda: Training(tpm.devices()[:1]),
    "tp 3": lambda: Training([mesh(3, tp=3)]),
    "tp 4": lambda: Training([mesh(4, tp=4)]),
    "dp 3": lambda: Training([mesh(3, dp=3)]),
    "dp 4": lambda: Training([mesh(4, dp=4)]),
    "dp 2 x tp 2": lambda: Training([mesh(4, dp=2, tp=2)]),
    "dp 3, sharded": lambda: Training([mesh(3, dp=3)], SHARDED),
    "dp 2 x tp 2, sharded": lambda: Training([mesh(4, dp=2, tp=2)], SHARDED),
    "pp 3": lambda: Training(tpm.devices()[:3]),
    "pp 2 x tp 2": lambda: Training(mesh(4, pp=2, tp=2).split("pp")),
    "pp 2 x dp 2, sharded": lambda: Training(mesh(4, pp=2, dp=2).split("pp"), SHARDED),
}


MOVES = {
    "tp 4": ["tp 3", "1", "dp 2 x tp 2, sharded"],
    "tp 3": ["tp 4", "dp 4"],
    "1": ["dp 2 x tp 2", "pp 2 x dp 2, sharded"],
    "dp 3, sharded": ["1", "pp 2 x tp 2"],
    "pp 3": ["tp 3", "dp 3"],
    "pp 2 x tp 2": ["dp 3, sharded", "pp 3"],
}


@cache
def alone(steps):
    """Every tensor whole, after steps on this rank alone."""
    training = Training([tpm.device()])
    training.advance(range(steps))
    return {name: np.array(t.local) for name, t in training.tensors().items()}


def own_part(tensor, whole):
    return whole[tensor.spec.local_slices]


@pytest.fixture
def folder(shared_path: Path):
    yield shared_path
    tpm.world().barrier()


@pytest.mark.parametrize("source", MOVES)
def test_three_steps_here_and_one_there_are_four(folder, source):
    first = LAYOUTS[source]()
    first.advance(range(3))
    path = checkpoint.step_path(folder, 3)
    checkpoint.save(
        path, first.model, first.optimizer, step=3, position=3 * BATCH, seed=7
    )
    with h5py.File(path / "index.h5", "r") as file:
        stored = {name: file[name][...] for name in first.tensors()}
    assert f"model/{FROZEN.replace('.', '/')}" in stored
    assert f"optimizer/{FROZEN.replace('.', '/')}/m" not in stored
    for name, tensor in first.tensors().items():
        if not tensor.is_shell:
            found = np.asarray(tensor.local)
            assert found.tobytes() == own_part(tensor, stored[name]).tobytes()
    expected = alone(4)
    assert expected.keys() == stored.keys()
    for target in MOVES[source]:
        second = LAYOUTS[target]()
        report = checkpoint.load(path, second.model, second.optimizer)
        assert (report.step, report.position) == (3, 3 * BATCH)
        assert second.optimizer.steps == 3
        for name, tensor in second.tensors().items():
            if not tensor.is_shell:
                found = np.asarray(tensor.local)
                assert found.tobytes() == own_part(tensor, stored[name]).tobytes()
        second.advance(range(report.step, 4))
        for name, tensor in second.tensors().items():
            if not tensor.is_shell:
                np.testing.assert_allclose(
                    tensor.local,
                    own_part(tensor, expected[name]),
                    rtol=1e-12,
                    atol=1e-12,
                    err_msg=f"{name} on {target}",
                )


def test_saved_again_from_another_layout_it_is_the_same_checkpoint(folder):
    """4 to 3 to 1 to 4 ranks, tp to pp to dp."""
    names = ("tp 4", "tp 3", "1", "dp 2 x tp 2, sharded", "pp 3", "tp 4")
    steps = [checkpoint.step_path(folder, number) for number in range(len(names))]
    first = LAYOUTS[names[0]]()
    first.advance(range(2))
    checkpoint.save(steps[0], first.model, first.optimizer, step=2)
    for number, name in enumerate(names[1:], 1):
        training = LAYOUTS[name]()
        checkpoint.load(steps[number - 1], training.model, training.optimizer)
        checkpoint.save(steps[number], training.model, training.optimizer, step=2)
    if tpm.world().rank == 0:
        assert not checkpoint.diff(steps[0], steps[-1])
        assert checkpoint.verify(steps[-1]) == []
