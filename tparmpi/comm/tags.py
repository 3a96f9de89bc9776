"""The tags that tell a group's messages apart on a shared communicator."""

from __future__ import annotations

# An operation's messages: of its first phase (whose tag is the operation's), of its
# second, and the user's own.
FIRST, SECOND, MESSAGE = range(3)
PHASES = 3

# Prime, so that the groups of one channel spread over the tags.
_STRIDE = 40_503


def fold(group_id: int, sequence: int, bound: int) -> int:
    """Return an operation's first tag; it and its phases are at most `bound`. Local."""
    start, count = start_of(group_id, bound)
    return (start + sequence) % count * PHASES


def start_of(group_id: int, bound: int) -> tuple[int, int]:
    """Return where a group's tags start, and how many operations have some. Local.

    That of number n are ``(start + n) % count * PHASES`` and those after it.
    """
    return group_id * _STRIDE, (bound + 1) // PHASES


def describe(ranks: tuple[int, ...]) -> str:
    """Return ranks as text, the middle of a long list left out. Local."""
    if len(ranks) <= 8:
        return "(" + ", ".join(map(str, ranks)) + ")"
    first = ", ".join(map(str, ranks[:4]))
    return f"({first}, …, {ranks[-1]}; {len(ranks)} ranks)"
