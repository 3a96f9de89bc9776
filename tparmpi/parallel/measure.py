"""Measures pipelines: the time of a step, the rate of signals, and what is held."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tparmpi.comm import Group, Place
from tparmpi.comm.measure import in_turns
from tparmpi.nn import Linear, Module, Parameter
from tparmpi.parallel.layers import LayerSequence
from tparmpi.parallel.model import DistributedLayeredModel
from tparmpi.parallel.pipeline import Pipeline
from tparmpi.parallel.placement import LayerPlacement
from tparmpi.parallel.schedules import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from tparmpi.parallel.signals import Edge
from tparmpi.tensors import Operator, Plan, Tensor, tensor

SECONDS: Mapping[str, float] = {
    FORWARD: 0.02,
    INPUT_GRADIENT: 0.02,
    WEIGHT_GRADIENT: 0.02,
}
"""What a stage takes for a microbatch: a backward is both gradients."""


SIGNALS = 32
"""So many are sent one after the other where their rate is measured.

Enough for the memory that they are received into to be warm, as that of MPI's own is.
"""


def theory(
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    seconds: Mapping[str, float] = SECONDS,
) -> float:
    """Return the seconds of a step where messages take no time.

    The work of a stage, and the bubble: (p - 1)(F + B) / v, or (p - 1)(F + B - W) for
    ``"zero_bubble"``, where B is the time of an input gradient alone. Chunks need p to
    divide m.
    """
    whole = sum(seconds.values())
    bubble = whole / chunks
    if schedule == "zero_bubble":
        bubble = whole - 2 * seconds[WEIGHT_GRADIENT]
    return microbatches * whole + (stages - 1) * bubble


def step_seconds(
    places: Group,
    schedule: str,
    microbatches: int,
    chunks: int = 1,
    *,
    steps: int = 3,
    seconds: Mapping[str, float] = SECONDS,
    spend: Callable[[float], None] = time.sleep,
) -> float:
    """Return the seconds of the fastest step of layers that sleep.

    Collective over `places`, whose members are the stages.

    Parameters
    ----------
    spend
        What layers do for their time, instead of sleeping.
    """
    stages = [device.autodiff() for device in places.devices]
    placement = LayerPlacement.interleaved(stages, len(stages) * chunks, chunks)
    each = {kind: time / chunks for kind, time in seconds.items()}
    model = LayerSequence(
        _Shift(placement.input),
        *(_Spend(place, each, spend) for place in placement.hidden),
        _Shift(placement.output),
    ).initialize(0)
    pipeline = Pipeline(
        DistributedLayeredModel(model, placement), schedule, microbatches
    )
    rows = np.ones((microbatches, 1), np.float32)
    x, y = (
        tensor(rows, place.inner()) for place in (placement.input, placement.output)
    )
    fastest = float("inf")
    for _ in range(steps):
        places.barrier()
        start = time.perf_counter()
        pipeline.forward_backward(x, y, _total)
        took = np.array(time.perf_counter() - start)
        fastest = min(fastest, float(places.all_reduce(took, "max")))
    pipeline.close()
    return fastest


def signal_rate(places: Group, nbytes: int, seconds: float) -> dict[str, float]:
    """Return how fast signals go to the next stage, one after the other.

    In turns with MPI's own blocking sends of the very same array, received into one of
    two that are there already, since signals too are received while the one before is
    still held. Collective over `places`, which are two.

    Returns
    -------
    dict
        ``bytes``; ``gbytes_per_s`` and ``raw_gbytes_per_s`` in 10**9 bytes a second;
        ``ratio`` of the two.
    """
    here, there = places.devices
    edge = Edge(here, there, "stage 1")
    values = np.arange(nbytes // 4, dtype=np.float32)
    signal = tensor(values, places.devices[places.rank])
    sent = signal.local
    received = [np.empty_like(values) for _ in range(2)]
    comm = places.comm

    def ours() -> None:
        if places.rank == 0:
            for number in range(SIGNALS):
                edge.send(signal, number)
            edge.finish()
            return
        edge.expect()
        for number in range(SIGNALS):
            if number + 1 < SIGNALS:
                edge.expect()
            edge.receive(number)

    def raw() -> None:
        for number in range(SIGNALS):
            if places.rank == 0:
                comm.Send(sent, 1)
            else:
                comm.Recv(received[number % 2], 0)

    found = in_turns(comm, {"ours": ours, "raw": raw}, seconds)
    edge.close()
    us, raw_us = found["ours"][0], found["raw"][0]
    return {
        "bytes": nbytes,
        "gbytes_per_s": SIGNALS * nbytes / us / 1e3,
        "raw_gbytes_per_s": SIGNALS * nbytes / raw_us / 1e3,
        "ratio": raw_us / us,
    }


def peak_bytes(
    places: Group, schedule: str, microbatches: int, width: int = 256, rows: int = 64
) -> int:
    """Return the most bytes that the first stage allocates during a step.

    Of layers that have a square weight of `width`, each microbatch of so many `rows`.
    Collective over `places`, whose members are the stages.
    """
    stages = [device.autodiff() for device in places.devices]
    placement = LayerPlacement.even(stages, 2 * len(stages))
    model = LayerSequence(
        *(Linear(width, width, place, dtype="float32") for place in placement.places)
    ).initialize(0)
    pipeline = Pipeline(
        DistributedLayeredModel(model, placement), schedule, microbatches
    )
    values = np.ones((microbatches * rows, width), np.float32)
    x, y = (
        tensor(values, place.inner()) for place in (placement.input, placement.output)
    )
    pipeline.forward_backward(x, y, _total)
    model.zero_grad()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    pipeline.forward_backward(x, y, _total)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    pipeline.close()
    own = np.array(peak - before if places.rank == 0 else 0)
    return int(places.all_reduce(own, "max"))


class _Shift(Module):
    """Adds a parameter, so that the layers after it owe their input's gradient."""

    def __init__(self, place: Place) -> None:
        self.weight = Parameter((1,), place, dtype="float32")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class _Spend(Module):
    """Takes its time for its forward and for each of its gradients."""

    def __init__(
        self,
        place: Place,
        seconds: Mapping[str, float],
        spend: Callable[[float], None],
    ) -> None:
        self.weight = Parameter((1,), place, dtype="float32")
        self.operator = Operator("spend", "bd,d->bd", self._forward)
        self.operator.define_backward(self._backward)
        self._seconds = seconds
        self._spend = spend

    def forward(self, x: Tensor) -> Any:
        return self.operator(x, self.weight)

    def _forward(self, plan: Plan, x: Any, weight: Any) -> Any:
        self._spend(self._seconds[FORWARD])
        return x + weight, None

    def _backward(
        self, plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]
    ) -> Any:
        of_input, of_weight = wanted
        self._spend(
            of_input * self._seconds[INPUT_GRADIENT]
            + of_weight * self._seconds[WEIGHT_GRADIENT]
        )
        return (grad if of_input else None, grad.sum(0) if of_weight else None)


class _Total:
    """The sum of all predictions, each of which weighs 1."""

    def __call__(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        total: Tensor = predictions.sum()
        return total, self.weight(targets)

    def weight(self, targets: Tensor) -> int:
        return targets.size


_total = _Total()
