"""Carrying out a route between layouts with collectives over single axes."""

from __future__ import annotations

from typing import Any

from tparmpi.comm import Place
from tparmpi.errors import ShardingError
from tparmpi.sharding import (
    Layout,
    Route,
    Shard,
    Step,
    chunk,
    chunk_sizes,
    find_route,
)
from tparmpi.tensors.spec import Spec, describe_layout


def redistribute(array: Any, spec: Spec, layout: Layout, *, embed: bool = False) -> Any:
    """Return this rank's block of the tensor under `layout`.

    Collective over the axes that change other than by slicing.

    Parameters
    ----------
    array
        This rank's block under ``spec.layout``; not changed, perhaps aliased.
    embed
        Whether the value may be written into a pending sum.

    Raises
    ------
    ShardingError
        If the layout cannot be reached: nothing becomes a pending sum unasked.
    """
    if layout == spec.layout:
        return array
    return follow(array, spec, route_to(spec, layout, embed=embed))


def route_to(spec: Spec, layout: Layout, *, embed: bool = False) -> Route:
    """Return the cheapest route from the layout of `spec` to `layout`. Local."""
    route = find_route(spec.shape, spec.place.shape, spec.layout, layout, embed)
    if route is None:
        wanted = describe_layout(spec.with_layout(layout))
        raise ShardingError(
            f"with_sharding: a tensor that is {describe_layout(spec)} cannot become "
            f"{wanted}: Partial is only ever the result of an operator; "
            "ask for Replicate() or Shard(dim)"
        )
    return route


def follow(array: Any, spec: Spec, route: Route) -> Any:
    """Return this rank's block at the end of `route`, which starts at `spec`."""
    for step in route.steps:
        after = spec.with_layout(step.after)
        array = _STEPS[step.kind](array, spec, after, step)
        spec = after
    return array


def _all_gather(array: Any, before: Spec, after: Spec, step: Step) -> Any:
    group = before.place.axis_group(step.axis)
    if group.size == 1:
        return array
    dim = _dim(step.source)
    sizes = chunk_sizes(after.local_shape[dim], group.size)
    return group.all_gather(array, dim, sizes)


def _all_reduce(array: Any, before: Spec, after: Spec, step: Step) -> Any:
    group = before.place.axis_group(step.axis)
    return array if group.size == 1 else group.all_reduce(array)


def _reduce_scatter(array: Any, before: Spec, after: Spec, step: Step) -> Any:
    group = before.place.axis_group(step.axis)
    return array if group.size == 1 else group.reduce_scatter(array, _dim(step.target))


def _all_to_all(array: Any, before: Spec, after: Spec, step: Step) -> Any:
    group = before.place.axis_group(step.axis)
    if group.size == 1:
        return array
    concat_dim = _dim(step.source)
    sizes = chunk_sizes(after.local_shape[concat_dim], group.size)
    return group.all_to_all(array, _dim(step.target), concat_dim, sizes)


def _slice(array: Any, before: Spec, after: Spec, step: Step) -> Any:
    return array[_place_in(before, step.axis, _dim(step.target))]


def _embed(array: Any, before: Spec, after: Spec, step: Step) -> Any:
    if before.place.shape[step.axis] == 1:
        return array
    if isinstance(step.source, Shard):
        total = before.place.backend.zeros(after.local_shape, before.dtype)
        total[_place_in(after, step.axis, step.source.dim)] = array
        return total
    if before.place.coordinates[step.axis] == 0:
        return array
    return before.place.backend.zeros(after.local_shape, before.dtype)


_STEPS = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "embed": _embed,
}


def _dim(placement: object) -> int:
    assert isinstance(placement, Shard)
    return placement.dim


def _place_in(whole: Spec, axis: int, dim: int) -> tuple[slice, ...]:
    """This rank's chunk along `axis` of `dim`, as slices of the block of `whole`."""
    place: Place = whole.place
    start, size = chunk(
        whole.local_shape[dim], place.shape[axis], place.coordinates[axis]
    )
    return (slice(None),) * dim + (slice(start, start + size),)
