"""Moving a tensor to another place."""

from __future__ import annotations

from typing import Any

import numpy as np

from tparmpi.backend import MetaArray
from tparmpi.comm import Place
from tparmpi.comm.blocks import NO_LEAD
from tparmpi.errors import AutodiffError
from tparmpi.sharding import Layout, Placement
from tparmpi.sharding.transfers import layout_on
from tparmpi.tensors.bridge import bridge_between, settled
from tparmpi.tensors.passes import Pass
from tparmpi.tensors.registry import method
from tparmpi.tensors.request import plain_place, refuse_empty, requested_layout
from tparmpi.tensors.spec import Spec, spec_of
from tparmpi.tensors.tape import Node, Parent, mode, reach, used_already
from tparmpi.tensors.tensor import Tensor


@method
def to(
    x: Tensor,
    place: Place,
    sharding: Placement | Layout | None = None,
    /,
    *,
    allow_empty: bool = False,
    **by_axis: Placement,
) -> Tensor:
    """Return the same value on another device, group or mesh.

    Collective over the members of both places; all other ranks get a shell and may
    leave the call out. Each rank sends and receives only elements that it has or lacks.

    Gradients go back the same way. For that all members of both places make the same
    calls, from `require_grad` to `backward`, on shells too.

    Parameters
    ----------
    place
        Where it is to live; the places may overlap.
    sharding, by_axis
        As for `Tensor.with_sharding`. Axes not named keep the placement of the axis of
        that name here; where there is none they are replicated.
    allow_empty
        Permit that a sharding asked for leaves members empty.

    Raises
    ------
    AutodiffError
        If some of the ranks ask for a gradient and others do not.
    ShardingError
        If an axis or dim does not exist, or a member would be left empty.
    """
    inner = plain_place("to", place)
    start = settled(x.spec)
    base = layout_on(start.layout, start.place.axes, inner.axes)
    layout = requested_layout("to", inner, x.ndim, base, sharding, by_axis)
    target = spec_of(inner, x.shape, x.dtype, layout)
    if not allow_empty:
        refuse_empty(target.with_layout(base), layout, "to")
    recorded = x.node is not None and mode.recording
    device = inner.autodiff() if recorded else place
    if inner is start.place:
        moved = x.to_layout(layout)
        node, slot = (moved.node, moved.slot) if recorded else (None, 0)
        return Tensor(moved.spec, moved.array, device, node, slot, moved.cell)
    head = np.array([recorded], np.uint8) if x.device.is_autodiff else None
    block = x.to_layout(start.layout).array if start.place.is_member else None
    made = _moved(block, start, target, head)
    node = None
    if recorded and mode.watching is not None:
        node = mode.watching.see([x])
    elif recorded:
        assert x.node is not None
        node = _Transfer((x.node, x.slot), start, target)
    return Tensor(target, made, device, node)


class _Transfer(Node):
    """A move between places on the tape."""

    __slots__ = ("start", "target")

    def __init__(self, parent: Parent, start: Spec, target: Spec) -> None:
        super().__init__((parent,), (target,))
        self.start = start
        self.target: Spec | None = target

    def check(self) -> None:
        """Raise `AutodiffError` if it has run. Local."""
        if self.target is None:
            raise used_already()

    def run_backward(self, run: Pass) -> None:
        """Move the gradient back. Collective over the members of both places."""
        start, target = self.start, self.target
        assert target is not None
        self.target = None
        (parent,) = self.parents
        assert parent is not None
        if not run.wants(parent[0]):
            return
        slot = self.slots[0]
        grad = None
        if target.place.is_member:
            slot.pool(target.layout)
            if slot.sums:
                grad = slot.take(target.layout)
            else:
                grad = target.place.backend.zeros(target.local_shape, target.dtype)
        made = _moved(grad, target, start, None)
        if start.place.is_member:
            parent[0].slots[parent[1]].add(made, start.layout)
        else:
            reach(parent)


def _moved(block: Any, start: Spec, target: Spec, head: Any) -> Any:
    """Return this rank's block of `target`, or its shape on other ranks.

    Collective over the members of both places.

    Parameters
    ----------
    block
        This rank's of `start`, if it has one.
    head
        Says whether gradients are to come back; the same on all ranks. None where that
        is not asked.
    """
    bridge = bridge_between(start.place, target.place)
    route = bridge.route([start], [target])
    heads = [] if head is None else [head]
    handles = []
    if start.place.is_member:
        handles = bridge.send([block], route, heads)
    made: Any = MetaArray(target.local_shape, target.dtype)
    if target.place.is_member:
        lead = NO_LEAD if head is None else head.copy()
        (made,) = bridge.expect(route, lead).wait()
        if head is not None:
            _check_alike(bool(lead[0]), bool(head[0]))
    for handle in handles:
        handle.wait()
    return made


def _check_alike(there: bool, here: bool) -> None:
    if there != here:
        has, lacks = ("here", "there") if here else ("there", "here")
        raise AutodiffError(
            f"to: the tensor requires a gradient {has}, but not {lacks}, on another "
            "rank; call require_grad(), and use no_grad(), on all ranks alike"
        )
