"""Groups: ordered sets of devices that a tensor can be split over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tparmpi.comm.collectives import Collectives
from tparmpi.comm.device import Device
from tparmpi.comm.place import Place
from tparmpi.comm.settings import common_settings
from tparmpi.errors import GroupError


@dataclass(frozen=True)
class GroupOptions:
    """Which devices a group is made of. Nothing is made before `init`.

    Parameters
    ----------
    devices : tuple of Device
        The members, in order.
    """

    devices: tuple[Place, ...]

    def init(self) -> Group:
        """Make the group, apart from every other.

        Collective over the members. Other ranks may call it too: they get a handle with
        ``is_member`` false.

        Raises
        ------
        GroupError
            If the devices cannot form a group; nothing is made then.
        """
        return make_group(check_devices("group", self.devices), "group")


class Group(Collectives):
    """An ordered set of devices; a mesh with one axis. Made by `GroupOptions.init`."""

    def __init__(self, devices: tuple[Device, ...], axis: str) -> None:
        self.axes = (axis,)
        self.shape = (len(devices),)
        super().__init__(devices)
        self.coordinates = (max(self.rank, 0),)

    def axis_group(self, axis: int) -> Group:
        """Return the group itself. Local."""
        if axis not in (0, -1):
            raise GroupError(
                f"axis_group: a group has one axis, number {axis} is asked"
            )
        return self


def make_group(devices: tuple[Device, ...], axis: str) -> Group:
    """Return a new group of checked `devices`. Collective over the members."""
    return Group(devices, axis)


def group(devices: Sequence[Place]) -> Group:
    """Make a group of `devices`. See `GroupOptions.init`."""
    return GroupOptions(tuple(devices)).init()


def together(places: Sequence[Place]) -> Group:
    """Return the group of all members of `places`, by rank, made at the first call.

    Collective over them at the first call, then local.
    """
    found = {device.rank: device for place in places for device in place.devices}
    members = tuple(found[rank] for rank in sorted(found))
    key = ("together", *members)
    if key not in members[0].cache:
        members[0].cache[key] = make_group(members, "group")
    made: Group = members[0].cache[key]
    return made


def check_devices(what: str, devices: Sequence[Place]) -> tuple[Device, ...]:
    """Return `devices`, if they can form a group. Local.

    Raises
    ------
    GroupError
        Says what is wrong with them.
    """
    from tparmpi.comm.runtime import world_state

    if not devices:
        raise GroupError(
            f"{what}: no devices are given; give at least one of devices()"
        )
    bound = world_state().devices
    checked: list[Device] = []
    for device in devices:
        if device.is_autodiff:
            raise GroupError(
                f"{what}: {device!r} is an autodiff view; group the plain devices, "
                f"then call {what}(…).autodiff()"
            )
        if not isinstance(device, Device):
            raise GroupError(
                f"{what}: {device!r} is not a device; give elements of devices()"
            )
        if not 0 <= device.rank < len(bound) or bound[device.rank] is not device:
            raise GroupError(
                f"{what}: no rank is bound to {device!r}; give elements of devices()"
            )
        checked.append(device)
    seen: set[int] = set()
    for device in checked:
        if device.rank in seen:
            raise GroupError(
                f"{what}: {device!r} is given twice; give each device once"
            )
        seen.add(device.rank)
    kinds: dict[str, Device] = {}
    for device in checked:
        kinds.setdefault(device.kind, device)
    if len(kinds) > 1:
        mixed = " and ".join(repr(device) for device in kinds.values())
        raise GroupError(
            f"{what}: devices of one kind are needed, {mixed} differ; set "
            "TPARMPI_DEVICE to the same kind on every rank"
        )
    common_settings(checked)
    return tuple(checked)
