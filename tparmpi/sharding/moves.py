"""Moves along one dim: which member sends which of its indices to which.

An operator that shifts indices, such as a slice or a join, maps runs of them from its
operands to its outputs (`Span`). Where the dim is split, each member holds a chunk of
either, and what one holds of a run and another needs is a `Move`. Every index that
stays with its member is a move from the member to itself; nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tparmpi.sharding.chunks import chunk

Chunks = tuple[tuple[int, int], ...]
"""(offset, size) of each member's part of a dim, in member order."""


class Span(NamedTuple):
    """A run of an output's indices and where they come from.

    Index ``first + i`` of the output is index ``start + step * i`` of the operand, for
    all i below `length`.

    Attributes
    ----------
    start, step
        In the operand; the step may be negative.
    first
        In the output.
    operand, output
        Numbers of the two.
    """

    start: int
    first: int
    length: int
    step: int = 1
    operand: int = 0
    output: int = 0


class End(NamedTuple):
    """Where a move begins or ends.

    Attributes
    ----------
    member
        Who holds it.
    array
        Number of the operand or output.
    start, step
        First index within the member's block, and the distance to the next.
    """

    member: int
    array: int
    start: int
    step: int

    def indices(self, length: int) -> slice:
        """Return the `length` indices from here on, for at least one."""
        stop = self.start + self.step * length
        return slice(self.start, stop if stop >= 0 else None, self.step)


class Move(NamedTuple):
    """`length` indices that go from the block at `source` to the one at `target`."""

    source: End
    target: End
    length: int

    def reversed(self) -> Move:
        """Return the way back, which a gradient takes."""
        return Move(self.target, self.source, self.length)


def chunks_over(length: int, members: int) -> Chunks:
    """Return the chunk of a dim of `length` that each of the `members` holds."""
    return tuple(chunk(length, members, index) for index in range(members))


def find_moves(
    spans: tuple[Span, ...],
    sources: tuple[Chunks, ...],
    targets: tuple[Chunks, ...],
    member: int | None = None,
) -> tuple[Move, ...]:
    """Return the moves that carry the spans out, by span, target and source.

    Parameters
    ----------
    sources
        Chunks of each operand.
    targets
        Chunks of each output; those of several members may overlap.
    member
        Leave out the moves that this member has no part in; None leaves out none.
    """
    return tuple(_moves(spans, sources, targets, member))


def _moves(
    spans: tuple[Span, ...],
    sources: tuple[Chunks, ...],
    targets: tuple[Chunks, ...],
    member: int | None,
) -> Iterator[Move]:
    for span in spans:
        held = sources[span.operand]
        for target, (first, size) in enumerate(targets[span.output]):
            low = max(0, first - span.first)
            high = min(span.length, first + size - span.first)
            everyone = member is None or member == target
            for source in range(len(held)) if everyone else (member,):
                assert source is not None
                offset, extent = held[source]
                begin = max(low, _reaching(span, offset, extent))
                end = min(high, _leaving(span, offset, extent))
                if begin < end:
                    at = span.start + span.step * begin - offset
                    yield Move(
                        End(source, span.operand, at, span.step),
                        End(target, span.output, span.first + begin - first, 1),
                        end - begin,
                    )


def _reaching(span: Span, offset: int, extent: int) -> int:
    """Least i for which the span is, or has been, within the chunk."""
    if span.step > 0:
        return -((span.start - offset) // span.step)
    return (span.start - offset - extent) // -span.step + 1


def _leaving(span: Span, offset: int, extent: int) -> int:
    """Least i from which on the span is past the chunk."""
    if span.step > 0:
        return -((span.start - offset - extent) // span.step)
    return (span.start - offset) // -span.step + 1
