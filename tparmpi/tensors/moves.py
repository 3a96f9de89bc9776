"""Carrying out moves along a split dim with messages between its members.

What a member keeps is copied, the rest goes in one message for each pair of members, so
that none holds more than its own blocks, what it sends and what it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from tparmpi.comm import Group
from tparmpi.sharding import End, Move, Span, chunks_over, find_moves
from tparmpi.tensors.plan import Plan


def within(dim: int, indices: slice) -> tuple[slice, ...]:
    """Return the key of the `indices` of `dim`, and of all those of the dims before."""
    return (*(slice(None),) * dim, indices)


def moving_group(plan: Plan, factor: str) -> Group | None:
    """Return the members that split the moved `factor`, None if none do. Local."""
    for axis in plan.factors[factor].axes:
        group = plan.place.axis_group(axis)
        if group.size > 1:
            return group
    return None


def moves_between(
    group: Group | None,
    spans: Sequence[Span],
    sources: Sequence[int],
    targets: Sequence[int],
) -> tuple[Move, ...]:
    """Return the moves of this member for operands and outputs cut by the chunk rule.

    Local.

    Parameters
    ----------
    group
        None where the dim is whole.
    sources, targets
        Whole length of the dim in each operand and each output.
    """
    members, member = (1, 0) if group is None else (group.size, group.rank)
    return _moves_of(tuple(spans), tuple(sources), tuple(targets), members, member)


@lru_cache(maxsize=4096)
def _moves_of(
    spans: tuple[Span, ...],
    sources: tuple[int, ...],
    targets: tuple[int, ...],
    members: int,
    member: int,
) -> tuple[Move, ...]:
    return find_moves(
        spans,
        tuple(chunks_over(length, members) for length in sources),
        tuple(chunks_over(length, members) for length in targets),
        member,
    )


def carry(
    group: Group | None,
    moves: Sequence[Move],
    arrays: Sequence[Any],
    made: Sequence[Any],
    dim: int,
) -> None:
    """Write what the moves say of the `arrays` into the arrays `made`.

    Collective over the members of the moves.

    Parameters
    ----------
    moves
        All that this member has a part in.
    arrays
        This member's blocks of the operands, alike but for the length of `dim`.
    made
        This member's blocks of the outputs.
    """
    _carry(group, moves, arrays, made, dim, _assign)


def carry_adding(
    group: Group | None,
    moves: Sequence[Move],
    arrays: Sequence[Any],
    made: Sequence[Any],
    dim: int,
) -> None:
    """Add what the moves say of the `arrays` to the arrays `made`, in member order.

    The adjoint of `carry` for moves that read an index more than once. Collective over
    the members of the moves.
    """
    _carry(group, moves, arrays, made, dim, _add)


def carry_back(
    group: Group | None,
    moves: Sequence[Move],
    grads: Sequence[Any],
    made: Sequence[Any],
    dim: int,
) -> None:
    """Take the gradients of the outputs the way back: the adjoint of `carry`.

    For moves that read no index twice. Collective over the members of the moves.
    """
    carry(group, [move.reversed() for move in moves], grads, made, dim)


def _assign(into: Any, values: Any) -> None:
    into[...] = values


def _add(into: Any, values: Any) -> None:
    into += values


def _carry(
    group: Group | None,
    moves: Sequence[Move],
    arrays: Sequence[Any],
    made: Sequence[Any],
    dim: int,
    write: Callable[[Any, Any], None],
) -> None:
    around = (*arrays[0].shape[:dim], *arrays[0].shape[dim + 1 :])
    if prod(around) == 0:
        return
    rank = 0 if group is None else group.rank
    outgoing: dict[int, list[Any]] = {}
    incoming: dict[int, list[Any]] = {}
    for move in moves:
        source, target, length = move
        if source.member == rank:
            part = arrays[source.array][within(dim, source.indices(length))]
            outgoing.setdefault(target.member, []).append(part)
        if target.member == rank:
            part = made[target.array][within(dim, target.indices(length))]
            incoming.setdefault(source.member, []).append(part)
    arriving, leaving = {}, []
    if group is not None:
        for member, places in incoming.items():
            if member != rank:
                # What need not be cut into pieces is received in its place.
                into = places[0] if write is _assign and len(places) == 1 else None
                if into is None:
                    length = sum(place.shape[dim] for place in places)
                    shape = (*around[:dim], length, *around[dim:])
                    into = group.foreseen(shape, places[0].dtype)
                arriving[member] = group.start.recv(member, out=into)
        for member, parts in outgoing.items():
            if member != rank:
                leaving.append(group.start.send(_joined(group, parts, dim), member))
    for member, places in sorted(incoming.items()):
        if member == rank:
            values = outgoing[rank]
        else:
            values = _cut(arriving.pop(member).wait(), places, dim)
        for into, value in zip(places, values, strict=True):
            if into is not value:
                write(into, value)
    for handle in leaving:
        handle.wait()


def _joined(group: Group, parts: list[Any], dim: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    return group.backend.xp.concatenate(parts, axis=dim)


def _cut(message: Any, places: list[Any], dim: int) -> list[Any]:
    """The message in pieces as long as the places they go to."""
    if message is places[0]:
        return places
    pieces = []
    stop = 0
    for place in places:
        start, stop = stop, stop + place.shape[dim]
        pieces.append(message[within(dim, slice(start, stop))])
    return pieces


Touched = Mapping[int, tuple[str, tuple[Span, ...], int]]
"""For each dim that an operator touches: its factor, the spans, its new length."""


def rearrange(plan: Plan, x: Any, touched: Touched, fill: Any = None) -> Any:
    """Return `x` with the indices of some dims in other places, one dim after another.

    A view where one span of each dim is all that is needed of a whole dim. Collective
    over the axes that split the touched dims.

    Parameters
    ----------
    fill
        Value of what no span reaches; None where they reach everything.
    """
    for dim, (factor, spans, length) in touched.items():
        group = moving_group(plan, factor)
        if group is None and len(spans) == 1 and spans[0].length == length:
            here = End(0, 0, spans[0].start, spans[0].step)
            x = x[within(dim, here.indices(length) if length else slice(0, 0))]
            continue
        moves = moves_between(group, spans, [plan.rule.sizes[factor]], [length])
        shape = _resized(x.shape, dim, length, group)
        made = plan.backend.empty(shape, x.dtype)
        if fill is not None:
            made[...] = fill
        carry(group, moves, [x], [made], dim)
        x = made
    return x


def rearrange_back(plan: Plan, grad: Any, touched: Touched) -> Any:
    """Return the gradient of what `rearrange` was given. Collective as it is."""
    for dim, (factor, spans, length) in reversed(list(touched.items())):
        group = moving_group(plan, factor)
        before = plan.rule.sizes[factor]
        moves = moves_between(group, spans, [before], [length])
        shape = _resized(grad.shape, dim, before, group)
        made = plan.backend.zeros(shape, grad.dtype)
        carry_back(group, moves, [grad], [made], dim)
        grad = made
    return grad


def _resized(
    shape: tuple[int, ...], dim: int, length: int, group: Group | None
) -> tuple[int, ...]:
    """`shape` with this member's part of a dim of `length`."""
    if group is not None:
        length = chunks_over(length, group.size)[group.rank][1]
    return (*shape[:dim], length, *shape[dim + 1 :])
