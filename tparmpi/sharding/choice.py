"""The joint choice of layouts for one operator over all axes of a mesh.

On each axis an operator may run with all operands whole, with one of its factors split,
or with a pending sum passed through it. Every combination over the axes is costed by
the bytes that its redistributions move (forward only), and the cheapest is taken; ties
go to the fewest steps, then to the first in a fixed order, so that all ranks choose
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tparmpi.errors import ShardingError
from tparmpi.sharding.placements import (
    PARTIAL,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Shard,
    written_change,
)
from tparmpi.sharding.routes import Route, find_route
from tparmpi.sharding.rules import COMBINE, MOVED, Rule


@dataclass(frozen=True, slots=True)
class Operand:
    """What the choice needs to know of one operand; a parameter may have a name."""

    shape: tuple[int, ...]
    layout: Layout
    itemsize: int
    is_parameter: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Traits:
    """How pending sums pass through an operator.

    Attributes
    ----------
    linear
        Numbers of the operands in which, taken alone, the operator is linear.
    additive
        Whether pending sums pass if all operands are pending.
    """

    linear: tuple[int, ...] = ()
    additive: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """What an operator does along one axis.

    ``kind`` is ``"whole"``, ``"factor"`` (split `factor`), ``"linear"`` (operand
    `operand` is a pending sum) or ``"additive"`` (all operands are).
    """

    kind: str
    factor: str = ""
    operand: int = -1


@dataclass(frozen=True, slots=True)
class Choice:
    """The layouts an operator runs with.

    Attributes
    ----------
    candidates
        One for each axis.
    operands
        The layout that each operand is brought to.
    routes
        How each operand gets there.
    outputs
        Layouts of the outputs.
    output_gradients
        Layout that the operator's backward needs for each output's gradient.
    may_pass
        For each axis, whether a pending gradient passes through the backward.
    operand_gradients
        Layout of each operand's gradient.
    gathered
        Numbers of the operands that are gathered or exchanged.
    """

    candidates: tuple[Candidate, ...]
    operands: tuple[Layout, ...]
    routes: tuple[Route, ...]
    outputs: tuple[Layout, ...]
    output_gradients: tuple[Layout, ...]
    may_pass: tuple[bool, ...]
    operand_gradients: tuple[Layout, ...]
    gathered: tuple[int, ...]


def choose(
    name: str,
    rule: Rule,
    traits: Traits,
    operands: Sequence[Operand],
    axis_names: tuple[str, ...],
    axis_sizes: tuple[int, ...],
) -> Choice:
    """Return the cheapest combination of candidates over all axes.

    Raises
    ------
    ShardingError
        If only gathering a parameter would let the operator run.
    """
    per_axis = [
        _axis_candidates(rule, traits, operands, axis)
        for axis in range(len(axis_sizes))
    ]
    best: tuple[tuple[bool, bool, int, int], _Trial] | None = None
    for candidates in product(*per_axis):
        trial = _try(rule, operands, candidates, axis_sizes)
        if trial is None:
            continue
        steps = sum(len(route.steps) for route in trial.routes)
        refused = any(operands[i].is_parameter for i in trial.gathered)
        rank = (refused, bool(trial.gathered), trial.cost, steps)
        if best is None or rank < best[0]:
            best = (rank, trial)
    if best is None or best[0][0]:
        trial = None if best is None else best[1]
        raise ShardingError(_refusal(name, operands, trial, axis_names))
    trial = best[1]
    outputs, gradients, may_pass, operand_gradients = _results(
        rule, traits, trial.candidates, len(operands)
    )
    return Choice(
        trial.candidates,
        trial.layouts,
        trial.routes,
        outputs,
        gradients,
        may_pass,
        operand_gradients,
        trial.gathered,
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    candidates: tuple[Candidate, ...]
    layouts: tuple[Layout, ...]
    routes: tuple[Route, ...]
    cost: int
    gathered: tuple[int, ...]


def _axis_candidates(
    rule: Rule, traits: Traits, operands: Sequence[Operand], axis: int
) -> list[Candidate]:
    placements = [operand.layout[axis] for operand in operands]
    candidates = [Candidate("whole")]
    for dims, placement in zip(rule.operands, placements, strict=True):
        if isinstance(placement, Shard) and dims[placement.dim]:
            candidate = Candidate("factor", factor=dims[placement.dim][0])
            if candidate not in candidates:
                candidates.append(candidate)
    for number in traits.linear:
        if isinstance(placements[number], Partial):
            candidates.append(Candidate("linear", operand=number))
    if traits.additive and all(isinstance(p, Partial) for p in placements):
        candidates.append(Candidate("additive"))
    return candidates


def _try(
    rule: Rule,
    operands: Sequence[Operand],
    candidates: tuple[Candidate, ...],
    axis_sizes: tuple[int, ...],
) -> _Trial | None:
    factors = {c.factor for c in candidates if c.kind == "factor"}
    for factor in factors:
        over = [
            size
            for c, size in zip(candidates, axis_sizes, strict=True)
            if c.factor == factor
        ]
        if not rule.shardable(factor, over):
            return None
    layouts = tuple(
        tuple(_operand_placement(rule, number, c) for c in candidates)
        for number in range(len(operands))
    )
    routes = []
    gathered = []
    cost = 0
    for number, (operand, layout) in enumerate(zip(operands, layouts, strict=True)):
        route = find_route(operand.shape, axis_sizes, operand.layout, layout)
        if route is None:
            return None
        if not route.is_silent(axis_sizes):
            gathered.append(number)
        cost += route.cost * operand.itemsize
        routes.append(route)
    return _Trial(candidates, layouts, tuple(routes), cost, tuple(gathered))


def _operand_placement(rule: Rule, number: int, candidate: Candidate) -> Placement:
    if candidate.kind == "factor":
        dim = rule.leading_dim(rule.operands[number], candidate.factor)
        return REPLICATE if dim is None else Shard(dim)
    pending = candidate.kind == "additive" or candidate.operand == number
    return PARTIAL if pending else REPLICATE


def _results(
    rule: Rule, traits: Traits, candidates: tuple[Candidate, ...], operand_count: int
) -> tuple[
    tuple[Layout, ...], tuple[Layout, ...], tuple[bool, ...], tuple[Layout, ...]
]:
    single = operand_count == 1 and bool(traits.linear)
    may_pass = tuple(single and c.kind != "factor" for c in candidates)
    outputs = tuple(
        tuple(_output_placement(rule, dims, c) for c in candidates)
        for dims in rule.outputs
    )
    output_gradients = tuple(
        tuple(REPLICATE if isinstance(p, Partial) else p for p in layout)
        for layout in outputs
    )
    operand_gradients = tuple(
        tuple(_gradient_placement(rule, number, c) for c in candidates)
        for number in range(operand_count)
    )
    return outputs, output_gradients, may_pass, operand_gradients


def _output_placement(
    rule: Rule, dims: tuple[tuple[str, ...], ...], candidate: Candidate
) -> Placement:
    if candidate.kind == "whole":
        return REPLICATE
    if candidate.kind != "factor":
        return PARTIAL
    dim = rule.leading_dim(dims, candidate.factor)
    if dim is not None:
        return Shard(dim)
    combines = rule.kinds[candidate.factor] in (COMBINE, MOVED)
    return REPLICATE if combines else PARTIAL


def _gradient_placement(rule: Rule, number: int, candidate: Candidate) -> Placement:
    """Layout along one axis of the gradient that a backward gives operand `number`."""
    if candidate.kind == "whole" or candidate.kind == "additive":
        return REPLICATE
    term = rule.terms[number]
    if candidate.kind == "linear":
        others = candidate.operand != number
        return (
            PARTIAL if others and rule.terms[candidate.operand] == term else REPLICATE
        )
    dim = rule.leading_dim(rule.operands[number], candidate.factor)
    if dim is not None:
        return Shard(dim)
    in_output = any(rule.has(dims, candidate.factor) for dims in rule.outputs)
    if in_output or rule.term_has(term, candidate.factor):
        return PARTIAL
    return REPLICATE


def _refusal(
    name: str,
    operands: Sequence[Operand],
    trial: _Trial | None,
    axis_names: tuple[str, ...],
) -> str:
    """Say which parameter the cheapest way to run would gather, and the remedy."""
    if trial is None:
        layouts = ", ".join(str(operand.layout) for operand in operands)
        return f"{name}: no layout of the operands {layouts} lets it run"
    number = next(i for i in trial.gathered if operands[i].is_parameter)
    operand, needed = operands[number], trial.layouts[number]
    changed = [
        f"{old!r} on axis '{axis}' but needed as {new!r} there"
        for axis, old, new in zip(axis_names, operand.layout, needed, strict=True)
        if old != new
    ]
    named = f" '{operand.name}'" if operand.name else ""
    return (
        f"{name}: operand {number}, parameter{named} of shape {operand.shape}, is "
        f"{' and '.join(changed)}, and a parameter is never gathered unasked; call "
        f"{written_change(axis_names, operand.layout, needed)} on it"
    )
