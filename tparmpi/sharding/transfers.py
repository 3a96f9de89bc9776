"""Transfers of a tensor from one place to another: which member sends what to whom.

Pure: places are given by their axis sizes and their members' ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from tparmpi.sharding.chunks import block
from tparmpi.sharding.placements import REPLICATE, Layout, Shard

Region = tuple[slice, ...]


class Held(NamedTuple):
    """How a tensor lies on one of the places.

    Attributes
    ----------
    layout
        Without pending sums.
    axis_sizes
        Of the place.
    ranks
        Its members, in order.
    """

    layout: Layout
    axis_sizes: tuple[int, ...]
    ranks: tuple[int, ...]


class Piece(NamedTuple):
    """Elements that go from one member to another.

    Attributes
    ----------
    source, target
        Numbers of the members in their places.
    taken, put
        The elements in the source's and in the target's block.
    """

    source: int
    target: int
    taken: Region
    put: Region


def leader(target: int, sources: Sequence[int], targets: Sequence[int]) -> int:
    """Return the number of the source that member `target` is led by.

    Itself where the same rank is a member of both places, else the one that lies where
    it lies, as far as the numbers of members allow. Parameters as in `Held.ranks`.
    """
    rank = targets[target]
    if rank in sources:
        return sources.index(rank)
    return target * len(sources) // len(targets)


@lru_cache(maxsize=4096)
def pieces(shape: tuple[int, ...], source: Held, target: Held) -> tuple[Piece, ...]:
    """Return what must go where, by target, then source.

    Every element of a target's block comes once: from the target's leader if that has
    it, else from the replica that is nearest to it. Empty pieces are left out.
    """
    owners = _owners(shape, source)
    found = []
    for number, coordinates in enumerate(_grid(target.axis_sizes)):
        into = block(shape, target.layout, target.axis_sizes, coordinates)
        led_by = leader(number, source.ranks, target.ranks)
        for (offset, extent), members in owners.items():
            common = _intersection(into, (offset, extent))
            if common is None:
                continue
            nearest = min(members, key=lambda member: (abs(member - led_by), member))
            found.append(
                Piece(
                    nearest, number, _region(common, offset), _region(common, into[0])
                )
            )
    return tuple(found)


_Block = tuple[tuple[int, ...], tuple[int, ...]]


def _grid(axis_sizes: tuple[int, ...]) -> product[tuple[int, ...]]:
    return product(*map(range, axis_sizes))


def _owners(shape: tuple[int, ...], held: Held) -> dict[_Block, list[int]]:
    """The distinct blocks, and the members that hold each."""
    owners: dict[_Block, list[int]] = {}
    for number, coordinates in enumerate(_grid(held.axis_sizes)):
        found = block(shape, held.layout, held.axis_sizes, coordinates)
        owners.setdefault(found, []).append(number)
    return owners


def _intersection(a: _Block, b: _Block) -> _Block | None:
    starts, extents = [], []
    for start_a, size_a, start_b, size_b in zip(*a, *b, strict=True):
        start = max(start_a, start_b)
        starts.append(start)
        extents.append(min(start_a + size_a, start_b + size_b) - start)
    if any(size <= 0 for size in extents):
        return None
    return tuple(starts), tuple(extents)


def _region(part: _Block, offset: tuple[int, ...]) -> Region:
    """`part`, in global numbers, within the block that begins at `offset`."""
    return tuple(
        slice(start - first, start - first + size)
        for start, size, first in zip(*part, offset, strict=True)
    )


def layout_on(
    layout: Layout, axes: Sequence[str], target_axes: Sequence[str]
) -> Layout:
    """Return the layout on another place that is most alike: by the axes' names.

    An axis that the other place has too keeps its placement; pending sums and all else
    are replicated.
    """
    by_name = dict(zip(axes, layout, strict=True))
    return tuple(
        placement if isinstance(placement, Shard) else REPLICATE
        for placement in (by_name.get(axis, REPLICATE) for axis in target_axes)
    )


def elements_moved(shape: tuple[int, ...], source: Held, target: Held) -> int:
    """Return how many elements go from one rank to another."""
    return sum(
        prod(part.stop - part.start for part in piece.taken)
        for piece in pieces(shape, source, target)
        if source.ranks[piece.source] != target.ranks[piece.target]
    )
