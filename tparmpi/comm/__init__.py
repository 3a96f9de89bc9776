"""Ranks, their devices, groups and meshes, and what travels between them.

The only package that calls MPI. Importing it starts nothing.
"""

from __future__ import annotations

from tparmpi.comm.agreement import agree
from tparmpi.comm.device import Device
from tparmpi.comm.ending import before_exit
from tparmpi.comm.failure import install_in_job
from tparmpi.comm.group import Group, GroupOptions, group, together
from tparmpi.comm.ledger import Ledger, ledger
from tparmpi.comm.main import run_main
from tparmpi.comm.mesh import Mesh, mesh
from tparmpi.comm.place import Autodiff, Place
from tparmpi.comm.runtime import device, devices, init, is_initialized, world
from tparmpi.comm.settings import DeviceSettings
from tparmpi.comm.simulated import simulate
from tparmpi.comm.work import long_work

__all__ = [
    "Autodiff",
    "Device",
    "DeviceSettings",
    "Group",
    "GroupOptions",
    "Ledger",
    "Mesh",
    "Place",
    "agree",
    "before_exit",
    "device",
    "devices",
    "group",
    "init",
    "is_initialized",
    "ledger",
    "long_work",
    "mesh",
    "run_main",
    "simulate",
    "together",
    "world",
]

install_in_job()
