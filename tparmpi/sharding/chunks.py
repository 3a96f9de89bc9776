"""Chunk arithmetic: which part of a dim a member holds.

A dim of length L over n members: the first ``L % n`` members hold one element more
than the others. Where several axes shard one dim, the leftmost axis splits first.
"""

from __future__ import annotations

from math import prod

from tparmpi.sharding.placements import Layout, Shard


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return (offset, size) of chunk `index` of `length` elements in `parts` chunks."""
    size, extra = divmod(length, parts)
    return size * index + min(index, extra), size + (index < extra)


def chunk_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Return the size of every chunk of `length` elements in `parts` chunks."""
    return tuple(chunk(length, parts, index)[1] for index in range(parts))


def block(
    shape: tuple[int, ...],
    layout: Layout,
    axis_sizes: tuple[int, ...],
    coordinates: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offset, extent) per dim of the block held at `coordinates`."""
    offset = [0] * len(shape)
    extent = list(shape)
    for placement, parts, index in zip(layout, axis_sizes, coordinates, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            start, extent[dim] = chunk(extent[dim], parts, index)
            offset[dim] += start
    return tuple(offset), tuple(extent)


def smallest_chunk(
    length: int, dim: int, layout: Layout, axis_sizes: tuple[int, ...]
) -> int:
    """Return the fewest elements of `dim` that any member holds under `layout`."""
    for placement, parts in zip(layout, axis_sizes, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            length //= parts
    return length


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of an array of `shape`."""
    return prod(shape)
