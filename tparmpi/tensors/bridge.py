"""Bridges: how tensors go from one place to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tparmpi.backend import MetaArray
from tparmpi.comm import Place, group
from tparmpi.comm.blocks import (
    NO_LEAD,
    Bytes,
    Expected,
    Kind,
    start_receive,
    start_send,
)
from tparmpi.comm.handle import Handle
from tparmpi.sharding import REPLICATE, Partial
from tparmpi.sharding.transfers import Held, Piece, Region, leader
from tparmpi.sharding.transfers import pieces as pieces_between
from tparmpi.tensors.spec import Spec, remember

Block = Any

MOST_ROUTES = 1024
"""Routes that a bridge remembers."""


class Bridge:
    """The messages from the members of one place to those of another.

    Each member of the target is led by one of the source: that one's message has a lead
    with whatever the others need not repeat.

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
    as_source, as_target
        This rank's number in each place; None where it is no member.
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
        self.as_source = _number(own, self._source_ranks)
        self.as_target = _number(own, self._target_ranks)
        self.leaders = tuple(
            leader(number, self._source_ranks, self._target_ranks)
            for number in range(len(self._target_ranks))
        )
        self._led = [
            target
            for target, source in enumerate(self.leaders)
            if source == self.as_source
        ]
        self._routes: dict[Any, Route] = {}
        # What the source gives to a target on the same rank: lead and blocks.
        self._kept: deque[tuple[Bytes, list[Block]]] = deque()

    def route(self, specs: Sequence[Spec], targets: Sequence[Spec]) -> Route:
        """Return how tensors go. Local.

        Parameters
        ----------
        specs, targets
            How they lie on the source and on the target.
        """
        key = *specs, *targets
        route = self._routes.get(key)
        if route is None:
            route = Route(self, specs, targets)
            remember(self._routes, key, route, MOST_ROUTES)
        return route

    def send(
        self,
        blocks: Sequence[Block],
        route: Route,
        heads: Sequence[Bytes] = (),
        *,
        are_foreseen: bool = True,
    ) -> list[Handle[None]]:
        """Start sending this member's blocks. Local.

        Parameters
        ----------
        blocks
            Of the route's tensors, on the source; left alone until the handles are
            done.
        heads
            Host arrays that go ahead of the blocks to the members that this one leads:
            the lead, and what it announces.
        are_foreseen
            See `start_send`.
        """
        handles = []
        outgoing = route.outgoing
        targets = dict.fromkeys((*self._led, *outgoing)) if heads else outgoing
        for target in targets:
            parts = [
                blocks[number] if region is None else blocks[number][region]
                for number, region in outgoing.get(target, ())
            ]
            is_led = target in self._led
            ahead = heads if is_led else ()
            if target == self.as_target:
                lead = ahead[0] if ahead else NO_LEAD
                self._kept.append((lead, [part.copy() for part in parts]))
                continue
            to = self._members[self._target_ranks[target]]
            # The others know what comes before they receive it.
            known = are_foreseen or not is_led
            handles.append(start_send(self._group, parts, to, ahead, known))
        return handles

    def expect(
        self,
        route: Route | None,
        lead: Bytes = NO_LEAD,
        choose: Callable[[Bytes], Route] | None = None,
    ) -> Incoming:
        """Start receiving what `send` sends to this member. Local.

        Expect as often as the source sends, in the same order.

        Parameters
        ----------
        route
            What is sent; None where the lead says it.
        lead
            A host array for the lead, if one is sent.
        choose
            Returns the route that the lead says.
        """
        incoming = Incoming(self, route, lead, choose)
        incoming.start()
        return incoming

    def receive(self, source: int, expected: Expected) -> Handle[list[Block]] | Kept:
        """Start receiving from a source. Local."""
        if source == self.as_source:
            return Kept(self._kept, expected)
        number = self._members[self._source_ranks[source]]
        return start_receive(self._group, number, expected)

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


class Kept:
    """What this rank has sent to itself, as a handle.

    Parameters
    ----------
    kept
        The leads and blocks that have not been taken.
    expected
        Gets the lead.
    """

    def __init__(
        self, kept: deque[tuple[Bytes, list[Block]]], expected: Expected
    ) -> None:
        self._kept = kept
        self._expected = expected

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        """Return: it is complete. Local."""

    def wait(self) -> list[Block]:
        """Return the blocks. Local."""
        lead, blocks = self._kept.popleft()
        self._expected.lead[...] = lead
        return blocks


class Route:
    """What of some tensors goes from which member of a bridge to which.

    Made by `Bridge.route`.

    Attributes
    ----------
    specs, targets
        How the tensors lie on the source and on the target.
    outgoing
        By member of the target, what this member of the source sends: numbers of
        tensors, and the regions of its blocks; None stands for a whole block.
    kinds
        By member of the source, the kinds of the blocks that it sends here.
    """

    def __init__(
        self, bridge: Bridge, specs: Sequence[Spec], targets: Sequence[Spec]
    ) -> None:
        self.specs = tuple(specs)
        self.targets = tuple(targets)
        self.outgoing: dict[int, list[tuple[int, Region | None]]] = {}
        self.kinds: dict[int, list[Kind]] = {}
        self._incoming: list[list[tuple[int, Region]]] = [[] for _ in targets]
        for number, (spec, wanted) in enumerate(zip(specs, targets, strict=True)):
            for piece in bridge.pieces(spec, wanted):
                if piece.source == bridge.as_source:
                    whole = _extent(piece.taken) == spec.local_shape
                    part = number, None if whole else piece.taken
                    self.outgoing.setdefault(piece.target, []).append(part)
                if piece.target == bridge.as_target:
                    kind = _extent(piece.put), spec.dtype
                    self.kinds.setdefault(piece.source, []).append(kind)
                    self._incoming[number].append((piece.source, piece.put))

    def assemble(self, received: dict[int, list[Block]]) -> list[Block]:
        """Return this member's blocks of the tensors. Local.

        Parameters
        ----------
        received
            What has come from each member of the source.
        """
        parts = {source: iter(blocks) for source, blocks in received.items()}
        return [
            _assemble(spec, [(region, next(parts[source])) for source, region in own])
            for spec, own in zip(self.targets, self._incoming, strict=True)
        ]


class Incoming(Expected):
    """What one member of the target is being sent.

    Parameters
    ----------
    bridge
        The bridge.
    route, lead, choose
        As for `Bridge.expect`.

    Attributes
    ----------
    route
        What is sent; None while it is not known.
    """

    def __init__(
        self,
        bridge: Bridge,
        route: Route | None,
        lead: Bytes,
        choose: Callable[[Bytes], Route] | None = None,
    ) -> None:
        assert bridge.as_target is not None
        self.lead = lead
        self.route = route
        self.is_certain = route is not None
        self._bridge = bridge
        self._choose = choose
        self._led_by = bridge.leaders[bridge.as_target]
        self._leader: Handle[list[Block]] | Kept
        self._others: dict[int, Handle[list[Block]] | Kept] = {}

    def start(self) -> None:
        """Start receiving: from the leader, and from all where the route is known."""
        if self.lead.size:
            self._leader = self._bridge.receive(self._led_by, self)
        if self.is_certain:
            assert self.route is not None
            self._start_others(self.route)

    def settle(self, until: Callable[[], bool]) -> None:
        """Wait for the leader's message, or until `until` says so. Local."""
        self._leader.settle(until)

    def wait(self) -> list[Block]:
        """Wait for all messages and return this member's blocks. Local."""
        received = {}
        if self.lead.size:
            received[self._led_by] = self._leader.wait()
        route = self.route
        if route is None:
            self.kinds()
            route = self.route
            assert route is not None
        if not self.is_certain:
            self._start_others(route)
        for source, handle in self._others.items():
            received[source] = handle.wait()
        if self._bridge.target.kind == "meta":
            return [MetaArray(spec.local_shape, spec.dtype) for spec in route.targets]
        return route.assemble(received)

    def _start_others(self, route: Route) -> None:
        for source, kinds in route.kinds.items():
            if source != self._led_by or not self.lead.size:
                self._others[source] = self._bridge.receive(source, Expected(kinds))

    # What the messages' receiver asks

    def foreseen(self) -> Sequence[Kind] | None:
        return None if self.route is None else self.of_leader(self.route)

    def read(self) -> tuple[int, bool]:
        return 0, self.is_certain

    def kinds(self) -> Sequence[Kind] | None:
        if self.route is None:
            assert self._choose is not None
            self.route = self._choose(self.lead)
        return self.of_leader(self.route)

    def of_leader(self, route: Route) -> Sequence[Kind]:
        """Return the kinds of what the leader sends here. Local."""
        return route.kinds.get(self._led_by, ())


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


def _assemble(spec: Spec, parts: list[tuple[Region, Block]]) -> Block:
    shape = spec.local_shape
    if len(parts) == 1 and tuple(parts[0][1].shape) == shape:
        return parts[0][1]
    whole = spec.place.backend.empty(shape, spec.dtype)
    for region, array in parts:
        whole[region] = array
    return whole


def _extent(region: Region) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in region)


def _number(rank: int, ranks: Sequence[int]) -> int | None:
    return ranks.index(rank) if rank in ranks else None
