"""One step of a pipeline on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tparmpi.parallel.microbatches import Cut
from tparmpi.parallel.model import DistributedLayeredModel
from tparmpi.parallel.schedules import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Instruction,
)
from tparmpi.parallel.signals import Edge, Passage, Received
from tparmpi.tensors import (
    Deferred,
    Tensor,
    backward,
    nests,
    no_grad,
    random,
    recompute,
)

Loss = Callable[[Any, Any], tuple[Tensor, Any]]
"""Called with predictions and targets of a microbatch; returns the sum of the losses
and the sum of their weights, as a tensor without dims or a number."""


class Live:
    """What is held of a microbatch between its forward and its backward.

    Attributes
    ----------
    received
        The signal that came in, None in the first stage.
    outputs
        The tensors whose gradients come back; in the last stage the loss.
    passage
        Of the signal that went out, None in the last stage.
    later
        Weight gradients still to be computed.
    """

    __slots__ = ("later", "outputs", "passage", "received")

    def __init__(
        self, received: Received | None, outputs: list[Tensor], passage: Passage | None
    ) -> None:
        self.received = received
        self.outputs = outputs
        self.passage = passage
        self.later = Deferred()


class Step:
    """A step under way on one rank.

    Parameters
    ----------
    model
        The whole model.
    edges
        One between each pair of neighbouring stages.
    program
        What this rank does.
    stage, count
        This rank's place among so many.
    features, targets, loss
        See `Pipeline.forward_backward`.
    cut
        How features and targets are cut.
    recomputes
        Whether forwards are run again in the backward.

    Attributes
    ----------
    loss_sum, weight_sum
        On the last stage, of all microbatches so far; tensors without dims or numbers.
    most_live
        See `Pipeline`.
    """

    def __init__(
        self,
        model: DistributedLayeredModel,
        edges: Sequence[Edge],
        program: Sequence[Instruction],
        stage: int,
        count: int,
        features: Any,
        targets: Any,
        loss: Loss,
        cut: Cut,
        recomputes: bool,
    ) -> None:
        self._model = model
        self._edges = edges
        self._program = program
        self._stage = stage
        self._count = count
        self._features = features
        self._targets = targets
        self._loss = loss
        self._cut = cut
        self._recomputes = recomputes
        self._scope = random.current()
        self._trains = any(work.kind != FORWARD for work in program)
        self._live: dict[tuple[int, int], Live] = {}
        self._expected = 0
        self.most_live = 0
        self.loss_sum: Any = 0.0
        self.weight_sum: Any = 0.0
        self.factor = 1.0
        self._do = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUT_GRADIENT: self._input_gradient,
            WEIGHT_GRADIENT: self._weight_gradient,
        }

    def run(self) -> None:
        """Do all the work. Collective over the model's ranks, in pairs of stages."""
        for number, work in enumerate(self._program):
            virtual = work.chunk * self._count + self._stage
            try:
                self._expect_up_to(number + 1)
                self._do[work.kind](virtual, work.microbatch, work.chunk)
            except Exception as error:
                self._add_note(error, work, virtual)
                raise
        for edge in self._edges:
            edge.finish()

    def _add_note(self, error: Exception, work: Instruction, virtual: int) -> None:
        layers = self._model.stages[virtual].layers
        # Python 3.10 has no notes.
        add = getattr(error, "add_note", lambda note: None)
        add(
            f"in stage {self._stage} of {self._count} stages, layers {layers.start} to "
            f"{layers.stop - 1}: {work.kind} of microbatch {work.microbatch}"
        )

    def _expect_up_to(self, number: int) -> None:
        """Start receiving what the instructions up to `number` need, and no more.

        One ahead of the work: what comes meanwhile is there when it is needed.
        """
        while self._expected <= min(number, len(self._program) - 1):
            work = self._program[self._expected]
            virtual = work.chunk * self._count + self._stage
            if work.kind == FORWARD:
                if virtual > 0:
                    self._edges[virtual - 1].expect()
            elif work.kind in (BACKWARD, INPUT_GRADIENT) and virtual < len(self._edges):
                live = self._live.get((work.microbatch, work.chunk))
                if live is None:
                    return  # Its forward is the very next work.
                assert live.passage is not None
                self._edges[virtual].expect_gradients(live.passage)
            self._expected += 1

    def _forward(self, virtual: int, microbatch: int, chunk: int) -> None:
        received = None
        if virtual == 0:
            signal = self._cut.take(self._features, microbatch)
        else:
            received = self._edges[virtual - 1].receive(microbatch)
            signal = received.signal
        stage = self._model.stages[virtual]

        def layers(signal: Any) -> Any:
            return self._model.run(stage, signal)

        scope = self._scope
        with random.scope(scope.seed, scope.step, self._cut.rows(microbatch)):
            run = recompute(layers) if self._recomputes else layers
            signal = run(signal)
            if virtual == len(self._edges):
                outputs, passage = self._measured(signal, microbatch), None
            else:
                passage = self._edges[virtual].send(signal, microbatch)
                outputs = _differentiable(signal)
        if self._trains:
            self._live[microbatch, chunk] = Live(received, outputs, passage)
            self.most_live = max(self.most_live, len(self._live))

    def _measured(self, predictions: Any, microbatch: int) -> list[Tensor]:
        """The loss of a microbatch, as its backward begins with it."""
        targets = self._cut.take(self._targets, microbatch)
        total, weight = self._loss(predictions, targets)
        with no_grad():
            self.loss_sum = add(self.loss_sum, total.detach())
            self.weight_sum = add(self.weight_sum, weight)
        if not total.requires_grad:
            return []
        return [total if self.factor == 1.0 else total * self.factor]

    def _backward(self, virtual: int, microbatch: int, chunk: int) -> None:
        live = self._live.pop((microbatch, chunk))
        self._go_back(virtual, microbatch, live, None)

    def _input_gradient(self, virtual: int, microbatch: int, chunk: int) -> None:
        live = self._live[microbatch, chunk]
        self._go_back(virtual, microbatch, live, live.later)

    def _weight_gradient(self, virtual: int, microbatch: int, chunk: int) -> None:
        self._live.pop((microbatch, chunk)).later.run()

    def _go_back(
        self, virtual: int, microbatch: int, live: Live, later: Deferred | None
    ) -> None:
        if virtual == len(self._edges):
            if live.outputs:
                backward(live.outputs, later=later)
        elif live.outputs:
            assert live.passage is not None
            seeds = self._edges[virtual].receive_gradients(live.passage, microbatch)
            backward(live.outputs, seeds, later=later)
        live.outputs = []
        if live.received is not None:
            self._edges[virtual - 1].send_gradients(live.received, microbatch)
            live.received = None

    def weigh(self, known: Callable[[Any], Any]) -> Any:
        """Return the weight of all microbatches, as `known` gives it for targets."""
        total: Any = 0.0
        with no_grad():
            for number in range(self._cut.microbatches):
                total = add(total, known(self._cut.take(self._targets, number)))
        return total


def _differentiable(signal: Any) -> list[Tensor]:
    """The tensors of a signal that have a history, each once, in the signal's order."""
    tensors = {id(tensor): tensor for tensor in nests.tensors_in(signal)}
    return [tensor for tensor in tensors.values() if tensor.requires_grad]


def add(total: Any, value: Any) -> Any:
    """Return ``total + value``, of tensors or numbers; a first one as it is. Local."""
    if isinstance(total, float) and total == 0.0:
        return value
    return value + total if isinstance(value, Tensor) else total + value


def number_of(value: Any) -> float:
    """Return a tensor without dims, or a number, as a number.

    Collective over the tensor's place.
    """
    return float(value.item() if isinstance(value, Tensor) else value)
