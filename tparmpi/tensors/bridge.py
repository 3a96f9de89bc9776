"""Bridges: how tensors go from one place to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tparmpi.backend import MetaArray
from tparmpi.comm import Place, group
from tparmpi.comm.handle import Handle
from tparmpi.sharding import REPLICATE, Partial
from tparmpi.sharding.transfers import Held, Piece, leader
from tparmpi.sharding.transfers import pieces as pieces_between
from tparmpi.tensors.spec import Spec

Block = Any


class Bridge:
    """The messages from the members of one place to those of another.

    Each member of the target is led by one of the source: that one's message comes
    first and may bring whatever the others need not repeat.

    Parameters
    ----------
    source, target
        Plain places. Making the bridge is collective over the members of both, as
        making a group is; other ranks may take part.

    Attributes
    ----------
    is_member
        Whether this rank is a member of one of the places.
    leaders
        For each member of the target, the number of the source that leads it.
    """

    def __init__(self, source: Place, target: Place) -> None:
        self.source = source
        self.target = target
        devices = {device.rank: device for device in (*source.devices, *target.devices)}
        # One of its own: a bridge's messages are in the order of its own calls.
        self._group = group(list(devices.values()))
        self.is_member = self._group.is_member
        self._members = {rank: number for number, rank in enumerate(devices)}
        self._source_ranks = tuple(device.rank for device in source.devices)
        self._target_ranks = tuple(device.rank for device in target.devices)
        own = self._group.devices[self._group.rank].rank if self.is_member else -1
        self._as_source = _number(own, self._source_ranks)
        self._as_target = _number(own, self._target_ranks)
        self.leaders = tuple(
            leader(number, self._source_ranks, self._target_ranks)
            for number in range(len(self._target_ranks))
        )
        # What the source gives to a target on the same rank.
        self._kept: list[list[Block]] = []

    def send(
        self,
        blocks: Sequence[Block],
        specs: Sequence[Spec],
        targets: Sequence[Spec],
        head: Sequence[Block] = (),
    ) -> list[Handle[None]]:
        """Start sending this member's blocks. Local.

        Parameters
        ----------
        blocks
            Of the tensors of `specs`, on the source; left alone until the handles are
            done.
        targets
            How the tensors lie on the target.
        head
            Arrays that go ahead of the blocks to the members that this one leads.
        """
        assert self._as_source is not None
        outgoing: dict[int, list[Block]] = {
            target: list(head)
            for target, source in enumerate(self.leaders)
            if source == self._as_source
        }
        for array, spec, wanted in zip(blocks, specs, targets, strict=True):
            for piece in self.pieces(spec, wanted):
                if piece.source == self._as_source:
                    part = array[piece.taken] if piece.taken else array
                    outgoing.setdefault(piece.target, []).append(part)
        handles = []
        for target, arrays in outgoing.items():
            if target == self._as_target:
                self._kept.append([part.copy() for part in arrays])
                continue
            to = self._members[self._target_ranks[target]]
            handles.append(self._group.start.send_arrays(arrays, to))
        return handles

    def expect(self) -> Incoming:
        """Start receiving what `send` sends to this member, its leader's first. Local.

        Expect as often as the source sends, in the same order.
        """
        assert self._as_target is not None
        first = self.receive(self.leaders[self._as_target])
        return Incoming(self, self._as_target, first)

    def receive(self, source: int) -> Callable[[], list[Block]]:
        """Start receiving from a source; return what waits for it. Local."""
        if source == self._as_source:
            return lambda: self._kept.pop(0)
        number = self._members[self._source_ranks[source]]
        return self._group.start.recv_arrays(number).wait

    def pieces(self, spec: Spec, wanted: Spec) -> tuple[Piece, ...]:
        """Return what of a tensor goes from which member to which. Local."""
        return pieces_between(
            spec.shape,
            Held(spec.layout, spec.place.shape, self._source_ranks),
            Held(wanted.layout, wanted.place.shape, self._target_ranks),
        )

    def close(self) -> None:
        """Close the bridge's group. Collective over its members."""
        self._group.close()


class Incoming:
    """What one member of the target is being sent. Made by `Bridge.expect`."""

    def __init__(
        self, bridge: Bridge, number: int, first: Callable[[], list[Block]]
    ) -> None:
        self._bridge = bridge
        self._number = number
        self._first = first
        self._arrays: list[Block] | None = None

    def head(self, count: int) -> list[Block]:
        """Wait for the leader's message and return the next `count` arrays of it.

        None on a simulated mesh, where nothing comes.
        """
        if self._arrays is None:
            self._arrays = self._first()
        head, self._arrays = self._arrays[:count], self._arrays[count:]
        return head

    def blocks(self, specs: Sequence[Spec], targets: Sequence[Spec]) -> list[Block]:
        """Wait for all messages and return this member's blocks.

        Parameters
        ----------
        specs, targets
            How the tensors lie on the source and on the target.
        """
        bridge, number = self._bridge, self._number
        self.head(0)
        assert self._arrays is not None
        parts = [
            [p for p in bridge.pieces(spec, wanted) if p.target == number]
            for spec, wanted in zip(specs, targets, strict=True)
        ]
        led_by = bridge.leaders[number]
        sources = {piece.source for own in parts for piece in own} - {led_by}
        waits = {source: bridge.receive(source) for source in sorted(sources)}
        if bridge.target.kind == "meta":
            for wait in waits.values():
                wait()
            return [MetaArray(spec.local_shape, spec.dtype) for spec in targets]
        arrays = {led_by: iter(self._arrays)}
        arrays.update({source: iter(wait()) for source, wait in waits.items()})
        return [
            _assemble(wanted, [(p.put, next(arrays[p.source])) for p in own])
            for wanted, own in zip(targets, parts, strict=True)
        ]


def bridge_between(source: Place, target: Place) -> Bridge:
    """Return the bridge between two plain places, made at the first call.

    Collective over the members of both at the first call, then local.
    """
    key = ("bridge", target)
    if key not in source.cache:
        source.cache[key] = Bridge(source, target)
    bridge: Bridge = source.cache[key]
    return bridge


def settled(spec: Spec) -> Spec:
    """Return `spec` with its pending sums reduced, as it must be to go anywhere."""
    return spec.with_layout(
        tuple(REPLICATE if isinstance(p, Partial) else p for p in spec.layout)
    )


def _assemble(spec: Spec, parts: list[tuple[tuple[slice, ...], Block]]) -> Block:
    shape = spec.local_shape
    if len(parts) == 1 and tuple(parts[0][1].shape) == shape:
        return parts[0][1]
    whole = spec.place.backend.empty(shape, spec.dtype)
    for region, array in parts:
        whole[region] = array
    return whole


def _number(rank: int, ranks: Sequence[int]) -> int | None:
    return ranks.index(rank) if rank in ranks else None
