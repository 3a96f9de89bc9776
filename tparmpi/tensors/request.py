"""Reading the layouts that users ask for."""

from __future__ import annotations

from typing import Any

from tparmpi.comm import Place
from tparmpi.errors import ShardingError, UsageError
from tparmpi.sharding import (
    REPLICATE,
    Layout,
    Placement,
    Replicate,
    Shard,
    smallest_chunk,
)
from tparmpi.tensors.spec import Spec


def plain_place(name: str, place: Any) -> Place:
    """Return the device, group or mesh that a caller of `name` gave, without a view.

    Raises
    ------
    UsageError
        If it is none.
    """
    if not isinstance(place, Place):
        raise UsageError(
            f"{name}: {place!r} is no place for a tensor; give a device, a group or a "
            "mesh, such as tpm.device() or tpm.group(tpm.devices())"
        )
    return place.inner()


def requested_layout(
    name: str,
    place: Place,
    ndim: int,
    start: Layout,
    sharding: Placement | Layout | None,
    by_axis: dict[str, Placement],
) -> Layout:
    """Return the layout that a caller of `name` asks for. Local.

    Parameters
    ----------
    ndim
        Number of dims of the tensor.
    start
        Placements of the axes that are not asked about.
    sharding
        A placement for the only axis, or a tuple in axis order.
    by_axis
        Placements of single axes.

    Raises
    ------
    ShardingError
        If an axis or dim does not exist.
    """
    layout = list(start)
    if sharding is not None:
        given = sharding if isinstance(sharding, tuple) else (sharding,)
        if len(given) != len(layout):
            raise ShardingError(
                f"{name}: {len(given)} shardings for {len(layout)} axes "
                f"({', '.join(place.axes)}); name the axis: "
                f"{name.split()[0]}({place.axes[-1]}={given[0]!r})"
            )
        layout = list(given)
    for axis, placement in by_axis.items():
        if axis not in place.axes:
            raise ShardingError(
                f"{name}: there is no axis '{axis}'; "
                f"the axes are {', '.join(place.axes)}"
            )
        layout[place.axes.index(axis)] = placement
    return tuple(_checked(name, placement, ndim) for placement in layout)


def _checked(name: str, placement: Any, ndim: int) -> Placement:
    if not isinstance(placement, Placement):
        raise ShardingError(
            f"{name}: {placement!r} is no sharding; use Replicate() or Shard(dim)"
        )
    if isinstance(placement, Shard):
        if not isinstance(placement.dim, int) or not -ndim <= placement.dim < ndim:
            raise ShardingError(
                f"{name}: {placement!r} names no dim of a tensor of {ndim} dims"
            )
        return Shard(placement.dim % ndim)
    return REPLICATE if isinstance(placement, Replicate) else placement


def refuse_empty(spec: Spec, layout: Layout, name: str = "with_sharding") -> None:
    """Raise if a change of `spec` to `layout` would leave a member without elements.

    Raises
    ------
    ShardingError
        Naming the dim, its size and the axis.
    """
    place = spec.place
    for axis, placement in enumerate(layout):
        if not isinstance(placement, Shard) or placement == spec.layout[axis]:
            continue
        dim = placement.dim
        if smallest_chunk(spec.shape[dim], dim, layout, place.shape) == 0:
            raise ShardingError(
                f"{name}: dim {dim} of size {spec.shape[dim]} over "
                f"{place.shape[axis]} members of axis '{place.axes[axis]}' would "
                "leave a member empty; pass allow_empty=True to permit it"
            )
