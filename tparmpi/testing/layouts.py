"""All layouts of an array, and tensors in them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from tparmpi.comm import Place
from tparmpi.sharding import PARTIAL, REPLICATE, Layout, Partial, Placement, Shard
from tparmpi.tensors import Tensor, from_local, spec_of


def all_layouts(ndim: int, axes: int = 1, *, partial: bool = True) -> list[Layout]:
    """Return every layout of an array of `ndim` dims on a place of `axes` axes."""
    choices: list[Placement] = [REPLICATE, *(Shard(dim) for dim in range(ndim))]
    if partial:
        choices.append(PARTIAL)
    return list(product(choices, repeat=axes))


def laid_out(
    array: np.ndarray[Any, Any], place: Place, layout: Layout | None = None
) -> Tensor:
    """Return `array`, the same on all ranks, as a tensor in `layout`. Local.

    Blocks may be empty. Pending sums are made of different summands on each member.
    """
    inner = place.inner()
    if layout is None:
        layout = (REPLICATE,) * len(inner.shape)
    spec = spec_of(inner, array.shape, array.dtype, layout)
    block = array[spec.local_slices].copy()
    for axis, placement in enumerate(layout):
        members, index = inner.shape[axis], inner.coordinates[axis]
        if isinstance(placement, Partial) and members > 1:
            # index * block on all but the first, which holds what is missing
            rest = members * (members - 1) // 2
            block = block * (index if index else 1 - rest)
    return from_local(block, place, layout, shape=array.shape)
