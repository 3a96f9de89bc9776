"""Devices: what each rank is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tparmpi.backend import get
from tparmpi.comm.place import Place
from tparmpi.comm.settings import DeviceSettings

if TYPE_CHECKING:
    from tparmpi.comm.group import Group, GroupOptions


class Device(Place):
    """One rank's device; all ranks have an object for each. Made by `init` only.

    Attributes
    ----------
    host : str
        Name of the computer that the rank runs on.
    index : int or None
        Number of the GPU among those visible to the rank, None for ``cpu``.
    local_rank : int
        The rank's number among those that share memory with it.
    supported_dtypes : frozenset of str
        Names of the dtypes that it computes with.
    transports : tuple of str
        How its arrays can travel, best first.
    """

    axes = ("device",)
    shape = (1,)
    coordinates = (0,)
    size = 1

    def __init__(
        self,
        rank: int,
        kind: str,
        *,
        is_member: bool,
        settings: DeviceSettings,
        supported_dtypes: frozenset[str],
        host: str,
        index: int | None,
        local_rank: int,
        transports: tuple[str, ...],
    ) -> None:
        self.devices = (self,)
        self.rank = rank
        self.kind = kind
        self.is_member = is_member
        self.settings = settings
        self.supported_dtypes = supported_dtypes
        self.host = host
        self.index = index
        self.local_rank = local_rank
        self.transports = transports
        self.backend = get(kind if is_member else "meta")
        self.cache = {}
        self.specs = {}
        self._group: Group | None = None

    def __repr__(self) -> str:
        index = "" if self.index is None else f":{self.index}"
        return f"<device {self.kind}{index} of rank {self.rank}>"

    @staticmethod
    def group_options(devices: Sequence[Place]) -> GroupOptions:
        """Describe a group of `devices`; its `init()` makes it. Local."""
        from tparmpi.comm.group import GroupOptions

        return GroupOptions(tuple(devices))

    def axis_group(self, axis: int) -> Group:
        """Return the group of this device alone; always the same. Local."""
        from tparmpi.comm.group import make_group

        if self._group is None:
            self._group = make_group((self,), self.axes[axis])
        return self._group
