"""Attention whose keys and values are passed round the members of one axis.

Each member starts with its own block of keys and values and meets the others' in the
order of the members before it: at hop h that of member ``rank - h``. A block travels
only as far as some member's queries see it, so that causal and windowed attention move
less than all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tparmpi.backend.attention import Band, Softmax, join, shifted
from tparmpi.comm import Group
from tparmpi.comm.handle import Handle
from tparmpi.sharding import chunk
from tparmpi.tensors import Plan

Array = Any


@lru_cache(maxsize=256)
def _reach(queries: int, keys: int, members: int, band: Band) -> tuple[int, ...]:
    """For each member's block of keys, the last hop at which it is seen.

    ``band`` is that of the first query and the first key of all.
    """
    reach = []
    for owner in range(members):
        block = chunk(keys, members, owner)
        seen = [
            hop
            for hop in range(members)
            if _sees(chunk(queries, members, (owner + hop) % members), block, band)
        ]
        reach.append(max(seen, default=0))
    return tuple(reach)


def _sees(queries: tuple[int, int], keys: tuple[int, int], band: Band) -> bool:
    """Whether any of the queries (first, count) sees any of the keys (first, count)."""
    low, high = band
    first, count = queries
    first_key, key_count = keys
    return (
        min(count, key_count) > 0
        and (high is None or first_key <= first + count - 1 + high)
        and (low is None or first_key + key_count - 1 >= first + low)
    )


class _Round:
    """One passing round of blocks, as this rank sees it.

    Parameters
    ----------
    band
        That of the first query and the first key of all.
    """

    def __init__(self, plan: Plan, band: Band) -> None:
        (axis,) = plan.factors["t"].axes
        self.group: Group = plan.place.axis_group(axis)
        self.rank, self.members = self.group.rank, self.group.size
        self.queries, self.keys = (plan.inputs[i].shape[1] for i in (0, 1))
        self.after = (self.rank + 1) % self.members
        self.before = (self.rank - 1) % self.members
        self.band = band
        self.reach = _reach(self.queries, self.keys, self.members, band)
        self.hops = range(max(self.reach) + 1)

    def owner(self, hop: int) -> int:
        """The member whose block is here at `hop`."""
        return (self.rank - hop) % self.members

    def arrives(self, hop: int) -> bool:
        """Whether a block arrives for `hop`."""
        return hop <= self.reach[self.owner(hop)]

    def leaves(self, hop: int) -> bool:
        """Whether the block that is here at `hop` goes on."""
        return hop < self.reach[self.owner(hop)]

    def keys_at(self, hop: int) -> slice:
        """Which of all keys are here at `hop`."""
        first, count = chunk(self.keys, self.members, self.owner(hop))
        return slice(first, first + count)

    def sees(self, hop: int) -> bool:
        """Whether this rank's queries see anything of a block that is here at `hop`."""
        own = chunk(self.queries, self.members, self.rank)
        block = chunk(self.keys, self.members, self.owner(hop))
        return self.arrives(hop) and _sees(own, block, self.band)

    def band_at(self, hop: int) -> Band:
        """The band between this rank's queries and the block at `hop`."""
        first, _ = chunk(self.queries, self.members, self.rank)
        return shifted(self.band, first - self.keys_at(hop).start)

    def pass_on(self, hop: int, block: tuple[Array, ...]) -> _Passing:
        """Start to send the block of `hop` on, and to receive that of the next."""
        sends, receives = [], []
        if self.leaves(hop):
            sends = self.send(self.after, block)
        if self.arrives(hop + 1):
            keys = self.keys_at(hop + 1)
            kinds = [(_with_keys(a.shape, keys), a.dtype) for a in block]
            receives = self.receive(self.before, kinds)
        return _Passing(sends, receives, block)

    def send(self, to: int, arrays: Sequence[Array]) -> list[Handle[None]]:
        """Start to send arrays to a member."""
        return [self.group.start.send(array, to) for array in arrays]

    def receive(
        self, source: int, kinds: Sequence[tuple[tuple[int, ...], Any]]
    ) -> list[Handle[Array]]:
        """Start to receive arrays, of some shapes and dtypes, from a member."""
        group = self.group
        return [group.start.recv(source, out=group.foreseen(*kind)) for kind in kinds]


class _Passing(NamedTuple):
    """A block on its way on, and the next on its way here."""

    sends: list[Handle[None]]
    receives: list[Handle[Array]]
    block: tuple[Array, ...]

    def wait(self) -> tuple[Array, ...]:
        """Return the block that has arrived, or else the one that was here."""
        _wait(self.sends)
        return tuple(_wait(self.receives)) or self.block


def _with_keys(shape: tuple[int, ...], keys: slice) -> tuple[int, ...]:
    """The shape (B, S, K, E) with the number of `keys` for S."""
    return (shape[0], keys.stop - keys.start, *shape[2:])


def _wait(handles: list[Handle[Any]]) -> list[Any]:
    return [handle.wait() for handle in handles]


def _columns(bias: Array | None, keys: slice) -> Array | None:
    """View the part of the bias for `keys`; all of it where it is one for all keys."""
    return bias if bias is None or bias.shape[-1] == 1 else bias[..., keys]


def _like(q: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
    """`block` in the dtype of `q`: keys and values travel in their own."""
    k, v = (array.astype(q.dtype, copy=False) for array in block)
    return k, v


def attention(
    plan: Plan,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    band: Band,
    bias: Array | None,
) -> tuple[Array, Softmax]:
    """Return what `backend.attention.attention` does, for this rank's queries.

    Collective over the axis that splits the positions.

    Parameters
    ----------
    k, v
        This rank's; they may be of a narrower dtype than `q`, and travel in it.
    band
        That of the first query and the first key of all.
    bias
        For this rank's queries and all keys.
    """
    ring = _Round(plan, band)
    made = None
    block = (k, v)
    for hop in ring.hops:
        passing = ring.pass_on(hop, block)
        if hop == 0 or ring.sees(hop):
            part = _columns(bias, ring.keys_at(hop))
            found = plan.backend.attention(
                q, *_like(q, block), scale, ring.band_at(hop), part
            )
            made = found if made is None else join(plan.xp, made, found)
        block = passing.wait()
        # Else three blocks would be held when the next one arrives.
        del passing
    assert made is not None
    y, softmax = made
    return y, Softmax(softmax.peak, softmax.total)


def attention_backward(
    plan: Plan,
    q: Array,
    k: Array,
    v: Array,
    saved: Softmax,
    y: Array,
    grad: Array,
    scale: float,
    band: Band,
    bias: Array | None,
    wanted: tuple[bool, bool, bool, bool],
) -> tuple[Array | None, ...]:
    """Return what `backend.attention.attention_backward` does, for this rank's pieces.

    Collective over the axis that splits the positions. A block's gradients start at the
    first member after its owner, grow at each that it comes to, one hop behind it, and
    go home from the last; the owner's own share stays at home.
    """
    ring = _Round(plan, band)
    moved = [number for number in (1, 2) if wanted[number]]
    block = (k, v)
    total: list[Any] = []
    sent: list[Handle[None]] = []
    home: list[Handle[Array]] = []
    dbias = None
    if wanted[3] and bias is not None:
        dbias = plan.xp.zeros(bias.shape, bias.dtype)
    for hop in ring.hops:
        found: Any = None
        growing = []
        if hop > 1 and ring.arrives(hop):
            kinds = [(block[number - 1].shape, q.dtype) for number in moved]
            growing = ring.receive(ring.before, kinds)
        passing = ring.pass_on(hop, block)
        if hop == 0 or ring.sees(hop):
            found = plan.backend.attention_backward(
                *(q, *_like(q, block), saved, y, grad, scale, ring.band_at(hop)),
                *(_columns(bias, ring.keys_at(hop)), wanted),
            )
            if dbias is not None:
                of_block: Any = _columns(dbias, ring.keys_at(hop))
                of_block += found[3]
        if hop == 0:
            total = list(found[:3])
        elif found is not None and wanted[0]:
            total[0] += found[0]
        _wait(sent)
        sent = []
        if hop > 0 and ring.arrives(hop):
            grown = _wait(growing) or [
                plan.xp.zeros(block[number - 1].shape, q.dtype) for number in moved
            ]
            if found is not None:
                for number, array in zip(moved, grown, strict=True):
                    array += found[number]
            sent = ring.send(ring.after if ring.leaves(hop) else ring.owner(hop), grown)
        if hop > 0 and hop == ring.reach[ring.rank]:
            kinds = [((k, v)[number - 1].shape, q.dtype) for number in moved]
            home = ring.receive((ring.rank + hop) % ring.members, kinds)
        block = passing.wait()
        del passing
    for number, array in zip(moved, _wait(home), strict=False):
        total[number] += array
    _wait(sent)
    return (*total, dbias)
