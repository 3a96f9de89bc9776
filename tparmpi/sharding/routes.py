r"""Redistribution plans: the cheapest steps from one layout to another.

A step changes one axis:

==============  ==============  =================  =================
from \ to       Replicate       Shard(j)           Partial
==============  ==============  =================  =================
Replicate       -               slice              embed
Shard(i)        all_gather      all_to_all         embed
Partial         all_reduce      reduce_scatter     -
==============  ==============  =================  =================

``embed`` writes a value into a pending sum (a replicated one on the first member only,
a shard at its place); it is for gradients, where layouts are the library's own choice.

An axis changes only while no axis to its right shards the dim it leaves or enters,
since that dim is split first by the left axis. Paths are found by Dijkstra's algorithm
over the layouts that use the dims at hand; the cost is the number of elements moved,
summed over the mesh, then the number of steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tparmpi.sharding.chunks import chunk_sizes
from tparmpi.sharding.placements import (
    PARTIAL,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
)

SILENT = frozenset({"slice", "all_reduce", "reduce_scatter", "embed"})
"""Kinds of steps that an operator may take without being asked to."""


@dataclass(frozen=True, slots=True)
class Step:
    """One axis' change on the way from one layout to another."""

    kind: str
    axis: int
    before: Layout
    after: Layout

    @property
    def source(self) -> Placement:
        return self.before[self.axis]

    @property
    def target(self) -> Placement:
        return self.after[self.axis]


@dataclass(frozen=True, slots=True)
class Route:
    """Steps from one layout to another and what they move.

    Attributes
    ----------
    steps
        In the order in which they are taken.
    cost
        Elements received, summed over all ranks of the mesh.
    """

    steps: tuple[Step, ...]
    cost: int

    def is_silent(self, axis_sizes: tuple[int, ...]) -> bool:
        """Return whether no step gathers or exchanges shards between members."""
        return all(
            step.kind in SILENT or axis_sizes[step.axis] == 1 for step in self.steps
        )


@lru_cache(maxsize=65536)
def find_route(
    shape: tuple[int, ...],
    axis_sizes: tuple[int, ...],
    source: Layout,
    target: Layout,
    embed: bool = False,
) -> Route | None:
    """Return the cheapest route from `source` to `target`, or None if there is none.

    Parameters
    ----------
    shape
        Global shape of the tensor.
    axis_sizes
        Number of members along each axis of the mesh.
    embed
        Whether values may be written into pending sums.
    """
    if source == target:
        return Route((), 0)
    dims = sorted(
        {p.dim for layout in (source, target) for p in layout if isinstance(p, Shard)}
    )
    choices: list[Placement] = [REPLICATE, PARTIAL, *(Shard(dim) for dim in dims)]
    settled: set[Layout] = set()
    queue: list[tuple[int, int, int, Layout, tuple[Step, ...]]] = [
        (0, 0, 0, source, ())
    ]
    pushed = 1
    while queue:
        cost, count, _, layout, steps = heapq.heappop(queue)
        if layout == target:
            return Route(steps, cost)
        if layout in settled:
            continue
        settled.add(layout)
        for step in _steps_from(layout, choices, embed):
            if step.after not in settled:
                total = cost + _step_cost(step, shape, axis_sizes)
                entry = (total, count + 1, pushed, step.after, (*steps, step))
                heapq.heappush(queue, entry)
                pushed += 1
    return None


def _steps_from(
    layout: Layout, choices: list[Placement], embed: bool
) -> Iterator[Step]:
    for axis, placement in enumerate(layout):
        for choice in choices:
            kind = _step_kind(placement, choice)
            if kind is None or (kind == "embed" and not embed):
                continue
            right = layout[axis + 1 :]
            if any(isinstance(p, Shard) and p in right for p in (placement, choice)):
                continue
            after = (*layout[:axis], choice, *right)
            yield Step(kind, axis, layout, after)


def _step_kind(source: Placement, target: Placement) -> str | None:
    if source == target:
        return None
    if isinstance(target, Partial):
        return "embed"
    if isinstance(source, Replicate):
        return "slice"
    if isinstance(source, Shard):
        return "all_gather" if isinstance(target, Replicate) else "all_to_all"
    return "all_reduce" if isinstance(target, Replicate) else "reduce_scatter"


def _step_cost(step: Step, shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> int:
    members = axis_sizes[step.axis]
    copies = prod(
        size
        for axis, size in enumerate(axis_sizes)
        if axis != step.axis and not isinstance(step.before[axis], Shard)
    )
    total = prod(shape) * copies
    if step.kind in ("slice", "embed"):
        return 0
    if step.kind == "all_reduce":
        return 2 * (members - 1) * total
    if step.kind in ("all_gather", "reduce_scatter"):
        return (members - 1) * total
    return total - copies * _kept_by_exchange(step, shape, members)


def _kept_by_exchange(step: Step, shape: tuple[int, ...], members: int) -> int:
    """Elements that an all_to_all leaves where they are."""
    assert isinstance(step.source, Shard) and isinstance(step.target, Shard)
    i, j = step.source.dim, step.target.dim
    if 0 in shape:
        return 0
    pairs = zip(
        chunk_sizes(shape[i], members), chunk_sizes(shape[j], members), strict=True
    )
    return sum(a * b for a, b in pairs) * (prod(shape) // (shape[i] * shape[j]))
