"""Binding a rank to its GPU or to its share of the cores."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tparmpi.backend import get
from tparmpi.comm.launcher import Launched
from tparmpi.comm.transports.capability import transports
from tparmpi.config import environment
from tparmpi.errors import DeviceError

if TYPE_CHECKING:
    from mpi4py import MPI

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Bound:
    """What a rank is bound to.

    Parameters
    ----------
    kind : {"cpu", "cuda"}
    index : int or None
        Number of the GPU among the visible ones.
    identity : str
        Tells one physical GPU from others of the host; empty for ``cpu``.
    """

    kind: str
    index: int | None = None
    identity: str = ""


def choose_device(job: Launched) -> Bound:
    """Choose this rank's device and make it current. Local; before MPI starts.

    A GPU where there is one, unless ``TPARMPI_DEVICE`` says otherwise: the one whose
    number is the rank's number on its host, modulo the number of visible GPUs.

    Raises
    ------
    DeviceError
        If a GPU is asked for and there is none.
    """
    wanted = environment().device
    if wanted == "cpu" or (wanted is None and not _may_have_gpu()):
        return Bound("cpu")
    try:
        gpus = get("cuda").xp.cuda
        count = int(gpus.runtime.getDeviceCount())
    except (DeviceError, RuntimeError) as error:
        # CuPy's CUDA errors are RuntimeErrors.
        if wanted == "cuda":
            raise DeviceError(
                f"init: TPARMPI_DEVICE=cuda, but no GPU can be used: {error}"
            ) from error
        return Bound("cpu")
    if count == 0:
        if wanted == "cuda":
            raise DeviceError("init: TPARMPI_DEVICE=cuda, but no GPU is visible")
        return Bound("cpu")
    index = choose_gpu(job, count)
    gpus.Device(index).use()
    return Bound("cuda", index, str(gpus.Device(index).pci_bus_id))


def choose_gpu(job: Launched, visible: int) -> int:
    """Return the number of a rank's GPU among the `visible` ones. Local."""
    local_rank = job.rank if job.local_rank is None else job.local_rank
    return local_rank % visible


def _may_have_gpu() -> bool:
    """Whether it is worth importing CuPy to count GPUs."""
    drivers = ("/dev/nvidiactl", "/dev/dxg")
    return any(map(os.path.exists, drivers)) and find_spec("cupy") is not None


def describe(comm: MPI.Intracomm, bound: Bound) -> dict[str, Any]:
    """Return this rank's row of the table of devices. Collective over `comm`."""
    from mpi4py import MPI

    near = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = near.rank
    # The same for all ranks that share memory, and for no others.
    node = near.bcast(comm.rank)
    near.Free()
    return {
        "kind": bound.kind,
        "index": bound.index,
        "identity": bound.identity,
        "supported_dtypes": get(bound.kind).supported_dtypes,
        "host": socket.gethostname(),
        "node": node,
        "local_rank": local_rank,
        "cores": sorted(os.sched_getaffinity(0)),
        "quota": core_quota(),
        "transports": transports(bound.kind),
    }


def warn_of_staging(table: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Say, on the first rank, if MPI takes no GPU's memory. Local."""
    staged = [row["transports"][0] == "staged" for row in table]
    if rank == 0 and any(staged):
        warnings.warn(
            "the MPI library does not say that it takes GPU memory; arrays of "
            f"{sum(staged)} ranks are copied through host memory. If it does take it, "
            "set TPARMPI_CUDA_AWARE=1",
            stacklevel=2,
        )


def limit_threads(table: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Limit the threads of BLAS and its like to this rank's share of the cores. Local.

    A number that the user set (``OMP_NUM_THREADS`` and its like) is kept if it is
    smaller, and warned about if it is not.
    """
    from threadpoolctl import threadpool_limits

    share = max(1, int(usable_cores(table, rank)))
    wanted = [
        (name, int(os.environ[name]))
        for name in _THREAD_VARIABLES
        if os.environ.get(name, "").isdecimal()
    ]
    for name, number in wanted:
        if number > share:
            warnings.warn(
                f"rank {rank} may use {share} of the cores, {name} asks for {number} "
                f"threads; it gets {share}. Give each rank more cores when launching "
                "(mpirun --bind-to, srun --cpus-per-task), or ask for fewer threads",
                stacklevel=2,
            )
    threadpool_limits(limits=min([share, *(number for _, number in wanted)]))


def usable_cores(table: Sequence[Mapping[str, Any]], rank: int) -> float:
    """Return the cores that rank `rank` may count on. Local.

    Those of its affinity mask, each divided among the ranks of its node that have it,
    and no more than its part of the control group's quota.
    """
    own = table[rank]
    near = [row for row in table if row["node"] == own["node"]]
    masks = [frozenset(row["cores"]) for row in near]
    share = sum(1 / sum(core in mask for mask in masks) for core in own["cores"])
    if own["quota"] is None:
        return share
    return min(share, float(own["quota"]) / len(near))


@cache
def core_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that the control group allows, None without a limit. Local."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except OSError:
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def warn_of_sharing(table: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Warn, on the first of them, of ranks that share one GPU. Local."""
    own = table[rank]
    if not own["identity"]:
        return
    sharing = [
        other
        for other, row in enumerate(table)
        if (row["node"], row["identity"]) == (own["node"], own["identity"])
    ]
    if len(sharing) > 1 and sharing[0] == rank:
        warnings.warn(
            f"ranks {', '.join(map(str, sharing))} share one GPU of {own['host']}; "
            "start as many ranks on each host as it has GPUs",
            stacklevel=2,
        )
