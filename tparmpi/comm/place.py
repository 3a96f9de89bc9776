"""What devices, groups and meshes have in common, and their view for gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from tparmpi.errors import GroupError

if TYPE_CHECKING:
    from tparmpi.backend import Backend
    from tparmpi.comm.device import Device
    from tparmpi.comm.group import Group
    from tparmpi.comm.mesh import Mesh
    from tparmpi.comm.settings import DeviceSettings


class Place(ABC):
    """Where a tensor can live: a device, a group or a mesh, or a view of one.

    Places are compared by identity: two groups of the same devices differ.

    Attributes
    ----------
    devices : tuple of Device
        The members, in order.
    size : int
        Their number.
    rank : int
        A device's world rank; in a group or mesh this rank's place, -1 for non-members.
    kind : {"cpu", "cuda"}
    settings : DeviceSettings
        Default dtypes and quantization.
    is_member : bool
        Whether this rank is one of the members.
    axes : tuple of str
        Names of the axes, the last varying fastest.
    shape : tuple of int
        Size of each axis.
    coordinates : tuple of int
        This rank's place along each axis; zeros for non-members.
    backend : Backend
        This rank's arrays: of `kind` for members, ``meta`` for others.
    is_autodiff : bool
        Whether tensors made here take part in gradients.
    cache : dict
        For whoever must remember something per place.
    specs : dict
        What is known of the tensors that lie here.
    """

    devices: tuple[Device, ...]
    size: int
    rank: int
    kind: str
    settings: DeviceSettings
    is_member: bool
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    coordinates: tuple[int, ...]
    backend: Backend
    is_autodiff: bool = False
    cache: dict[Any, Any]
    specs: dict[Any, Any]

    _autodiff: Autodiff | None = None

    def autodiff(self) -> Autodiff:
        """Return the one view on which operators record gradients. Local."""
        if self._autodiff is None:
            self._autodiff = Autodiff(self)
        return self._autodiff

    def inner(self) -> Place:
        """Return the place itself, without a view for gradients. Local."""
        return self

    @abstractmethod
    def axis_group(self, axis: int) -> Group:
        """Return the group along axis number `axis` that holds this rank. Local."""


class Autodiff(Place):
    """A place's view on which operators record gradients.

    It has the place's attributes; made by `Place.autodiff` only.
    """

    is_autodiff = True

    def __init__(self, place: Place) -> None:
        self._inner = place
        self.devices = place.devices
        self.size = place.size
        self.rank = place.rank
        self.kind = place.kind
        self.settings = place.settings
        self.is_member = place.is_member
        self.axes = place.axes
        self.shape = place.shape
        self.coordinates = place.coordinates
        self.backend = place.backend
        self.cache = place.cache
        self.specs = place.specs

    def __repr__(self) -> str:
        return f"{self._inner!r}.autodiff()"

    def autodiff(self) -> Autodiff:
        """Return the view itself. Local."""
        return self

    def inner(self) -> Place:
        """Return the plain place. Local."""
        return self._inner

    def axis_group(self, axis: int) -> Group:
        """Return the plain group along axis number `axis` of the place. Local."""
        return self._inner.axis_group(axis)

    def axis(self, name: str) -> Autodiff:
        """Return the view of a mesh's group along an axis. See `Mesh.axis`."""
        return self._mesh("axis").axis(name).autodiff()

    def split(self, name: str) -> list[Autodiff]:
        """Return the views of a mesh's sub-meshes. See `Mesh.split`."""
        return [part.autodiff() for part in self._mesh("split").split(name)]

    def factor(self, name: str, **sizes: int) -> Autodiff:
        """Return the view of a mesh with an axis factored. See `Mesh.factor`."""
        return self._mesh("factor").factor(name, **sizes).autodiff()

    def _mesh(self, method: str) -> Mesh:
        from tparmpi.comm.mesh import Mesh

        if isinstance(self._inner, Mesh):
            return self._inner
        raise GroupError(
            f"{method}: {self._inner!r} is not a mesh; make one with mesh()"
        )
