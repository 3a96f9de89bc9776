"""Moving a tensor to another place."""

from __future__ import annotations

from tparmpi.backend import MetaArray
from tparmpi.comm import Place
from tparmpi.errors import AutodiffError
from tparmpi.sharding import Layout, Placement
from tparmpi.sharding.transfers import layout_on
from tparmpi.tensors.bridge import bridge_between, settled
from tparmpi.tensors.registry import method
from tparmpi.tensors.request import plain_place, refuse_empty, requested_layout
from tparmpi.tensors.spec import spec_of
from tparmpi.tensors.tape import mode
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
        If its device records gradients, which pass between places in a pipeline only.
    ShardingError
        If an axis or dim does not exist, or a member would be left empty.
    """
    inner = plain_place("to", place)
    # Ranks without data know nothing of a history: all judge by the device.
    if x.device.is_autodiff and mode.recording and x.dtype.kind not in "biu":
        raise AutodiffError(
            f"to: {x.device} records gradients, which pass from place to place in a "
            "tpm.parallel.Pipeline only; to move the value, use tpm.no_grad()"
        )
    start = settled(x.spec)
    base = layout_on(start.layout, start.place.axes, inner.axes)
    layout = requested_layout("to", inner, x.ndim, base, sharding, by_axis)
    target = spec_of(inner, x.shape, x.dtype, layout)
    if not allow_empty:
        refuse_empty(target.with_layout(base), layout, "to")
    if inner is start.place:
        moved = x.to_layout(layout)
        return Tensor(moved.spec, moved.array, place)
    bridge = bridge_between(start.place, inner)
    handles = []
    if start.place.is_member:
        array = x.to_layout(start.layout).array
        handles = bridge.send([array], [start], [target])
    if inner.is_member:
        (made,) = bridge.expect().blocks([start], [target])
    else:
        made = MetaArray(target.local_shape, target.dtype)
    for handle in handles:
        handle.wait()
    return Tensor(target, made, place)
