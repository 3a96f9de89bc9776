"""`init`: starts MPI, binds the rank to its device, tells all ranks of all devices."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from tparmpi.backend.host_memory import keep_freed
from tparmpi.comm import binding, failure, progress, tuning
from tparmpi.comm.launcher import launched
from tparmpi.comm.settings import DeviceSettings
from tparmpi.config import environment
from tparmpi.errors import CommunicationError, GroupError, UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

    from tparmpi.comm.device import Device
    from tparmpi.comm.group import Group
    from tparmpi.comm.state import World

_world: World | None = None
_lock = threading.RLock()


def init(
    comm: MPI.Intracomm | None = None, settings: DeviceSettings | None = None
) -> Device:
    """Start MPI where it is not running, and bind this rank to its device.

    Collective over `comm`. Implicit, with its defaults, at first use of a device;
    settings are fixed from then on.

    Parameters
    ----------
    comm
        The ranks that take part; all of MPI's if None. It is duplicated.
    settings
        This rank's default dtypes and quantization; float32, int64 and bool if None.

    Returns
    -------
    Device
        This rank's.

    Raises
    ------
    UsageError
        If it has run before with other arguments, or `comm` is not of one group.
    DeviceError
        If there is no device of the kind asked for.
    CommunicationError
        If the launcher started several processes and MPI connects none of them.
    """
    global _world
    with _lock:
        if _world is None:
            _world = _start(comm, settings or DeviceSettings())
        else:
            _check_same(_world, comm, settings)
        return _world.devices[_world.rank]


def is_initialized() -> bool:
    """Say whether `init` has run. Local."""
    return _world is not None


def library() -> str:
    """Return the name and version of the MPI library. Local, once MPI is loaded."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def world_state() -> World:
    """Return what is known of all ranks; local once `init` has run."""
    if _world is None:
        init()
    assert _world is not None
    return _world


def replace_world(world: World | None) -> World | None:
    """Make `world` what is known of all ranks; return what was. Local."""
    global _world
    with _lock:
        before, _world = _world, world
    return before


def device() -> Device:
    """Return this rank's device. Local after `init`."""
    state = world_state()
    return state.devices[state.rank]


def devices() -> tuple[Device, ...]:
    """Return the devices of all ranks, in rank order. Local after `init`."""
    return world_state().devices


def world() -> Group:
    """Return the group of all devices, made by `init`. Local after it."""
    state = world_state()
    if state.group is None:
        from tparmpi.comm.group import check_devices

        # Says why these devices form no group.
        check_devices("world", state.devices)
        raise GroupError("world: the group of all devices is closed")
    return state.group


def _start(comm: MPI.Intracomm | None, settings: DeviceSettings) -> World:
    failure.install()
    # Bound before MPI starts: GPU-aware libraries take the current GPU for theirs.
    bound = binding.choose_device(launched())
    MPI = _import_mpi()

    from tparmpi.comm.state import World

    starts_mpi = not MPI.Is_initialized()
    if starts_mpi:
        MPI.Init_thread()
    comm = MPI.COMM_WORLD if comm is None else comm
    if comm == MPI.COMM_NULL or comm.Is_inter():
        raise UsageError(
            "init: comm must be an intra-communicator that holds this rank"
        )
    job = launched()
    if job.size > 1 and MPI.COMM_WORLD.size == 1:
        raise CommunicationError(
            f"init: the launcher started {job.size} processes ({job.variable}), but "
            "MPI connects none of them; use the mpirun or srun of the MPI library that "
            f"mpi4py uses: {library()}"
        )
    state = World(comm)
    failure.join(state, finalizes=starts_mpi)
    _gather(state, bound, settings)
    return state


def _import_mpi() -> Any:
    """Return mpi4py's module of MPI; importing it loads the MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommunicationError(
            "init: no MPI library can be loaded; load your site's MPI module, or "
            f"install one with pip install mpich ({str(error).splitlines()[0]})"
        ) from error
    return MPI


def _gather(state: World, bound: binding.Bound, settings: DeviceSettings) -> None:
    """Fill in the devices of all ranks, and their group. Collective over all ranks."""
    global _world
    from tparmpi.comm import watchdog
    from tparmpi.comm.device import Device
    from tparmpi.comm.group import check_devices, make_group

    row = binding.describe(state.comm, bound)
    row["settings"] = settings
    row["check"] = environment().check
    if state.rank == 0:
        row["ways"] = tuning.read(library())
    row["token"] = os.urandom(4).hex()
    row["processes"] = watchdog.visible_processes()
    table: list[dict[str, Any]] = state.comm.allgather(row)
    if bound.kind == "cpu":
        keep_freed(sum(entry["node"] == row["node"] for entry in table))
    binding.limit_threads(table, state.rank)
    progress.count_cores(binding.usable_cores(table, state.rank))
    binding.warn_of_sharing(table, state.rank)
    binding.warn_of_staging(table, state.rank)
    state.ways = table[0]["ways"]
    state.devices = tuple(
        Device(
            rank,
            entry["kind"],
            is_member=rank == state.rank,
            settings=entry["settings"],
            supported_dtypes=entry["supported_dtypes"],
            host=entry["host"],
            index=entry["index"],
            local_rank=entry["local_rank"],
            transports=entry["transports"],
        )
        for rank, entry in enumerate(table)
    )
    _world = state
    if state.size > 1:
        watchdog.start(state, table, environment().watchdog)
        if any(entry["check"] for entry in table):
            state.check_calls()
    try:
        state.group = make_group(check_devices("world", state.devices), "group")
    except GroupError:
        # Devices of different kinds: each kind can still form groups of its own.
        state.group = None


def _check_same(
    state: World, comm: MPI.Intracomm | None, settings: DeviceSettings | None
) -> None:
    own = state.devices[state.rank].settings
    if settings is not None and settings != own:
        raise UsageError(
            f"init: settings are fixed as {own} since the first use of a device; call "
            "init(settings=…) before it"
        )
    if comm is not None:
        if state.is_simulated:
            raise UsageError("init: a simulated mesh takes no communicator")
        from mpi4py import MPI

        alike = MPI.Comm.Compare(comm, state.comm)
        if alike not in (MPI.IDENT, MPI.CONGRUENT):
            raise UsageError(
                "init: it has run with another communicator; call init(comm) once, "
                "before the first use of a device"
            )
