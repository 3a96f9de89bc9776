"""Which axis of a place a layer is split over."""

from __future__ import annotations

from collections.abc import Sequence

from tparmpi.comm import Group, Place
from tparmpi.errors import UsageError
from tparmpi.sharding import Layout, Placement, replicated
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


def layout_over(place: Place, axis: str, placement: Placement) -> Layout:
    """Return the layout with `placement` on the axis split over. Local."""
    layout = list(replicated(len(place.shape)))
    number = axis_number(place, axis)
    if number is not None:
        layout[number] = placement
    return tuple(layout)


def check_split(layer: str, split: str | None, known: Sequence[str]) -> None:
    """Raise `UsageError` unless `split` is None or one of `known`."""
    if split is not None and split not in known:
        words = " or ".join(repr(word) for word in known)
        raise UsageError(f"{layer}: split must be {words} or None, it is {split!r}")
