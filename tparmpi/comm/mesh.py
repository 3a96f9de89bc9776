"""Meshes: devices arranged along named axes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod

import numpy as np

from tparmpi.comm.collectives import Collectives
from tparmpi.comm.device import Device
from tparmpi.comm.group import Group, check_devices, make_group
from tparmpi.comm.place import Place
from tparmpi.errors import GroupError, UsageError

# Names that are keywords beside axis names in tensor methods.
_RESERVED = frozenset({"allow_empty", "shape", "sharding"})
# That of tensor parallelism, whose sums are many and wait for each other.
_TENSOR_AXIS = "tp"


class Mesh(Collectives):
    """Devices along named axes, the last varying fastest. Made by `mesh`.

    The groups along each axis are made with it, so that no later use of one depends on
    what other ranks do.
    """

    def __init__(self, devices: tuple[Device, ...], sizes: Mapping[str, int]) -> None:
        self.axes = tuple(sizes)
        self.shape = tuple(sizes.values())
        super().__init__(devices)
        grid = np.arange(len(devices)).reshape(self.shape)
        place = np.unravel_index(max(self.rank, 0), self.shape) if sizes else ()
        self.coordinates = tuple(int(index) for index in place)
        self._parts: dict[str, list[Mesh]] = {}
        self._axis_groups = tuple(
            make_group(tuple(devices[i] for i in self._line(grid, number)), name)
            for number, name in enumerate(self.axes)
        )

    def _line(self, grid: np.ndarray, number: int) -> list[int]:
        index: list[int | slice] = list(self.coordinates)
        index[number] = slice(None)
        line: list[int] = grid[tuple(index)].tolist()
        return line

    def axis_group(self, axis: int) -> Group:
        """Return the group along axis number `axis` that holds this rank. Local."""
        return self._axis_groups[axis]

    def axis(self, name: str) -> Group:
        """Return the group along the axis `name` that holds this rank. Local.

        On a rank that is no member, a handle of the first such group.

        Raises
        ------
        UsageError
            If the mesh has no such axis.
        """
        return self._axis_groups[self._number("axis", name)]

    def split(self, name: str) -> list[Mesh]:
        """Return the sub-meshes of the other axes, one for each place along `name`.

        Collective over the mesh at the first call, then local. Every rank gets all of
        them and is a member of one.

        Raises
        ------
        UsageError
            If the mesh has no such axis.
        """
        number = self._number("split", name)
        if name not in self._parts:
            grid = np.arange(self.size).reshape(self.shape)
            sizes = {axis: n for axis, n in self._axis_sizes().items() if axis != name}
            self._parts[name] = [
                Mesh(tuple(self.devices[i] for i in part.ravel().tolist()), sizes)
                for part in np.moveaxis(grid, number, 0)
            ]
        return list(self._parts[name])

    def factor(self, name: str, **sizes: int) -> Mesh:
        """Return a mesh of the same devices with the axis `name` made of several.

        Collective over the members. ``mesh.factor("tp", kv=2, rep=2)`` has ``kv`` and
        ``rep`` where `mesh` has ``tp`` of size 4.

        Raises
        ------
        UsageError
            If the mesh has no such axis, or a name is used twice.
        GroupError
            If the sizes do not multiply to the axis's.
        """
        number = self._number("factor", name)
        check_sizes("factor", sizes)
        if prod(sizes.values()) != self.shape[number]:
            raise GroupError(
                f"factor: {_product(sizes)} is {prod(sizes.values())}, axis {name!r} "
                f"has {self.shape[number]} devices; the sizes must multiply to that"
            )
        axes: dict[str, int] = {}
        for axis, size in self._axis_sizes().items():
            for sub, n in sizes.items() if axis == name else [(axis, size)]:
                if sub in axes:
                    raise UsageError(f"factor: the mesh would have two axes {sub!r}")
                axes[sub] = n
        return Mesh(self.devices, axes)

    def close(self) -> None:
        """Close the mesh, its axes' groups and its parts.

        Collective over the members.
        """
        if self.is_closed:
            return
        for parts in self._parts.values():
            for part in parts:
                part.close()
        for group in self._axis_groups:
            group.close()
        super().close()

    def _axis_sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    def _number(self, method: str, name: str) -> int:
        if name not in self.axes:
            have = ", ".join(map(repr, self.axes)) or "none"
            raise UsageError(f"{method}: the mesh has no axis {name!r}; it has {have}")
        return self.axes.index(name)


def mesh(devices: Sequence[Place] | None = None, **axes: int) -> Mesh:
    """Arrange devices along named axes, the last varying fastest.

    Collective over the devices' ranks, which compare what they ask for; other ranks may
    call it too and get a handle. The first rank warns, once, if groups along an axis
    ``tp`` span nodes.

    Parameters
    ----------
    devices
        In order; all devices if None.
    **axes
        Size of each axis, outermost first: ``mesh(dp=2, tp=4)``.

    Raises
    ------
    UsageError
        If no axes are given, or a size is not a positive integer.
    GroupError
        If the sizes do not multiply to the number of devices, the devices cannot form a
        group, or ranks ask for different meshes.
    """
    from tparmpi.comm.runtime import devices as all_devices

    given = check_devices("mesh", all_devices() if devices is None else devices)
    if not axes:
        raise UsageError("mesh: no axes are given; name them: mesh(dp=2, tp=2)")
    check_sizes("mesh", axes)
    if prod(axes.values()) != len(given):
        raise GroupError(
            f"mesh: {_product(axes)} is {prod(axes.values())}, there are {len(given)} "
            "devices; the sizes of the axes must multiply to the number of devices"
        )
    made = _agreed(given, axes)
    if made.rank == 0 and _spans_nodes(made, _TENSOR_AXIS):
        _say_spread()
    return made


def _spans_nodes(mesh: Mesh, axis: str) -> bool:
    """Say whether a group along an axis has members on several nodes. Local."""
    if axis not in mesh.axes:
        return False
    hosts = np.array([device.host for device in mesh.devices]).reshape(mesh.shape)
    lines = np.moveaxis(hosts, mesh.axes.index(axis), 0)
    return bool((lines != lines[0]).any())


@cache
def _say_spread() -> None:
    warnings.warn(
        f"groups along the axis {_TENSOR_AXIS!r} of a mesh have ranks on several "
        "nodes: each layer's sums wait for the network. It is faster with an axis no "
        "longer than a node has ranks, named last, and ranks numbered node by node",
        stacklevel=3,
    )


def _agreed(devices: tuple[Device, ...], axes: dict[str, int]) -> Mesh:
    # The comparison has a group of its own: the mesh's others differ if it fails.
    meeting = make_group(devices, "mesh")
    try:
        if meeting.is_member and meeting.size > 1:
            asked = meeting.all_gather_object(_product(axes))
            for device, other in zip(devices, asked, strict=True):
                if other != asked[0]:
                    raise GroupError(
                        f"mesh: rank {devices[0].rank} asks for {asked[0]}, rank "
                        f"{device.rank} for {other}; all ranks must ask for the same"
                    )
        return Mesh(devices, axes)
    finally:
        meeting.close()


def check_sizes(method: str, sizes: Mapping[str, int]) -> None:
    """Raise `UsageError` unless the axes have names and sizes that axes can have."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(
                f"{method}: axis {name!r} must have a positive size, not {size!r}"
            )
        if name in _RESERVED:
            raise UsageError(f"{method}: an axis cannot be named {name!r}; rename it")


def _product(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in sizes.items())
