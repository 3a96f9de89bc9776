"""What a rank knows of all ranks once `init` has run."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from tparmpi.comm import tuning, watchdog
from tparmpi.comm.channel import Channel
from tparmpi.comm.check import Checker, communicator_meeting
from tparmpi.comm.control import Control
from tparmpi.comm.tags import describe
from tparmpi.errors import GroupError

if TYPE_CHECKING:
    from tparmpi.comm.device import Device
    from tparmpi.comm.group import Group
    from tparmpi.comm.tuning import Way


class World:
    """All ranks: their communicators, devices and channels.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator given to `init`; duplicated, not used itself.

    Attributes
    ----------
    control : Control
        The ranks' notices.
    devices : tuple of Device
        One for each rank, in rank order.
    group : Group or None
        All of them; None where they cannot form a group.
    channels : dict
        The open channels by their members' world ranks, in the order they were made.
    ways : tuple of Way
        The tuning table.
    checker : Checker or None
        Compares what members call, where that is asked for.
    """

    is_simulated = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm: MPI.Intracomm = comm.Dup()
        self.control = Control(comm.Dup())
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        self.devices: tuple[Device, ...] = ()
        self.group: Group | None = None
        self.channels: dict[tuple[int, ...], Channel] = {}
        self.ways: tuple[Way, ...] = ()
        self.user_comms: list[MPI.Intracomm] = []
        self.checker: Checker | None = None
        # What is made here must be freed here; MPI has few communicators.
        self._made = 0

    def check_calls(self) -> None:
        """Compare what members call from now on. Collective over all ranks."""
        self.checker = Checker(self.comm.Dup(), self.control, watchdog.last_call)
        self.control.services.append(self.checker.serve)

    def way(self, members: tuple[int, ...]) -> Way | None:
        """Return how the sums of `members` go, where that was measured. Local."""
        hosts = {self.devices[rank].host for rank in members}
        return tuning.choose(self.ways, len(members), len(hosts))

    def channel(self, members: tuple[int, ...]) -> Channel:
        """Return the channel of `members`. Collective over them where it is new."""
        channel = self.channels.get(members)
        if channel is None:
            channel = self.channels[members] = Channel(self, members)
        return channel

    def communicator(self, members: tuple[int, ...]) -> MPI.Intracomm:
        """Return a new communicator of `members`. Collective over them.

        Raises
        ------
        GroupError
            If MPI has no more communicators.
        """
        doing = f"making the group of ranks {describe(members)}"
        if self.checker is not None:
            communicator_meeting(self.checker, members, doing).wait(self.control, doing)
        self.control.rendezvous(members, doing)
        name = zlib.crc32(np.array(members, np.int64).tobytes())
        everybody = self.comm.Get_group()
        some = everybody.Incl(members)
        try:
            made = self.comm.Create_group(some, name % 32_768)
        except MPI.Exception as error:
            raise GroupError(
                f"group: MPI cannot make a communicator of ranks {describe(members)}: "
                f"{error}; close() groups that are not needed"
            ) from error
        finally:
            some.Free()
            everybody.Free()
        self._made += 1
        return made

    def free(self, comm: MPI.Intracomm) -> None:
        """Free what `communicator` made. Collective over its members."""
        comm.Free()
        self._made -= 1

    def close(self) -> str:
        """Free every communicator. Collective over all ranks.

        Returns
        -------
        str
            Lines for the user on what was left behind; empty if nothing was.
        """
        broken = sum(
            len(channel.in_flight) + len(channel.broken)
            for channel in self.channels.values()
        )
        for comm in self.user_comms:
            self.free(comm)
        for channel in self.channels.values():
            channel.free()
        self.user_comms.clear()
        self.channels.clear()
        if self.checker is not None:
            self.checker.comm.Free()
        self.comm.Free()
        self.control.comm.Free()
        lines = []
        if broken:
            lines.append(
                f"{broken} calls ended with an error while messages were under way; "
                "those were given up"
            )
        if self._made:
            lines.append(f"{self._made} communicators were never freed")
        return "\n".join(lines)
