"""Measures steps of training, or forwards alone, of GPTs of fixed sizes."""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

import tparmpi as tpm
from tparmpi import comm
from tparmpi.comm import Place
from tparmpi.models import GPT, GPTConfig, GPTLayout
from tparmpi.models.gpt_cost import GPTPart
from tparmpi.optim import AdamW
from tparmpi.parallel import (
    DistributedLayeredModel,
    LayerParallelism,
    LayerPlacement,
    Pipeline,
    reduce_gradients,
)
from tparmpi.parallel.schedules import schedule_of
from tparmpi.parallel.simulation import simulate
from tparmpi.sharding.chunks import chunk
from tparmpi.train import costs, gemm
from tparmpi.train.layout import Layout
from tparmpi.train.model import TokenLoss

WARM_STEPS = 2
DTYPE = "float32"
LR, BETAS, WEIGHT_DECAY = 3e-4, (0.9, 0.999), 0.01


@dataclass(frozen=True)
class Size:
    """A model and the batch that it is measured with."""

    model: GPTConfig
    batch: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(GPTConfig(3, 48, 4, 32, 256, tied=False), batch=8),
    "small": Size(GPTConfig(6, 384, 6, 256, 4096, tied=False), batch=8),
    "medium": Size(GPTConfig(4, 1024, 16, 512, 16384, tied=False), batch=4),
}
"""GPT-2's shape, with an output weight of its own; tiny ones to see that all works."""


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes
    ----------
    model
        Sizes of the model.
    batch
        Rows of a step, over all ranks.
    layout
        Sizes of the mesh's axes.
    microbatches, schedule
        See `tparmpi.parallel.Pipeline`.
    sequence
        See `GPTLayout.sequence`.
    """

    model: GPTConfig
    batch: int
    layout: Layout
    microbatches: int = 1
    schedule: str = "1f1b"
    sequence: bool = False


class Steps:
    """Steps of training on one batch. Making one is collective over all ranks.

    Parameters
    ----------
    job
        What is trained.
    layer_costs
        Of the input layer, a hidden one, and the output layer, which decide what each
        stage has; measured if None and there are stages.
    """

    def __init__(
        self, job: Job, layer_costs: tuple[float, float, float] | None = None
    ) -> None:
        self.job = job
        self.world = comm.world()
        layout = job.layout
        mesh = tpm.mesh(pp=layout.pp, dp=layout.dp, tp=layout.tp).autodiff()
        stages = mesh.split("pp")
        mine = next(place for place in stages if place.is_member)
        samples = _samples(job)
        self.costs: tuple[float, ...] = layer_costs or ()
        if layout.pp > 1 and not self.costs:
            self.costs = costs.layers(job.model, mine, _microbatch(job, samples), DTYPE)
        self.placement = _placement(stages, self.costs, job.model.n_layer)
        model = _model(job, self.placement)
        placed = DistributedLayeredModel(cast(LayerParallelism, model), self.placement)
        self.model, self.placed = model, placed
        self.pipeline = Pipeline(placed, job.schedule, job.microbatches)
        self.parameters = list(model.parameters())
        self.optimizer = AdamW(
            model.named_parameters(), LR, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        self.tokens = _on(samples[:, :-1], self.placement.input)
        self.targets = _on(samples[:, 1:], self.placement.output)
        self.loss = float("nan")
        self.pipeline_seconds = 0.0

    def step(self) -> None:
        """Do one step. Collective over all ranks."""
        began = time.perf_counter()
        with tpm.random.scope(0, self.optimizer.steps):
            self.loss = self.pipeline.forward_backward(
                self.tokens, self.targets, TokenLoss()
            )
        self.pipeline_seconds = time.perf_counter() - began
        reduce_gradients(self.parameters)
        self.optimizer.step()
        self.model.zero_grad()

    def part(self) -> GPTPart:
        """What this rank has of the model. Local."""
        return _part(self.job, self.placement)

    def formula_bytes(self) -> int:
        """Return the bytes that this rank cannot do without. Local.

        Its parameters, their gradients and two moments, and what the forward of as
        many microbatches as are live at once keeps; see `GPTPart.activation_bytes`.
        """
        own = sum(
            parameter.spec.local_nbytes
            for parameter in self.parameters
            if not parameter.is_shell
        )
        live = max(1, self.pipeline.most_live)
        return 4 * own + live * self.part().activation_bytes(_rows(self.job))

    def expected_seconds(self) -> float:
        """Return what `forward_backward` takes if no message takes any time.

        The schedule, simulated with the times of the stages, measured alone. Collective
        over all ranks.
        """
        samples = _microbatch(self.job, _samples(self.job))
        times = costs.stage(self.job.model, self.placed, samples, DTYPE)
        self.model.zero_grad()
        schedule = schedule_of(self.job.schedule)
        line = simulate(schedule, len(times), self.job.microbatches, seconds=times)
        return line.seconds


class Forwards:
    """Forwards of one batch without a tape. Making one is collective over all ranks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        layout = job.layout
        mesh = tpm.mesh(pp=layout.pp, dp=layout.dp, tp=layout.tp)
        self.placement = LayerPlacement.even(mesh.split("pp"), job.model.n_layer)
        model = _model(job, self.placement)
        self.placed = DistributedLayeredModel(
            cast(LayerParallelism, model), self.placement
        )
        self.tokens = _on(_samples(job)[:, :-1], self.placement.input)

    def step(self) -> None:
        """Do one forward. Collective over all ranks."""
        self.placed(self.tokens)

    def part(self) -> GPTPart:
        """What this rank has of the model. Local."""
        return _part(self.job, self.placement)


def measure(job: Job, steps: int, *, forward: bool = False) -> dict[str, Any]:
    """Return what `job` takes. Collective over all ranks, which all get the same.

    Parameters
    ----------
    steps
        So many after two that do not count.
    forward
        Forwards alone, on places that record no gradients.

    Returns
    -------
    dict
        ``s_per_step`` and ``s_least``, median and least of the steps, of the slowest
        rank each; ``tokens_per_s``.

        ``gemm_s``, the time of the model's matrix products, attention's own excluded,
        made alone with all ranks busy, before and after the steps, of which the shorter
        counts; ``gemm_gflops``, at which rate; ``gemm_fraction``, that time over
        ``s_per_step``. Of the rank that has most of it.

        ``communication_share`` of a rank's time that is spent in communication, waiting
        included; ``communication_calls`` and ``communication_bytes`` of one rank and
        step. ``peak_rss_bytes``, the most resident memory of each rank so far.

        Of training ``loss``. On stages ``layer_costs`` of input, a hidden layer and
        output, ``stage_layers``, how many each stage has; ``pipeline_s``,
        ``pipeline_expected_s`` and ``pipeline_ratio`` of forwards and backwards beside
        the simulated schedule.
    """
    if forward:
        # A forward is cut into no microbatches.
        job = replace(job, microbatches=1)
    work: Steps | Forwards = Forwards(job) if forward else Steps(job)
    world = comm.world()
    for _ in range(WARM_STEPS):
        work.step()
    gemm_s = [_gemm_seconds(work, trains=not forward)]
    seconds, own, pipelines = [], [], []
    with tpm.ledger() as led:
        for _ in range(steps):
            # A call of the communicator's own, so that it is not counted.
            world.comm.Barrier()
            start = time.perf_counter()
            work.step()
            own.append(time.perf_counter() - start)
            if isinstance(work, Steps):
                pipelines.append(work.pipeline_seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gemm_s.append(_gemm_seconds(work, trains=not forward))
    mine = {
        "seconds": own,
        "pipelines": pipelines,
        # What disturbs it makes it slower only.
        "gemm_s": min(gemm_s),
        "flops": _flops(work, trains=not forward),
        "communication_s": led.seconds(),
        "peak": peak,
    }
    all_ranks = world.all_gather_object(mine)
    seconds = np.max([rank["seconds"] for rank in all_ranks], axis=0)
    step_s = float(np.median(seconds))
    busiest = max(all_ranks, key=lambda rank: rank["gemm_s"])
    shares = [rank["communication_s"] / sum(rank["seconds"]) for rank in all_ranks]
    report = {
        "s_per_step": step_s,
        "s_least": float(np.min(seconds)),
        "tokens_per_s": job.batch * job.model.seq_len / step_s,
        "gemm_s": busiest["gemm_s"],
        "gemm_gflops": busiest["flops"] / busiest["gemm_s"] / 1e9,
        "gemm_fraction": busiest["gemm_s"] / step_s,
        "communication_share": float(np.mean(shares)),
        "communication_calls": led.count() / steps,
        "communication_bytes": led.bytes() / steps,
        "peak_rss_bytes": [rank["peak"] for rank in all_ranks],
    }
    if isinstance(work, Steps):
        report["loss"] = work.loss
        if job.layout.pp > 1:
            took = float(
                np.median(np.max([rank["pipelines"] for rank in all_ranks], axis=0))
            )
            expected = work.expected_seconds()
            report |= {
                "layer_costs": work.costs,
                "stage_layers": [
                    len(stage.layers) for stage in work.placement.stages()
                ],
                "pipeline_s": took,
                "pipeline_expected_s": expected,
                "pipeline_ratio": expected / took,
            }
    return report


def memory(job: Job, steps: int) -> dict[str, Any]:
    """Return the memory of arrays that `job` takes. Collective over all ranks.

    All allocations are watched from before the model is made, which slows steps down.

    Returns
    -------
    dict
        Lists, a number for each rank: ``making_bytes``, the most until the first step;
        ``array_bytes``, the most in a step after two; ``kept_bytes``, what is left
        between steps; ``formula_bytes``, see `Steps.formula_bytes`; and ``ratio``, the
        largest of ``array_bytes`` over it.
    """
    tracemalloc.start()
    try:
        work = Steps(job)
        _, making = tracemalloc.get_traced_memory()
        for _ in range(WARM_STEPS):
            work.step()
        tracemalloc.reset_peak()
        for _ in range(steps):
            work.step()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    mine = (making, peak, kept, work.formula_bytes())
    columns = zip(*work.world.all_gather_object(mine), strict=True)
    names = ("making_bytes", "array_bytes", "kept_bytes", "formula_bytes")
    found: dict[str, Any] = dict(zip(names, map(list, columns), strict=True))
    pairs = zip(found["array_bytes"], found["formula_bytes"], strict=True)
    return found | {"ratio": max(peak / formula for peak, formula in pairs)}


def _model(job: Job, placement: LayerPlacement) -> GPT:
    layout = GPTLayout(sequence=job.sequence)
    return GPT(job.model, placement, layout=layout, dtype=DTYPE).initialize(0)


def _samples(job: Job) -> np.ndarray[Any, Any]:
    """Random tokens (batch, seq_len + 1), the same on all ranks."""
    shape = (job.batch, job.model.seq_len + 1)
    return np.random.default_rng(0).integers(0, job.model.vocab_size, shape)


def _microbatch(job: Job, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows of the first microbatch, which is the largest."""
    return samples[: job.layout.dp * _rows(job)]


def _on(tokens: np.ndarray[Any, Any], place: Place) -> tpm.Tensor:
    return tpm.tensor(tokens, place.inner()).with_sharding(dp=tpm.Shard(0))


def _placement(
    stages: Sequence[Place], found: tuple[float, ...], layers: int
) -> LayerPlacement:
    if not found:
        return LayerPlacement.even(stages, layers)
    first, hidden, last = found
    return LayerPlacement.balanced(
        stages, [hidden] * layers, input_cost=first, output_cost=last
    )


def _stage_number(placement: LayerPlacement) -> int:
    stages = placement.stages()
    return next(n for n, stage in enumerate(stages) if stage.place.is_member)


def _part(job: Job, placement: LayerPlacement) -> GPTPart:
    stages = placement.stages()
    number = _stage_number(placement)
    first, last = number == 0, number == len(stages) - 1
    members = job.layout.tp
    return GPTPart(
        job.model,
        len(stages[number].layers) - first - last,
        has_input=first,
        has_output=last,
        members=members,
        member=comm.world().rank % members,
        sequence=job.sequence,
    )


def _tokens(job: Job) -> int:
    """Tokens of this rank's first microbatch, which is the largest."""
    return _rows(job) * job.model.seq_len


def _rows(job: Job) -> int:
    """Rows of this rank's first microbatch."""
    layout = job.layout
    _, rows = chunk(job.batch, layout.dp, comm.world().rank // layout.tp % layout.dp)
    return chunk(rows, job.microbatches, 0)[1]


def _flops(work: Steps | Forwards, *, trains: bool) -> int:
    counts = work.part().products(_tokens(work.job), trains=trains)
    own = sum(product.flops * count for product, count in counts.items())
    return own * work.job.microbatches


def _gemm_seconds(work: Steps | Forwards, *, trains: bool) -> float:
    counts = work.part().products(_tokens(work.job), trains=trains)
    comm.world().comm.Barrier()
    return work.job.microbatches * gemm.seconds(counts, comm.device(), DTYPE)
