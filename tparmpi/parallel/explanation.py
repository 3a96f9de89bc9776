"""What a model's layers communicate: layouts, collectives and bytes for each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tparmpi.comm import Ledger
from tparmpi.nn.module import Module, watched
from tparmpi.parallel.gradients import reduce_gradients
from tparmpi.sharding import Replicate
from tparmpi.tensors import Tensor, random, tape

LOSS = "(loss)"
GRADIENTS = "(gradients)"


@dataclass
class LayerReport:
    """What one module did, without the modules below it.

    Attributes
    ----------
    path
        The module's; ``"(loss)"`` for what is outside all modules and ``"(gradients)"``
        for the reduction of the parameters' gradients.
    kind
        Name of its class.
    inputs, outputs
        Layouts of its tensors, as text; ``"whole"`` where nothing is split or pending.
    forward, backward
        The calls that this rank made for it.
    gathered
        For each operand that was gathered unasked, which and why.
    """

    path: str
    kind: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    forward: Ledger = field(default_factory=Ledger)
    backward: Ledger = field(default_factory=Ledger)
    gathered: list[str] = field(default_factory=list)


@dataclass
class Explanation:
    """What each layer of a model communicates on this rank; `str` is a table.

    Attributes
    ----------
    layers
        By path, in the order of their first calls.
    forward, backward
        All calls of all layers.
    """

    layers: dict[str, LayerReport] = field(default_factory=dict)
    forward: Ledger = field(default_factory=Ledger)
    backward: Ledger = field(default_factory=Ledger)

    def __getitem__(self, path: str) -> LayerReport:
        return self.layers[path]

    def __str__(self) -> str:
        rows = [("layer", "in", "out", "forward", "backward")]
        rows += [
            (
                f"{report.path or '(model)'}  {report.kind}".rstrip(),
                _joined(report.inputs),
                _joined(report.outputs),
                _calls(report.forward),
                _calls(report.backward),
            )
            for report in self.layers.values()
        ]
        rows.append(("all", "", "", _calls(self.forward), _calls(self.backward)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        lines += [
            f"gathered in {report.path or '(model)'}: {text}"
            for report in self.layers.values()
            for text in report.gathered
        ]
        return "\n".join(lines)


def explain(
    model: Module,
    *example: Any,
    loss: Callable[[Any], Tensor] | None = None,
) -> Explanation:
    """Return what each layer of `model` communicates for an example.

    Runs the model once, and its backward pass and the reduction of its gradients where
    gradients are recorded. Collective over the model's place. Values, gradients and
    random numbers are left as they were.

    Parameters
    ----------
    example
        What the model is called with.
    loss
        Function of the model's result that returns the tensor to go back from; by
        default the sum of the result.

    Returns
    -------
    Explanation
        ``print`` it, or look at ``explanation["blocks.0.attn"].forward.count()``. Bytes
        are those that this rank sends; without any on ranks that are no members.

    Examples
    --------
    >>> print(tpm.explain(model, tokens))
    """
    model.assign_paths()
    parameters = list(model.parameters())
    observer = _Observer()
    with _gradients_aside([*parameters, *_tensors(example)]), observer, random.scope():
        result = model(*example)
        made = loss(result) if loss is not None else _total(result)
        observer.close_forward()
        if made is not None and made.requires_grad:
            made.backward()
            observer.move_to(GRADIENTS)
            reduce_gradients(parameters)
            observer.settle()
    return observer.explanation


def _total(result: Any) -> Tensor | None:
    total: Tensor | None = None
    for tensor in _tensors((result,)):
        if tensor.requires_grad:
            part = tensor.sum()
            total = part if total is None else total + part
    return total


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


@contextmanager
def _gradients_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let leaves start without gradients, and have those they had afterwards."""
    leaves = [t.node for t in tensors if isinstance(t.node, tape.Leaf)]
    slots = {id(leaf): leaf.slots[0] for leaf in leaves}.values()
    before = [slot.sums for slot in slots]
    for slot in slots:
        slot.sums = {}
    try:
        yield
    finally:
        for slot, sums in zip(slots, before, strict=True):
            slot.sums = sums


class _Observer:
    """Books each call of the library on the module that was running.

    In the backward pass that is the module in whose forward the operator was recorded:
    the observer notes at which position of the program each module begins and ends.
    """

    def __init__(self) -> None:
        self.explanation = Explanation()
        self._all = Ledger()
        self._gathers: list[str] = []
        self._booked = 0
        self._is_forward = True
        self._here = LOSS
        self._positions: list[int] = []
        self._paths: list[str] = []

    def __enter__(self) -> None:
        self._before = watched.by, tape.mode.told, tape.mode.gathers
        watched.by, tape.mode.told = self._call, self._went_back_to
        tape.mode.gathers = self._gathers
        self._all.__enter__()
        self.move_to(LOSS)

    def __exit__(self, *_: object) -> None:
        self._all.__exit__()
        watched.by, tape.mode.told, tape.mode.gathers = self._before

    def move_to(self, path: str) -> None:
        """Book what comes on `path`."""
        self.settle()
        self._here = path
        self._positions.append(tape.position())
        self._paths.append(path)

    def close_forward(self) -> None:
        """Book what comes as the backward pass."""
        self.settle()
        self._is_forward = False

    def settle(self) -> None:
        """Book the calls since the last time on the module that made them."""
        made = self._all.records[self._booked :]
        self._booked += len(made)
        if not made and not self._gathers:
            return
        report = self._report(self._here, "")
        total, own = (
            (self.explanation.forward, report.forward)
            if self._is_forward
            else (self.explanation.backward, report.backward)
        )
        total.records += made
        own.records += made
        report.gathered += self._gathers
        self._gathers.clear()

    def _went_back_to(self, position: int) -> None:
        self.settle()
        self._here = self._paths[bisect_right(self._positions, position) - 1]

    def _call(
        self, module: Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        caller = self._here
        path = caller if module.path is None else module.path
        report = self._report(path, type(module).__name__)
        report.inputs += _new(report.inputs, (*inputs, keywords))
        self.move_to(path)
        try:
            result = module.forward(*inputs, **keywords)
        finally:
            self.move_to(caller)
        report.outputs += _new(report.outputs, (result,))
        return result

    def _report(self, path: str, kind: str) -> LayerReport:
        return self.explanation.layers.setdefault(path, LayerReport(path, kind))


def _new(known: tuple[str, ...], values: Any) -> tuple[str, ...]:
    """Layouts of the tensors in `values` that are not `known`, each once."""
    layouts = dict.fromkeys(_layout(tensor) for tensor in _tensors(values))
    return tuple(layout for layout in layouts if layout not in known)


def _layout(tensor: Tensor) -> str:
    pairs = zip(tensor.spec.place.axes, tensor.layout, strict=True)
    split = [f"{axis}={p!r}" for axis, p in pairs if not isinstance(p, Replicate)]
    return " ".join(split) or "whole"


def _joined(layouts: tuple[str, ...]) -> str:
    return ", ".join(layouts) or "-"


def _calls(ledger: Ledger) -> str:
    """The calls of a ledger by kind and axis: ``2 all_gather tp 3,072 B``."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for record in ledger.records:
        count, sent = totals.get((record.kind, record.axis), (0, 0))
        totals[record.kind, record.axis] = count + 1, sent + record.bytes
    return (
        ", ".join(
            f"{count} {kind} {axis} {sent:,} B"
            for (kind, axis), (count, sent) in totals.items()
        )
        or "-"
    )
