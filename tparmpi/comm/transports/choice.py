"""Which transport a group's messages take."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from mpi4py import MPI

from tparmpi.backend import get
from tparmpi.comm.control import Control
from tparmpi.comm.transports.base import Transport
from tparmpi.comm.transports.cuda_aware import CudaAwareTransport
from tparmpi.comm.transports.host import HostTransport
from tparmpi.comm.transports.staged import StagedTransport

if TYPE_CHECKING:
    from tparmpi.comm.device import Device

_OF_DEVICES = {kind.name: kind for kind in (CudaAwareTransport, StagedTransport)}


def best(devices: Sequence[Device]) -> str:
    """Return the best transport that every one of the devices has. Local.

    Where their best ones differ it says so, once.
    """
    first = devices[0].transports
    for name in first:
        if all(name in device.transports for device in devices):
            differing = {device.transports[0] for device in devices} - {name}
            if differing:
                _say_slower(name, ", ".join(sorted(differing)))
            return name
    # Every device's arrays can be copied to and from the host.
    return "host" if devices[0].kind == "cpu" else "staged"


@cache
def _say_slower(chosen: str, better: str) -> None:
    warnings.warn(
        f"some ranks of a group have the transport {better}, others do not: its "
        f"messages go the way all have, {chosen}, which is slower",
        stacklevel=2,
    )


def make(
    devices: Sequence[Device],
    comm: MPI.Intracomm,
    members: tuple[int, ...],
    control: Control,
) -> Transport:
    """Return the transport of a group of `devices`. Local."""
    name = best(devices)
    if name == "host":
        return HostTransport(comm, members, control)
    return _OF_DEVICES[name](comm, members, control, get(devices[0].kind).xp)
