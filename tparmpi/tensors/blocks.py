"""The global shape of blocks that the members of a place bring."""

from __future__ import annotations

from typing import Any

from tparmpi.comm import Place
from tparmpi.errors import ShapeError, UsageError
from tparmpi.sharding import Layout, Shard, chunk_sizes


def shape_of_blocks(
    name: str, place: Place, array: Any, layout: Layout, remedy: str
) -> tuple[int, ...]:
    """Return the global shape of blocks of which this rank's is `array`.

    Collective over the axes that shard a dim.

    Parameters
    ----------
    name
        What errors call the operation.
    remedy
        What to do on a simulated mesh, where the other blocks are not known.

    Raises
    ------
    ShapeError
        On all members, if the blocks are not those of the chunk rule, or differ in
        their dtype or in other dims.
    UsageError
        On a simulated mesh.
    """
    shape = list(array.shape)
    for axis in reversed(range(len(layout))):
        placement = layout[axis]
        group = place.axis_group(axis)
        if not isinstance(placement, Shard) or group.size == 1:
            continue
        if place.kind == "meta":
            raise UsageError(
                f"{name}: a simulated mesh does not know the other ranks' blocks; "
                f"{remedy}"
            )
        dim, called = placement.dim, place.axes[axis]
        found = group.all_gather_object((tuple(shape), str(array.dtype)))
        others = {(len(s), s[:dim], s[dim + 1 :], dtype) for s, dtype in found}
        if len(others) > 1:
            blocks = ", ".join(f"{dtype} {s}" for s, dtype in found)
            raise ShapeError(
                f"{name}: dim {dim} is sharded over axis '{called}', whose members "
                f"brought the blocks {blocks}; they must agree in their dtype and all "
                "other dims"
            )
        lengths = [s[dim] for s, _ in found]
        shape[dim] = sum(lengths)
        if lengths != list(chunk_sizes(shape[dim], group.size)):
            raise ShapeError(
                f"{name}: dim {dim} is sharded over axis '{called}', whose members "
                f"brought {lengths} of it; by the chunk rule they hold "
                f"{list(chunk_sizes(shape[dim], group.size))}"
            )
    return tuple(shape)
