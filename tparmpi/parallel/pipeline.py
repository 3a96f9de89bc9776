"""Training a model whose layers live on several places, in microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tparmpi.errors import UsageError
from tparmpi.nn import Module
from tparmpi.parallel.microbatches import cut_of
from tparmpi.parallel.model import DistributedLayeredModel
from tparmpi.parallel.schedules import Instruction, forward_only, schedule_of
from tparmpi.parallel.signals import Edge
from tparmpi.parallel.simulation import simulate
from tparmpi.parallel.step import Loss, Step, number_of
from tparmpi.tensors import no_grad


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
        for before, after in pairwise(stages):
            if before.place.is_autodiff and not after.place.is_autodiff:
                raise UsageError(
                    f"Pipeline: no gradient passes {after.place!r}, which does not "
                    f"record any, on its way to {before.place!r}; place its layers on "
                    "autodiff() of it, with parameters on the plain place if they are "
                    "to stay as they are"
                )
        made = schedule_of(schedule)
        # What would hang is refused here, with what is wrong.
        simulate(made, self._count, microbatches, chunks)
        self._stage = next(
            (n for n, place in enumerate(places) if place.is_member), None
        )
        self._is_last = self._stage == self._count - 1
        self._program: list[Instruction] = []
        self._forwards: list[Instruction] = []
        if self._stage is not None:
            sizes = self._stage, self._count, microbatches, chunks
            self._program = list(made(*sizes))
            self._forwards = list(forward_only(*sizes))
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
        split the batch: call `reduce_gradients`. Features get none.

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
            else the gradients of the layers' parameters are, at the end.

        Raises
        ------
        ShapeError, UsageError
            If features and targets are not tensors of one batch, split alike or whole.
        """
        self.model.ties.give_values()
        step = self._step(self._program, features, targets, loss)
        loss_sum, weight = 0.0, 1.0
        known = getattr(loss, "weight", None)
        aside = [] if known else _set_aside(self.model)
        if step is not None:
            if self._is_last and known:
                weight = number_of(step.weigh(known))
                step.factor = _inverse(weight)
            step.run()
            self.most_live = step.most_live
            if self._is_last:
                loss_sum = number_of(step.loss_sum)
                weight = weight if known else number_of(step.weight_sum)
        self.model.ties.take_gradients()
        loss_sum, weight = self._told(loss_sum, weight)
        if not known:
            _bring_back(aside, _inverse(weight))
        return loss_sum * _inverse(weight)

    def evaluate(self, features: Any, targets: Any, loss: Loss) -> float:
        """Return the mean loss; nothing is recorded.

        As `forward_backward` with forwards alone: while a stage works on a microbatch,
        those after it work on earlier ones. Collective over the ranks of the placement.
        """
        self.model.ties.give_values()
        step = self._step(self._forwards, features, targets, loss)
        loss_sum, weight = 0.0, 1.0
        if step is not None:
            with no_grad():
                step.run()
            if self._is_last:
                loss_sum, weight = number_of(step.loss_sum), number_of(step.weight_sum)
        loss_sum, weight = self._told(loss_sum, weight)
        return loss_sum * _inverse(weight)

    def _step(
        self, program: Sequence[Instruction], features: Any, targets: Any, loss: Loss
    ) -> Step | None:
        """A step of this rank, if it has a part in it."""
        cut = cut_of(features, targets, self.microbatches)
        if self._stage is None:
            return None
        return Step(
            self.model,
            self._edges,
            program,
            self._stage,
            self._count,
            features,
            targets,
            loss,
            cut,
            self.recompute,
        )

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
    """Take what gradients there are from the parameters of this rank."""
    if not all(isinstance(layer, Module) for layer in model.layers):
        raise UsageError(
            "Pipeline: a loss without a method weight(targets) needs layers that are "
            "Modules, whose gradients are divided by the weight at the end"
        )
    return [
        (parameter, parameter.swap_grad({}))
        for parameter in model.parameters()
        if not parameter.is_shell
    ]


def _bring_back(aside: list[Any], factor: float) -> None:
    """Scale the parameters' gradients and add what was set aside."""
    for parameter, sums in aside:
        for layout, (array, _) in parameter.swap_grad(sums).items():
            parameter.add_grad(array * array.dtype.type(factor), layout)
