"""Which axis of a place a layer is split over, and tensors brought to layouts on it."""

from __future__ import annotations

from collections.abc import Sequence

from tparmpi.comm import Group, Place
from tparmpi.errors import UsageError
from tparmpi.sharding import REPLICATE, Layout, Placement, Shard, replicated
from tparmpi.tensors import Tensor
from tparmpi.tensors.request import plain_place


def axis_number(place: Place, axis: str) -> int | None:
    """Return the number of the axis that layers split over, or None. Local.

    It is the axis named `axis`; a group counts as its only axis, whatever its name. On
    a mesh without that axis nothing is split.
    """
    inner = plain_place("nn", place)
    if axis in inner.axes:
        return inner.axes.index(axis)
    return 0 if isinstance(inner, Group) else None


def axis_size(place: Place, axis: str) -> int:
    """Return the number of members that layers are split over. Local."""
    number = axis_number(place, axis)
    return 1 if number is None else place.shape[number]


def layout_over(
    place: Place,
    axis: str,
    placement: Placement,
    other_axis: str | None = None,
    other: Placement = REPLICATE,
) -> Layout:
    """Return the layout with `placement` on the axis split over. Local.

    Parameters
    ----------
    other_axis, other
        An axis of a mesh, and the placement on it where the mesh has it.

    Raises
    ------
    UsageError
        If both axes are the same.
    """
    if axis == other_axis:
        raise UsageError(
            f"nn: '{axis}' is given as both axes of a layer that two axes split; name "
            "two axes of a mesh"
        )
    layout = list(replicated(len(place.shape)))
    number = axis_number(place, axis)
    if number is not None:
        layout[number] = placement
    if other_axis in place.axes:
        layout[place.axes.index(other_axis)] = other
    return tuple(layout)


def placement_over(x: Tensor, axis: str) -> Placement:
    """Return how `x` lies over the axis split over; whole without it. Local."""
    number = axis_number(x.device, axis)
    return REPLICATE if number is None else x.layout[number]


def with_placement(
    x: Tensor, axis: str, placement: Placement, *, regather: bool = False
) -> Tensor:
    """Return `x` with `placement` on the axis split over; members may become empty.

    Collective over the axis; `x` itself where it does not exist. `regather` as for
    `Tensor.with_sharding`.
    """
    number = axis_number(x.device, axis)
    if number is None:
        return x
    layout = (*x.layout[:number], placement, *x.layout[number + 1 :])
    return x.with_sharding(layout, allow_empty=True, regather=regather)


def scatter_tokens(x: Tensor, axis: str) -> Tensor:
    """Return `x` (B, T, ...) with its tokens split over `axis`.

    Collective over the axis: a reduce_scatter where `x` is a pending sum there, nothing
    where it is whole. Split are the rows, where each member gets as many: their blocks
    are contiguous, so that nothing is packed; the positions otherwise. With
    `gather_tokens` this is sequence parallelism, Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models" (2022).
    """
    number = axis_number(x.device, axis)
    if number is None:
        return x
    parts, nested = x.device.shape[number], True
    for other, placement in enumerate(x.layout):
        if placement == Shard(0) and other != number:
            parts *= x.device.shape[other]
            # Rows that a later axis splits would have to be gathered first.
            nested &= other < number
    rows = nested and x.shape[0] % parts == 0
    return with_placement(x, axis, Shard(0 if rows else 1))


def gather_tokens(x: Tensor, axis: str) -> Tensor:
    """Return `x` (B, T, ...) with all its tokens on each member along `axis`.

    Collective over the axis: an all_gather, of which the tape keeps the shard; all
    layers that read the result share one more in the backward pass.
    """
    return with_placement(x, axis, REPLICATE, regather=True)


def check_split(
    layer: str, split: str | None, known: Sequence[str], argument: str = "split"
) -> None:
    """Raise `UsageError` unless `split` is None or one of `known`."""
    if split is not None and split not in known:
        words = " or ".join(repr(word) for word in known)
        raise UsageError(
            f"{layer}: {argument} must be {words} or None, it is {split!r}"
        )
