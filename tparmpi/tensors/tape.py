"""The tape: nodes that remember operator calls, and the backward pass over them.

Redistributions leave no node: a tensor in another layout is the same value, so it
shares the slot of the tensor it came from. A slot keeps one running sum of gradients
for each layout; when its node is consumed they are merged into the layout that the node
needs, with at most one communication for each axis. Thus a tensor read by several
operators is reduced once, whatever layouts they read it in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from tparmpi.errors import AutodiffError
from tparmpi.sharding import PARTIAL, REPLICATE, Layout, Partial, Placement, Shard
from tparmpi.tensors.contract import check_backward
from tparmpi.tensors.plan import Plan
from tparmpi.tensors.redistribute import redistribute
from tparmpi.tensors.regather import Kept
from tparmpi.tensors.spec import Spec

if TYPE_CHECKING:
    from tparmpi.tensors.passes import Pass

_order = count()


def next_order() -> int:
    """Return the position in the program of what is recorded next. Local."""
    return next(_order)


Sums = dict[Layout, tuple[Any, bool]]
"""Gradients by layout, each with whether its array is our own to add into."""


class Slot:
    """Gradients on their way to one tensor.

    Attributes
    ----------
    spec
        Shape, dtype and place of the tensor (its layout is one of many).
    sums
        For each layout the running sum and whether its array is our own to add into.
    """

    __slots__ = ("spec", "sums")

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.sums: Sums = {}

    def add(self, array: Any, layout: Layout, owned: bool = False) -> None:
        """Add a gradient that lies in `layout`. Local."""
        if array.dtype != self.spec.dtype:
            array, owned = array.astype(self.spec.dtype), True
        if layout not in self.sums:
            self.sums[layout] = (array, owned)
            return
        total, is_ours = self.sums[layout]
        if not self.spec.shape:
            # NumPy's sums of arrays without dims are scalars, which nothing adds into.
            xp = self.spec.place.backend.xp
            self.sums[layout] = (xp.asarray(total + array), False)
        elif is_ours:
            total += array
        elif owned:
            array += total
            self.sums[layout] = (array, True)
        else:
            self.sums[layout] = (total + array, True)

    def take(self, target: Layout) -> Any:
        """Return the one running sum, brought to `target`, and empty the slot.

        Collective over the axes whose members' sums must be brought together.
        """
        ((layout, (array, _)),) = self.sums.items()
        self.sums.clear()
        spec = self.spec.with_layout(layout)
        return redistribute(array, spec, target, embed=True)

    def pool(self, needed: Layout) -> None:
        """Bring all running sums to one layout, from which `needed` is near.

        Local where they differ by pending sums; a gradient that is whole in one sum and
        sharded in another is gathered or sliced as `needed` says.
        """
        if len(self.sums) <= 1:
            return
        layouts = list(self.sums)
        common = tuple(
            _common([layout[axis] for layout in layouts], needed[axis])
            for axis in range(len(needed))
        )
        sums = list(self.sums.items())
        self.sums.clear()
        for layout, (array, owned) in sums:
            moved = redistribute(
                array, self.spec.with_layout(layout), common, embed=True
            )
            self.add(moved, common, owned and moved is array)


def _common(placements: list[Placement], needed: Placement) -> Placement:
    if any(isinstance(p, Partial) for p in placements):
        return PARTIAL
    if all(p == placements[0] for p in placements):
        return placements[0]
    return needed


class Leaf:
    """The end of the tape at a tensor whose gradient is wanted.

    Gradients stay pending here: everything is pooled locally, and reduced only along
    the axis that the tensor is stored over.

    Attributes
    ----------
    is_parameter
        Whether its gradient may be left for later.
    stored_over
        Number of the axis whose members hold pieces of the tensor between its uses, or
        None.
    """

    __slots__ = ("is_parameter", "order", "slots", "stored_over")

    def __init__(self, spec: Spec, is_parameter: bool = False) -> None:
        self.is_parameter = is_parameter
        self.stored_over: int | None = None
        self.order = -1
        self.slots = (Slot(spec),)

    @property
    def gradient(self) -> tuple[Any, Layout] | None:
        """This rank's part of the gradient and its layout. Local."""
        slot = self.slots[0]
        if not slot.sums:
            return None
        if len(slot.sums) > 1:
            slot.pool(self._nearest(list(slot.sums)))
        (layout, (array, owned)), *_ = slot.sums.items()
        if not owned:
            array = array.copy()
            slot.sums[layout] = (array, True)
        return array, layout

    def scatter(self) -> None:
        """Leave each member along the axis stored over its piece of what is pending.

        Collective over that axis.
        """
        slot, axis = self.slots[0], self.stored_over
        assert axis is not None
        piece = slot.spec.layout[axis]
        for layout in list(slot.sums):
            if not isinstance(layout[axis], Partial):
                continue
            array, owned = slot.sums.pop(layout)
            target = (*layout[:axis], piece, *layout[axis + 1 :])
            moved = redistribute(array, slot.spec.with_layout(layout), target)
            slot.add(moved, target, owned or moved is not array)

    def _nearest(self, layouts: list[Layout]) -> Layout:
        """The layout to pool to without communication."""
        own = self.slots[0].spec.layout
        return tuple(
            p if isinstance(p, Shard) and _sliceable(layouts, axis, p) else PARTIAL
            for axis, p in enumerate(own)
        )


def _sliceable(layouts: list[Layout], axis: int, placement: Shard) -> bool:
    return all(layout[axis] in (REPLICATE, placement) for layout in layouts)


Parent = tuple["Node | Leaf", int]
"""Where a gradient goes on to: a node and the number of one of its slots."""


class Node(ABC):
    """A step of the program that gradients go back through.

    Attributes
    ----------
    order
        Position in the program; the backward pass runs from high to low.
    parents
        For each operand its node and slot number, or None where no gradient is wanted.
    slots
        One for each output.
    versions
        Operands that may be written to by the library, with their version at this step.
    """

    __slots__ = ("order", "parents", "slots", "versions")

    def __init__(
        self,
        parents: tuple[Parent | None, ...],
        outputs: Sequence[Spec] = (),
        versions: Sequence[tuple[list[int], int]] = (),
    ) -> None:
        self.order = next(_order)
        self.parents = parents
        self.slots = tuple(map(Slot, outputs))
        self.versions = versions

    @abstractmethod
    def check(self) -> None:
        """Raise `AutodiffError` unless the backward of this step can run. Local."""

    def run_backward(self, run: Pass) -> None:
        """Consume the gradients in the slots; hand gradients to the parents.

        A kind of step that has no backward refuses it in `check`.
        """
        self.check()

    def check_versions(self, name: str) -> None:
        """Raise `AutodiffError` if an operand of `name` was written to. Local."""
        if any(cell[0] != version for cell, version in self.versions):
            raise AutodiffError(
                f"backward: an operand of {name} was written to after "
                "the forward used it; call backward() before the optimizer steps or "
                "weights are loaded"
            )


def used_already() -> AutodiffError:
    """Return the error about a part of the tape that is gone. Local."""
    return AutodiffError(
        "backward: this part of the tape was used by an earlier backward() and "
        "is freed; run the forward again"
    )


class OperatorCall(Node):
    """One operator call on the tape."""

    __slots__ = ("plan", "saved", "wanted")

    def __init__(
        self,
        plan: Plan,
        saved: Any,
        parents: tuple[Parent | None, ...],
        versions: list[tuple[list[int], int]],
    ) -> None:
        super().__init__(parents, plan.outputs, versions)
        self.plan: Plan | None = plan
        self.saved = saved
        self.wanted = tuple(parent is not None for parent in parents)

    def check(self) -> None:
        """Raise unless the backward of this call can run. Local.

        Raises
        ------
        AutodiffError
            If it has run, has none, or an operand was written to since.
        """
        plan = self.plan
        if plan is None:
            raise used_already()
        if plan.operator.backward is None:
            raise AutodiffError(f"backward: {plan.operator.name} is not differentiable")
        if self.versions:
            self.check_versions(plan.operator.name)

    def run_backward(self, run: Pass) -> None:
        """Consume the gradients of the outputs; hand gradients to the parents."""
        plan = self.plan
        assert plan is not None
        grads, pending = self._output_gradients(plan)
        saved, wanted = self.saved, self.wanted
        self.plan = self.saved = None
        if not run.is_plain:
            wanted, later = run.sort(self)
            if run.later is not None and True in later:
                rest = Rest(self, plan, saved, grads, pending, later)
                run.later.calls.append(rest)
            if True not in wanted:
                return
        hand_on(plan, _fetch(saved), grads, pending, wanted, self.parents)

    def _output_gradients(self, plan: Plan) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Gradients of the outputs, and for each axis whether they are pending."""
        slot, needed = self.slots[0], plan.output_gradients[0]
        if len(self.slots) == len(slot.sums) == 1 and needed in slot.sums:
            ((array, _),) = slot.sums.values()
            slot.sums.clear()
            return (array,), plan.nothing_pending
        for slot, needed in zip(self.slots, plan.output_gradients, strict=True):
            slot.pool(needed)
        pending = tuple(
            passes
            and any(
                isinstance(layout[axis], Partial)
                for s in self.slots
                for layout in s.sums
            )
            for axis, passes in enumerate(plan.may_pass)
        )
        grads = []
        for slot, needed in zip(self.slots, plan.output_gradients, strict=True):
            if not slot.sums:
                spec = slot.spec.with_layout(needed)
                grads.append(plan.backend.zeros(spec.local_shape, spec.dtype))
                continue
            target = tuple(
                PARTIAL if waits else placement
                for placement, waits in zip(needed, pending, strict=True)
            )
            grads.append(slot.take(target))
        return tuple(grads), pending


class ShellCall(OperatorCall):
    """An operator call of other ranks: it links what is before with what is after.

    So that a backward pass is the same on all ranks, and each takes part in what it has
    a part in.
    """

    __slots__ = ()

    def run_backward(self, run: Pass) -> None:
        """Tell the parents that they are reached."""
        self.plan = None
        for parent in self.parents:
            if parent is not None:
                reach(parent)


def reach(parent: Parent) -> None:
    """Mark the slot of a call of other ranks, where its gradient would be. Local."""
    node, number = parent
    slot = node.slots[number]
    if not isinstance(node, Leaf) and not slot.spec.place.is_member:
        slot.sums[slot.spec.layout] = (None, False)


class Rest(Node):
    """Gradients of an operator call's operands that were left for later."""

    __slots__ = ("grads", "pending", "plan", "saved", "wanted")

    def __init__(
        self,
        call: OperatorCall,
        plan: Plan,
        saved: Any,
        grads: tuple[Any, ...],
        pending: tuple[bool, ...],
        wanted: tuple[bool, ...],
    ) -> None:
        super().__init__(call.parents, (), call.versions)
        self.plan = plan
        self.saved = saved
        self.grads = grads
        self.pending = pending
        self.wanted = wanted

    def check(self) -> None:
        """Raise `AutodiffError` if an operand was written to since. Local."""
        self.check_versions(self.plan.operator.name)

    def run_backward(self, run: Pass) -> None:
        """Hand the gradients to the parents that have waited for them."""
        saved = _fetch(self.saved, self._spared())
        hand_on(self.plan, saved, self.grads, self.pending, self.wanted, self.parents)

    def _spared(self) -> int:
        """Number of the operand whose value its own gradient does not depend on."""
        if sum(self.wanted) != 1:
            return -1
        number = self.wanted.index(True)
        plan = self.plan
        dtypes = [spec.dtype for spec in plan.inputs]
        traits = plan.operator.traits(dtypes, plan.attributes)
        return number if number in traits.linear else -1


def hand_on(
    plan: Plan,
    saved: Any,
    grads: tuple[Any, ...],
    pending: tuple[bool, ...],
    wanted: tuple[bool, ...],
    parents: tuple[Parent | None, ...],
) -> None:
    """Run an operator's backward and add the gradients to the parents' slots."""
    operator = plan.operator
    assert operator.backward is not None
    grad = grads[0] if len(grads) == 1 else grads
    results = operator.backward(plan, saved, grad, wanted)
    if not plan.backward_checked:
        check_backward(plan, results, wanted)
        plan.backward_checked = True
    for number, parent in enumerate(parents):
        if parent is not None and wanted[number]:
            node, slot = parent
            gradient_layout = plan.gradient_layout(number, pending)
            node.slots[slot].add(results[number], gradient_layout, operator.fresh)


def _fetch(saved: Any, spared: int = -1) -> Any:
    if isinstance(saved, Kept):
        spare = saved.number == spared
        return saved.stand_in() if spare else saved.regather.fetch()
    if type(saved) is tuple:
        return tuple(_fetch(item, spared) for item in saved)
    return saved


class GradientEnd(Node):
    """The end of the tape at a gradient, whose own gradient there is not.

    Parameters
    ----------
    parents
        What the gradient was derived from.
    """

    __slots__ = ()

    def check(self) -> None:
        """Raise `AutodiffError`."""
        raise AutodiffError(
            "backward: this is the gradient of something made from a gradient, and "
            "gradients of gradients are not supported; call detach() on the gradient "
            "to use it as a constant"
        )


class _Mode:
    """Whether operator calls are recorded, and whether gathering unasked "
    "is an error.
    """

    recording = True
    gathering = True
    gathers: list[str] | None = None
    """Takes what would else be a warning of a gathering."""
    told: Callable[[int], None] | None = None
    """Called with the position of each call before its backward runs."""
    regathering = True
    """Whether what is to be gathered again is not kept."""
    watching: Any = None
    """Who is told of the operator calls instead of recording them."""


mode = _Mode()


def position() -> int:
    """Return a position in the program, before all calls that are recorded later."""
    return next(_order)


class no_grad:
    """Context in which nothing is recorded on the tape. Local."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(mode.recording)
        mode.recording = False

    def __exit__(self, *_: object) -> None:
        mode.recording = self._before.pop()


class no_implicit_gather:
    """Context in which an operator that would gather a shard raises `ShardingError`."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(mode.gathering)
        mode.gathering = False

    def __exit__(self, *_: object) -> None:
        mode.gathering = self._before.pop()


def ones_like(spec: Spec) -> Any:
    """Return ones of the shape of this rank's block of `spec`."""
    array = spec.place.backend.zeros(spec.local_shape, spec.dtype)
    array += 1
    return array
