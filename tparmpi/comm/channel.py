"""Private communicators, one for each ordered list of members, and their tags."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from mpi4py import MPI

from tparmpi.comm import progress
from tparmpi.comm.call import Call
from tparmpi.comm.tags import describe, fold
from tparmpi.comm.transports import choice
from tparmpi.comm.transports.base import Transport
from tparmpi.errors import CommunicationError, GroupError

if TYPE_CHECKING:
    from tparmpi.comm.state import World
    from tparmpi.comm.tuning import Way

# Groups and meshes that one ordered list of members can have at a time.
GROUP_LIMIT = 65_536


_Key = int | tuple[int, tuple[int, int]]


def _key(tag: int, pair: tuple[int, int] | None) -> _Key:
    return tag if pair is None else (tag, pair)


class Channel:
    """What the groups of one ordered list of members share: a communicator and tags.

    Only point-to-point calls are made on the communicator. Making it and freeing it is
    collective over the members.

    Parameters
    ----------
    world : World
        The ranks that the members are among.
    members : tuple of int
        World rank of each member, in order.

    Attributes
    ----------
    transport : Transport or None
        None for a single member, which has nothing to send.
    way : Way or None
        How sums go, where that was measured.
    call : type
        What the groups make their calls of.
    in_flight : set
        The operations under way: first tags, with the pair of members if it is theirs.
    broken : set
        The same of those that broke off, whose messages may never be taken in.
    """

    call = Call

    def __init__(self, world: World, members: tuple[int, ...]) -> None:
        self._world = world
        self.members = members
        self.in_flight: set[_Key] = set()
        self.broken: set[_Key] = set()
        self._free_ids: list[int] = []
        self._next_id = 0
        self.comm: MPI.Intracomm | None = None
        self.transport: Transport | None = None
        self.way: Way | None = None
        if len(members) > 1:
            self.comm = world.communicator(members)
            devices = [world.devices[rank] for rank in members]
            self.way = world.way(members)
            self.transport = choice.make(devices, self.comm, members, world.control)
            bound = self.comm.Get_attr(MPI.TAG_UB)
            self.tag_bound = bound if isinstance(bound, int) else 32_767

    @property
    def groups(self) -> int:
        """Number of open groups."""
        return self._next_id - len(self._free_ids)

    def take_id(self) -> int:
        """Return the number of a new group, the same on every member. Local.

        Raises
        ------
        GroupError
            If these members already have as many groups as there may be.
        """
        if self.groups >= GROUP_LIMIT:
            raise GroupError(
                f"group: ranks {describe(self.members)} already have {GROUP_LIMIT} "
                "groups; make a group once and reuse it, or close() those not needed"
            )
        # What closed groups had comes last: their calls may have broken off, and
        # members may close and make groups in different orders until then.
        if self._next_id == GROUP_LIMIT:
            return heapq.heappop(self._free_ids)
        self._next_id += 1
        return self._next_id - 1

    def give_back_id(self, group_id: int) -> None:
        """Make the number of a closed group free again. Local."""
        heapq.heappush(self._free_ids, group_id)

    def begin(
        self, group_id: int, sequence: int, pair: tuple[int, int] | None = None
    ) -> int:
        """Return the tag of an operation; waits while it is in flight. Local.

        A `pair` (source, target) has a sequence, and so tags, of its own.

        Raises
        ------
        CommunicationError
            If the operation that had the tag before has broken off: one that followed
            would take what is left of its messages for its own.
        """
        tag = fold(group_id, sequence, self.tag_bound)
        key = _key(tag, pair)
        if key in self.in_flight:
            progress.wait(lambda: key not in self.in_flight, lambda: None)
        if key in self.broken:
            raise CommunicationError(
                f"a call of ranks {describe(self.members)} ended with an error before, "
                "and what is left of its messages would be taken for this one's; "
                "close() the group and make it anew"
            )
        self.in_flight.add(key)
        return tag

    def end(self, tag: int, pair: tuple[int, int] | None = None) -> None:
        """Free an operation's tag. Local."""
        self.in_flight.discard(_key(tag, pair))

    def break_off(self, tag: int, pair: tuple[int, int] | None = None) -> None:
        """Let no operation have this tag again: messages may be left. Local."""
        self.in_flight.discard(_key(tag, pair))
        self.broken.add(_key(tag, pair))

    def free(self) -> None:
        """Free the communicator. Collective over the members."""
        if self.comm is not None:
            self._world.free(self.comm)
            self.comm = self.transport = None
