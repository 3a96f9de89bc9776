"""Training a model whose layers live on several places, in microbatches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tparmpi.errors import ShapeError, UsageError
from tparmpi.parallel.microbatches import batch_of
from tparmpi.parallel.model import DistributedLayeredModel, own_parameters
from tparmpi.parallel.schedules import Instruction, schedule_of
from tparmpi.parallel.signals import Edge
from tparmpi.parallel.simulation import simulate
from tparmpi.parallel.step import Loss, Step, number_of


class Pipeline:
    """Runs a model's stages over microbatches, each stage at its own.

    Without stages apart it accumulates gradients. Making one is collective over the
    ranks of the model's placement.

    Parameters
    ----------
    model
        Built on autodiff places.
    schedule : {"gpipe", "1f1b", "interleaved", "zero_bubble"}
        See `tparmpi.parallel.schedules`. Places with several chunks of layers need
        ``"interleaved"`` or ``"gpipe"``.
    microbatches
        Into how many each batch is cut; some are empty where it has fewer rows.
    recompute
        Run each stage's forward again in its backward, instead of keeping it.

    Attributes
    ----------
    most_live
        Most (microbatch, chunk) pairs in the last step that this rank held something of
        for a backward still to come, weight gradients included.

    Raises
    ------
    UsageError
        If the places of stages share ranks, take turns in no fixed order, or the
        schedule does not exist or cannot have so many chunks.
    """

    def __init__(
        self,
        model: DistributedLayeredModel,
        schedule: str = "1f1b",
        microbatches: int = 8,
        *,
        recompute: bool = False,
    ) -> None:
        if microbatches < 1:
            raise UsageError(
                f"Pipeline: microbatches must be at least 1, it is {microbatches}"
            )
        self.model = model
        self.microbatches = microbatches
        self.recompute = recompute
        self.most_live = 0
        stages = model.stages
        places = [place.inner() for place in model.placement.devices()]
        self._count = len(places)
        chunks, rest = divmod(len(stages), len(places))
        turns = [places[k % len(places)] for k in range(len(stages))]
        if rest or any(
            stage.place.inner() is not place
            for stage, place in zip(stages, turns, strict=True)
        ):
            raise UsageError(
                "Pipeline: the places must take turns, each with as many chunks of "
                "layers; use LayerPlacement.even, new or interleaved"
            )
        ranks = [device.rank for place in places for device in place.devices]
        if len(set(ranks)) != len(ranks):
            raise UsageError(
                "Pipeline: the places of stages must have no ranks in common"
            )
        made = schedule_of(schedule)
        # What would hang is refused here, with what is wrong.
        simulate(made, self._count, microbatches, chunks)
        self._stage = next(
            (n for n, place in enumerate(places) if place.is_member), None
        )
        self._program: list[Instruction] = []
        if self._stage is not None:
            self._program = list(made(self._stage, self._count, microbatches, chunks))
        self._edges = [
            Edge(before.place, after.place, f"stage {number + 1}")
            for number, (before, after) in enumerate(pairwise(stages))
        ]
        last = places[-1].devices[0].rank
        members = [device.rank for device in model.everyone.devices]
        self._teller = members.index(last)

    def forward_backward(self, features: Any, targets: Any, loss: Loss) -> float:
        """Add the gradients of the mean loss to `grad`; return the mean loss.

        The loss is the sum of all microbatches' losses over the sum of their weights;
        it and the gradients are those of the whole batch, whatever the schedule and the
        number of microbatches. Gradients are left as pending sums over the axes that
        split the batch: call `reduce_gradients`.

        Collective over the ranks of the placement, which all get the loss. Random
        operators draw for each row of the batch what they draw in one pass over it.

        Parameters
        ----------
        features
            Nest of tensors on ``placement.input``; dim 0 is the batch. Shells
            elsewhere.
        targets
            Nest of tensors on ``placement.output``; shells elsewhere.
        loss
            ``(predictions, targets) -> (sum, weight)`` of a microbatch: the sum of its
            losses, a tensor without dims, and the sum of their weights, a number or
            such a tensor. If it has a method ``weight(targets)``, which gives the
            weight alone, each loss is divided by the whole weight before its backward;
            else the gradients are, at the end.

        Raises
        ------
        ShapeError, UsageError
            If features and targets are not tensors of one batch.
        """
        batch, parts = batch_of("features", features)
        rows, _ = batch_of("targets", targets)
        if rows != batch:
            raise ShapeError(
                f"Pipeline: the features have {batch} rows, the targets {rows}"
            )
        self.model.ties.give_values()
        loss_sum, weight = 0.0, 1.0
        known = getattr(loss, "weight", None)
        aside = [] if known else _set_aside(self.model)
        if self._stage is not None:
            step = Step(
                self.model,
                self._edges,
                self._program,
                self._stage,
                self._count,
                features,
                targets,
                loss,
                batch,
                parts,
                self.microbatches,
                self.recompute,
            )
            is_last = self._stage == self._count - 1
            if is_last and known:
                weight = number_of(step.weigh(known))
                step.factor = _inverse(weight)
            step.run()
            self.most_live = step.most_live
            if is_last:
                loss_sum = number_of(step.loss_sum)
                weight = weight if known else number_of(step.weight_sum)
        self.model.ties.take_gradients()
        loss_sum, weight = self._told(loss_sum, weight)
        if not known:
            _bring_back(aside, _inverse(weight))
        return loss_sum * _inverse(weight)

    def _told(self, *numbers: float) -> list[float]:
        """The last stage's numbers, on every rank."""
        everyone = self.model.everyone
        if everyone.size == 1 or not everyone.is_member:
            return list(numbers)
        told = everyone.broadcast(np.array(numbers), self._teller)
        return [float(number) for number in told]

    def close(self) -> None:
        """Close the ways between the stages. Collective over the placement's ranks."""
        for edge in self._edges:
            edge.close()


def _inverse(weight: float) -> float:
    """What losses are multiplied by; nothing is learnt from a batch of no weight."""
    return 1.0 / weight if weight else 0.0


def _set_aside(model: DistributedLayeredModel) -> list[Any]:
    """Take what gradients there are from the parameters."""
    return [(parameter, parameter.swap_grad({})) for parameter in own_parameters(model)]


def _bring_back(aside: list[Any], factor: float) -> None:
    """Scale the parameters' gradients and add what was set aside."""
    for parameter, sums in aside:
        for layout, (array, _) in parameter.swap_grad(sums).items():
            parameter.add_grad(array * array.dtype.type(factor), layout)
