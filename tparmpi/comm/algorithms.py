"""How flat arrays are exchanged and summed between the members of a group.

Everything here works on one operation's `Link`. Receives are posted before sends, and
an array without elements is no message, as both sides know.

What has to wait is a generator that yields the messages it waits for: a blocking call
waits for them there and then, a non-blocking one goes on when the rank next looks at
its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tparmpi.comm.tags import FIRST, SECOND
from tparmpi.comm.transports.base import Transport
from tparmpi.sharding import chunk

if TYPE_CHECKING:
    from tparmpi.comm.control import Pending
    from tparmpi.comm.tuning import Way

Array = Any
Fold = Callable[[Sequence[Array], Array], None]
_T = TypeVar("_T")
Steps = Generator["Pending", None, _T]
"""Yields messages to wait for before it goes on, and returns a result."""

# As long as a member has to send no more bytes than this, an array is summed by sending
# it whole to every member: one exchange instead of two.
WHOLE_BYTES = 256 * 1024
# Two members send no more bytes that way than in pieces, and wait for each other less.
_PAIR_TIMES = 4
# Larger sums go in pieces, of this many bytes from all members together, so that adding
# one overlaps with moving the next and both stay in the cache.
PIECE_BYTES = 2 * 1024 * 1024
# Pieces under way at a time, each way.
_DEPTH = 2


class Link:
    """One operation's messages among the members of a group.

    Parameters
    ----------
    transport : Transport
    tag : int
        The operation's first tag.
    doing : str
        Name of the operation, for errors.
    way : Way, optional
        How sums of this group go, where that was measured.
    """

    __slots__ = ("doing", "rank", "size", "tag", "transport", "way")

    def __init__(
        self, transport: Transport, tag: int, doing: str, way: Way | None = None
    ) -> None:
        self.way = way
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.tag = tag
        self.doing = doing

    def pending(self) -> Pending:
        """Return an empty set of messages."""
        return self.transport.pending()

    def send(self, pending: Pending, flat: Array, to: int, phase: int = FIRST) -> None:
        """Start to send `flat` to a member."""
        self.transport.start_send(pending, flat, to, self.tag + phase)

    def receive(
        self, pending: Pending, flat: Array, source: int, phase: int = FIRST
    ) -> None:
        """Start to receive into `flat` from a member."""
        self.transport.start_receive(pending, flat, source, self.tag + phase)

    def others(self) -> tuple[int, ...]:
        """The other members, the next one first, so that not all send to one."""
        return others(self.rank, self.size)


def goes_whole(nbytes: int, size: int, way: Way | None) -> bool:
    """Say whether an array is summed by sending it whole to every member. Local."""
    if way is not None:
        return nbytes * (size - 1) <= way.whole_bytes
    return nbytes * (size - 1) <= WHOLE_BYTES * (_PAIR_TIMES if size == 2 else 1)


def step_of(itemsize: int, size: int, way: Way | None) -> int:
    """Return how many elements of one member's part of a sum make a piece. Local."""
    piece_bytes = PIECE_BYTES if way is None else way.piece_bytes
    return max(1, piece_bytes // (size - 1) // itemsize)


@cache
def others(rank: int, size: int) -> tuple[int, ...]:
    """Return the other members, the next one first. Local."""
    return tuple((rank + step) % size for step in range(1, size))


def there(rank: int) -> int:
    """Return whose part of a sum is received where the sum will be. Local.

    It is one of the first two: folds read these before they write.
    """
    return 1 if rank == 0 else 0


def exchange(
    link: Link, outgoing: Sequence[Array], incoming: Sequence[Array]
) -> Steps[None]:
    """Send ``outgoing[j]`` to each member j and receive ``incoming[j]`` from it.

    This rank's own entries are left alone.
    """
    pending = link.pending()
    others = link.others()
    for member in reversed(others):
        link.receive(pending, incoming[member], member)
    for member in others:
        link.send(pending, outgoing[member], member)
    yield pending


def reduce_whole(link: Link, flat: Array, out: Array, fold: Fold) -> Steps[None]:
    """Fold the members' arrays in member order into `out`, each sent whole to all."""
    return _reduce_once(link, [flat] * link.size, out, fold)


def reduce_blocks(
    link: Link,
    blocks: Sequence[Array],
    out: Array,
    fold: Fold,
    folded: Callable[[int, int], None] | None = None,
    sent: Callable[[int, int], None] | None = None,
) -> Steps[None]:
    """Fold all members' blocks for this rank into `out`, in member order, in pieces.

    Parameters
    ----------
    blocks
        What this rank contributes to each member, flat; of its own size for each.
    out
        Flat, of the size of this rank's own block; it may be that block itself.
    folded
        Called with (start, stop) when that part of `out` is complete.
    sent
        Called with (start, stop) when that part of the others' blocks may be written.
    """
    step = step_of(out.dtype.itemsize, link.size, link.way)
    largest = max([block.size for block in blocks])
    if largest <= step:
        yield from _reduce_once(link, blocks, out, fold)
        if folded is not None and out.size:
            folded(0, out.size)
        if sent is not None:
            sent(0, largest)
        return
    starts = range(0, largest, step)
    mine = blocks[link.rank]
    others = link.others()
    slots = [
        _borrow(link, min(step, mine.size), mine.dtype, over_own=out is mine)
        for _ in range(min(_DEPTH, len(starts)))
    ]
    received = [link.pending() for _ in starts]
    sending = [link.pending() for _ in starts]
    parts: list[list[Array]] = []

    def start(number: int) -> None:
        piece = slice(starts[number], starts[number] + step)
        slot = slots[number % _DEPTH]
        own = mine[piece]
        parts.append(_places(link, own, own if out is mine else out[piece], slot))
        for member in reversed(others):
            link.receive(received[number], parts[number][member], member)
        for member in others:
            link.send(sending[number], blocks[member][piece], member)

    for number in range(min(_DEPTH, len(starts))):
        start(number)
    for number, low in enumerate(starts):
        yield received[number]
        total = out[low : low + step]
        if total.size:
            fold(parts[number], total)
            if folded is not None:
                folded(low, low + total.size)
        if number + _DEPTH < len(starts):
            start(number + _DEPTH)
        yield sending[number]
        if sent is not None:
            sent(low, low + step)
    for slot in slots:
        _give_back(link, slot)


def _reduce_once(
    link: Link, blocks: Sequence[Array], out: Array, fold: Fold
) -> Steps[None]:
    """Do what `reduce_blocks` does, in one piece."""
    own = blocks[link.rank]
    slot = _borrow(link, out.size, out.dtype, over_own=out is own)
    parts = _places(link, own, out, slot)
    yield from exchange(link, blocks, parts)
    if out.size:
        fold(parts, out)
    _give_back(link, slot)


def _places(link: Link, own: Array, out: Array, slot: Sequence[Array]) -> list[Array]:
    """Return where each member's part of a sum is or is received.

    One goes to where the sum will be, so that two members need no more memory than
    that, unless this rank's own part is there; the others go to the rows of `slot`.
    """
    rows = iter(slot)
    places = [own if member == link.rank else None for member in range(link.size)]
    if own is not out:
        places[there(link.rank)] = out
    elif link.rank > 1:
        # Folds write before they read it.
        places[there(link.rank)] = out
        places[link.rank] = kept = next(rows)[: own.size]
        kept[...] = own
    return [next(rows)[: own.size] if place is None else place for place in places]


def _borrow(link: Link, size: int, dtype: Any, *, over_own: bool) -> Sequence[Array]:
    """Return the rows that `_places` needs, of so many elements."""
    count = link.size - 2 + over_own
    if count == 0:
        return ()
    rows: Sequence[Array] = link.transport.borrow((count, size), dtype)
    return rows


def _give_back(link: Link, slot: Sequence[Array]) -> None:
    if len(slot):
        link.transport.give_back(slot)


def reduce_everywhere(link: Link, flat: Array, out: Array, fold: Fold) -> Steps[None]:
    """Fold the members' arrays in member order into `out`; large ones in pieces.

    Each member folds its part; a folded piece leaves for the others at once. `out` may
    be `flat` itself: then the others' sums are received once this rank's parts of them
    have left.
    """
    bounds = [chunk(flat.size, link.size, member) for member in range(link.size)]
    blocks = [flat[start : start + size] for start, size in bounds]
    results = blocks
    if out is not flat:
        results = [out[start : start + size] for start, size in bounds]
    mine = results[link.rank]
    others = link.others()
    spreading = link.pending()

    def spread(low: int, high: int) -> None:
        for member in others:
            link.send(spreading, mine[low:high], member, SECOND)

    def expect(low: int, high: int) -> None:
        for member in reversed(others):
            link.receive(spreading, results[member][low:high], member, SECOND)

    if out is flat:
        yield from reduce_blocks(link, blocks, mine, fold, spread, expect)
    else:
        step = step_of(flat.dtype.itemsize, link.size, link.way)
        for low in range(0, bounds[0][1], step):
            expect(low, low + step)
        yield from reduce_blocks(link, blocks, mine, fold, spread)
    yield spreading


@cache
def tree(rank: int, size: int, root: int) -> tuple[int | None, tuple[int, ...]]:
    """Return (parent, children) of a member in a binomial tree from `root`. Local."""
    place = (rank - root) % size
    bit = 1
    while bit < size and not place & bit:
        bit *= 2
    parent = None if place == 0 else (rank - bit) % size
    children = []
    bit //= 2
    while bit:
        if place + bit < size:
            children.append((rank + bit) % size)
        bit //= 2
    return parent, tuple(children)


def spread_whole(link: Link, flat: Array, root: int) -> Steps[None]:
    """Copy the root's `flat` into every member's, down a tree."""
    parent, children = tree(link.rank, link.size, root)
    if parent is not None:
        pending = link.pending()
        link.receive(pending, flat, parent)
        yield pending
    if children:
        pending = link.pending()
        for child in children:
            link.send(pending, flat, child)
        yield pending


def spread(link: Link, flat: Array, root: int) -> Steps[None]:
    """Copy the root's `flat` into every member's, down a tree, in pieces."""
    parent, children = tree(link.rank, link.size, root)
    step = max(1, PIECE_BYTES // max(1, flat.dtype.itemsize))
    starts = range(0, flat.size, step)
    receives = [link.pending() for _ in starts]
    sends = link.pending()
    if parent is not None:
        for number, low in enumerate(starts):
            link.receive(receives[number], flat[low : low + step], parent)
    for number, low in enumerate(starts):
        if parent is not None:
            yield receives[number]
        for child in children:
            link.send(sends, flat[low : low + step], child)
    if children:
        yield sends


def meet(link: Link) -> Steps[None]:
    """Return when every member has called it."""
    token = np.zeros(1, np.uint8)
    distance = 1
    while distance < link.size:
        pending = link.pending()
        heard = np.empty_like(token)
        link.receive(pending, heard, (link.rank - distance) % link.size)
        link.send(pending, token, (link.rank + distance) % link.size)
        yield pending
        distance *= 2
