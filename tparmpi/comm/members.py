"""Places with several members: what they share, and how long it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tparmpi.backend import get
from tparmpi.comm import progress, ring
from tparmpi.comm.device import Device
from tparmpi.comm.place import Place
from tparmpi.comm.settings import common_settings
from tparmpi.comm.tags import describe
from tparmpi.errors import GroupError

if TYPE_CHECKING:
    from mpi4py import MPI

    from tparmpi.comm.channel import Channel
    from tparmpi.comm.quick import Quick
    from tparmpi.comm.tuning import Way


class Members(Place):
    """A place made of devices that share a channel.

    Attributes
    ----------
    ranks : tuple of int
        World rank of each member.
    checker : Checker or None
        Compares what members call, where that is asked for.
    number : int
        Tells it from all groups of the same members, for the checker.
    recorded_as : int
        What stands for it in the record of this rank's calls.
    """

    def __init__(self, devices: tuple[Device, ...]) -> None:
        from tparmpi.comm.runtime import world_state

        self._world = world_state()
        ranks = tuple(device.rank for device in devices)
        here = self._world.rank
        self.devices = devices
        self.size = len(devices)
        self.is_member = here in ranks
        self.rank = ranks.index(here) if self.is_member else -1
        self.kind = devices[0].kind
        self.settings = common_settings(devices)
        self.backend = get(self.kind if self.is_member else "meta")
        self.cache = {}
        self.specs = {}
        self.is_closed = False
        self.label = "*".join(self.axes)
        self.ranks = ranks
        self.checker = self._world.checker
        self._channel: Channel | None = None
        self._quick: Quick | None = None
        self._user_comm: MPI.Intracomm | None = None
        self.sequence = 0
        self._messages: dict[tuple[int, int], int] = {}
        if self.is_member:
            self._channel = self._world.channel(ranks)
            self.id = self._channel.take_id()
            if self.checker is not None:
                self.number = self.checker.number(ranks)
            self.recorded_as = ring.recorder.text(repr(self))
            transport = self._channel.transport
            if transport is not None and self.checker is None:
                from tparmpi.comm.quick import quick_for

                self._quick = quick_for(self, self._channel)

    def __repr__(self) -> str:
        axes = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True))
        kind = type(self).__name__.lower()
        return f"<{kind} {axes} of ranks {describe(self.ranks)}>"

    @property
    def comm(self) -> MPI.Intracomm:
        """An MPI communicator of the members, for the user's own calls.

        Collective over the members at first access, then local. Freed by `close`.
        """
        channel = self._open("comm")
        if self._user_comm is None:
            self._user_comm = self._world.communicator(channel.members)
            self._world.user_comms.append(self._user_comm)
        return self._user_comm

    def take_way(self, way: Way | None) -> None:
        """Let sums of these members go another way. Collective over the members."""
        channel = self._open("take_way")
        if channel.way != way:
            channel.way = way
            if self._quick is not None:
                self._quick.forget()

    def close(self) -> None:
        """Make the group unusable and free what it holds.

        Waits for its operations that are under way. The last group of the same members
        frees their communicator. Closing twice, or on a rank that is no member, does
        nothing.
        """
        if progress.active:
            progress.settle(self)
        channel = self._channel
        self.is_closed = True
        if channel is None:
            return
        self._channel = self._quick = None
        if self._user_comm is not None:
            self._world.user_comms.remove(self._user_comm)
            self._world.free(self._user_comm)
            self._user_comm = None
        channel.give_back_id(self.id)
        if channel.groups == 0:
            del self._world.channels[channel.members]
            channel.free()

    def _open(self, kind: str) -> Channel:
        if self._channel is None:
            if self.is_closed:
                raise GroupError(f"{kind}: {self!r} is closed; make a new one")
            raise GroupError(
                f"{kind}: rank {self._world.rank} is no member of {self!r}; only "
                "members make its collective calls"
            )
        return self._channel
