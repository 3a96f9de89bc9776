"""How a tensor lies along one axis of a mesh: replicated, sharded or pending."""

from __future__ import annotations

from dataclasses import dataclass


class Placement:
    """One axis' share in a layout: `Replicate`, `Shard` or `Partial`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every member along the axis holds the same, whole values."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Each member along the axis holds one chunk of dim `dim`."""

    dim: int

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Each member along the axis holds a summand; the value is their sum."""

    def __repr__(self) -> str:
        return "Partial()"


Layout = tuple[Placement, ...]
"""One placement for each axis of a mesh, in axis order."""

REPLICATE = Replicate()
PARTIAL = Partial()


def replicated(axes: int) -> Layout:
    """Return the layout of a tensor that is whole on every rank of `axes` axes."""
    return (REPLICATE,) * axes


def written_change(axis_names: tuple[str, ...], before: Layout, after: Layout) -> str:
    """Return the call that brings a tensor from `before` to `after`, as users write it.

    Only what changes: ``.with_sharding(tp=Shard(1))``; without the axis where it is the
    only one.
    """
    if len(axis_names) == 1:
        return f".with_sharding({after[0]!r})"
    changes = [
        f"{axis}={new!r}"
        for axis, old, new in zip(axis_names, before, after, strict=True)
        if old != new
    ]
    return f".with_sharding({', '.join(changes)})"


def sharding_axes(layout: Layout, dim: int) -> tuple[int, ...]:
    """Return the axes that shard `dim`, outermost first."""
    return tuple(
        axis
        for axis, placement in enumerate(layout)
        if isinstance(placement, Shard) and placement.dim == dim
    )
