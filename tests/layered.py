"""A model of the tests' own, in layers, whose signals are nests of all kinds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import tparmpi as tpm
from tparmpi import nn
from tparmpi.nn.splitting import layout_over
from tparmpi.parallel import (
    DistributedLayeredModel,
    LayerPlacement,
    LayerSequence,
    Pipeline,
)
from tparmpi.sharding import Shard
from tparmpi.tensors import Tensor

WIDTH, VOCABULARY, BATCH = 4, 7, 5


@dataclass
class State:
    """What goes from layer to layer.

    It checks its parts when it is made, as a user's own class may.
    """

    pair: tuple[Tensor, Tensor]
    """One tensor twice."""
    fixed: dict[str, Any]
    """A mask, positions, and a hint for some numbers of rows only."""
    scale: float
    nothing: None = None
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.pair[0] is self.pair[1]
        self.rows = self.pair[0].shape[0]


class Enter(nn.Module):
    def __init__(self, place):
        self.up = nn.Linear(3, WIDTH, place, dtype="float64")
        self.table = nn.Embedding(
            VOCABULARY, WIDTH, place, split="vocabulary", dtype="float64"
        )

    def forward(self, features):
        ids = features["ids"]
        x = self.up(features["x"]) + self.table(ids)
        odd = x.shape[0] % 2
        hint = ids.astype("int32" if odd else "int16") if x.shape[0] > 1 else None
        return State((x, x), {"mask": x > 0, "ids": ids, "hint": hint}, 0.5)


class Block(nn.Module):
    def __init__(self, place):
        self.up = nn.Linear(WIDTH, 6, place, split="columns", dtype="float64")
        self.thin = nn.Dropout(0.2)
        self.down = nn.Linear(6, WIDTH, place, split="rows", dtype="float64")

    def forward(self, state):
        first, second = state.pair
        x = self.down(self.thin(self.up(first).gelu())) + second * state.scale
        x = tpm.where(state.fixed["mask"], x, x * 0.5)
        return replace(state, pair=(x, x), scale=state.scale + 0.25)


class Unchanged(nn.Module):
    def forward(self, state):
        return state


class Bent(nn.Module):
    def forward(self, state):
        x = state.pair[1].tanh()
        return replace(state, pair=(x, x))


class Leave(nn.Module):
    def __init__(self, place, table):
        if table is None or table.spec.place is not place.inner():
            table = nn.Parameter(
                (VOCABULARY, WIDTH),
                place,
                layout_over(place, "tp", Shard(0)),
                dtype="float64",
                copy_of=table,
            )
        self.table = table

    def forward(self, state):
        return {"y": tpm.einsum("bd,vd->bv", state.pair[0], self.table)}


HIDDEN = (Block, Unchanged, Bent, Block)


def build(placement: LayerPlacement, frozen=(), tied=True) -> LayerSequence:
    """The model, whose layers of the numbers `frozen` need no gradients."""
    places = [
        place.inner() if number in frozen else place
        for number, place in enumerate(placement.places)
    ]
    enter = Enter(places[0])
    hidden = [
        kind(place) if kind is Block else kind()
        for kind, place in zip(HIDDEN, places[1:-1], strict=True)
    ]
    leave = Leave(places[-1], enter.table.weight if tied else None)
    return LayerSequence(enter, *hidden, leave).initialize(seed=3)


class Squares:
    """Squares weighted by row, whose weight is known in the end only."""

    def __call__(self, predictions, targets):
        error = predictions["y"] - targets["y"]
        losses = (error * error).sum(dim=1) * targets["w"]
        return losses.sum(), targets["w"].sum()


class KnownSquares(Squares):
    """The same, whose weight is known in advance."""

    def weight(self, targets):
        return targets["w"].sum()


def batch(weights=(1.0, 0.0, 2.0, 0.5, 3.0)) -> tuple[dict, dict]:
    rows = np.arange(BATCH)
    x = np.cos(np.arange(3.0 * BATCH)).reshape(BATCH, 3)
    y = np.sin(np.arange(1.0 * BATCH * VOCABULARY)).reshape(BATCH, VOCABULARY)
    return {"x": x, "ids": rows * 3 % VOCABULARY}, {"y": y, "w": np.array(weights)}


def laid(nest: dict, place: Any, axis: str | None = None) -> dict:
    """Arrays as tensors on a place, split by rows along `axis` where it has that."""
    tensors = {name: tpm.tensor(array, place.inner()) for name, array in nest.items()}
    if axis not in place.axes:
        return tensors
    by_axis = {axis: Shard(0)}
    return {
        name: tensor.with_sharding(**by_axis, allow_empty=True)
        for name, tensor in tensors.items()
    }


def trained(
    model: LayerSequence,
    placement: LayerPlacement,
    schedule: str,
    microbatches: int,
    loss: Any = None,
    *,
    axis: str | None = "dp",
    weights: tuple[float, ...] | None = None,
    times: int = 1,
    **options: Any,
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss and whole gradients by name, after some calls."""
    features, targets = batch() if weights is None else batch(weights)
    placed = DistributedLayeredModel(model, placement)
    pipeline = Pipeline(placed, schedule, microbatches, **options)
    for _ in range(times):
        with tpm.random.scope(seed=1, step=2):
            mean = pipeline.forward_backward(
                laid(features, placement.input, axis),
                laid(targets, placement.output, axis),
                loss or KnownSquares(),
            )
    pipeline.close()
    return mean, gradients_of(model)


def gradients_of(model: LayerSequence) -> dict[str, np.ndarray]:
    """Whole gradients of what this rank has a part of, by name."""
    return {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if not parameter.is_shell and parameter.grad is not None
    }


def one_rank(
    weights: tuple[float, ...] | None = None, frozen: tuple[int, ...] = (), tied=True
) -> tuple[float, dict[str, np.ndarray]]:
    """The same by one plain pass on one device."""
    device = tpm.device().autodiff()
    placement = LayerPlacement.even([device], len(HIDDEN))
    model = build(placement, frozen, tied)
    features, targets = batch() if weights is None else batch(weights)
    with tpm.random.scope(seed=1, step=2):
        predictions = model(laid(features, device))
    total, weight = Squares()(predictions, laid(targets, device))
    weight = weight.item()
    if not weight:
        return 0.0, {}
    mean = total / weight
    mean.backward()
    return mean.item(), gradients_of(model)
