"""The transports that tests run over, those of GPUs on a simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import tparmpi as tpm
from tparmpi import backend
from tparmpi.backend.cupy_backend import CupyBackend
from tparmpi.comm import members
from tparmpi.comm.device import Device
from tparmpi.comm.group import Group
from tparmpi.comm.runtime import world_state
from tparmpi.comm.transports import choice
from tparmpi.testing.simulated_device import SimulatedDevice

# A new transport is one more name.
NAMES = ("host", "cuda_aware", "staged")


class Way:
    """The groups, arrays and streams of one transport.

    Parameters
    ----------
    name : str
        The transport's.
    monkeypatch
        Puts a simulated device in place of each rank's.
    """

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.device: SimulatedDevice | None = None
        self.devices: Sequence[Device] = tpm.devices()
        self.messages: Counter[str] = Counter()
        """Started so far, by the memory that MPI was given: device's or host's."""
        self._groups: list[Group] = []
        if name != "host":
            self.device = SimulatedDevice()
            self._simulate(self.device, monkeypatch)

    def _simulate(
        self, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        simulated = _SimulatedBackend(device)

        def get(kind: str) -> Any:
            return simulated if kind == "cuda" else backend.get(kind)

        # By name: the package has a function of this module's name.
        devices = import_module("tparmpi.comm.device")
        for module in (devices, members, choice):
            monkeypatch.setattr(module, "get", get)
        state = world_state()
        self.devices = tuple(
            Device(
                rank,
                "cuda",
                is_member=rank == state.rank,
                settings=bound.settings,
                supported_dtypes=bound.supported_dtypes,
                host=bound.host,
                index=0,
                local_rank=bound.local_rank,
                transports=(self.name, "staged"),
            )
            for rank, bound in enumerate(state.devices)
        )
        monkeypatch.setattr(state, "devices", self.devices)
        monkeypatch.setattr(state, "channels", {})
        communicator = state.communicator
        monkeypatch.setattr(
            state, "communicator", lambda ranks: _Lending(communicator(ranks), self)
        )

    def group(self, ranks: Sequence[int]) -> Group:
        """Return a group of ranks; `close` closes it. Collective over them."""
        made = tpm.group([self.devices[rank] for rank in ranks])
        if made.is_member and made.size > 1:
            assert made._channel.transport.name == self.name
        self._groups.append(made)
        return made

    def put(self, array: np.ndarray) -> Any:
        """Return a host array as one of the device, perhaps a view with its strides."""
        if self.device is None:
            return array
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        offset = (
            array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        )
        there = self.device.array(base.reshape(-1, order="A").view(np.uint8))
        view = np.ndarray(
            array.shape, array.dtype, there._host.data, offset, array.strides
        )
        return there._alias(view)

    def fetch(self, array: Any) -> Any:
        """Return an array's values, once the current stream has come to them."""
        if self.device is None or array is None:
            return array
        assert isinstance(array, self.device.ndarray)
        return array.get()

    def stream(self) -> AbstractContextManager[Any]:
        """Return a stream of the caller's, to make current."""
        if self.device is None:
            return nullcontext()
        return self.device.cuda.Stream(non_blocking=True)

    def settle(self, transport: Any) -> None:
        """Let what follows the last messages be done, and see that nothing is left."""
        transport.streams.up.synchronize()
        transport._lanes.advance()
        assert not transport._lanes._lanes

    def check(self) -> None:
        """See that nothing is left under way, and that no work was out of turn."""
        for group in self._groups:
            if group.is_member and group.size > 1:
                assert not group._channel.in_flight
                if self.device is not None:
                    self.settle(group._channel.transport)
        assert self.device is None or self.device.complaints == []

    def close(self) -> None:
        """Close the groups, and what else was opened meanwhile. Collective."""
        for group in self._groups:
            group.close()
        if self.device is not None:
            for channel in world_state().channels.values():
                channel.free()


class _SimulatedBackend(CupyBackend):
    """CuPy's backend, with the simulated device in place of CuPy."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.xp = device


class _Lending(MPI.Intracomm):
    """Tells the device which memory its messages use, and until when."""

    def __new__(cls, comm: MPI.Intracomm, way: Way) -> _Lending:
        self = super().__new__(cls, comm)
        self.way = way
        return self

    def Isend(self, buf, dest, tag=0):
        return self._lend(buf, super().Isend(buf, dest, tag), writes=False)

    def Irecv(self, buf, source, tag=0):
        return self._lend(buf, super().Irecv(buf, source, tag), writes=True)

    def _lend(self, buf, request, *, writes):
        device = self.way.device
        is_device = isinstance(buf[0], device.ndarray)
        self.way.messages["device" if is_device else "host"] += 1
        device.lend(buf[0], request, writes=writes)
        return request
