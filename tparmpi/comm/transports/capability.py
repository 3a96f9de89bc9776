"""Whether the MPI library takes a GPU's memory: asked, never tried and never guessed.

A library that does not take it crashes on it, or sends what lies elsewhere, so it has
to say so itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tparmpi.config import environment

# Set to this, a vendor's library has GPU support switched off, whatever it was built
# with; or on.
_OFF = {
    "MPICH_GPU_SUPPORT_ENABLED": "0",
    "MPIR_CVAR_ENABLE_GPU": "0",
    "MV2_USE_CUDA": "0",
}
_ON = {"MPICH_GPU_SUPPORT_ENABLED": "1", "MV2_USE_CUDA": "1"}

# Open MPI's and MPICH's number for CUDA in MPIX_GPU_query_support.
_MPIX_GPU_SUPPORT_CUDA = 0


@dataclass(frozen=True)
class Answer:
    """Whether MPI takes a GPU's memory, and who says so.

    Parameters
    ----------
    yes : bool
    source : str
        What was asked, for messages; empty if nothing had an answer.
    """

    yes: bool
    source: str = ""


def cuda_aware(
    library: Any, memory_kinds: str | None, variables: Mapping[str, str]
) -> Answer:
    """Return whether the MPI library takes a GPU's memory. Local.

    The user's ``TPARMPI_CUDA_AWARE`` decides. Else a variable that switches support
    off; the library's own function; its ``mpi_memory_alloc_kinds``; and a variable that
    switches support on. Where nothing answers it does not.

    Parameters
    ----------
    library
        The MPI library's functions, as of `ctypes`.
    memory_kinds
        Value of that key of the communicator's info; None if it has none.
    variables
        Of the process's environment.
    """
    override = environment().cuda_aware
    if override is not None:
        return Answer(override, "TPARMPI_CUDA_AWARE")
    for name, value in _OFF.items():
        if variables.get(name) == value:
            return Answer(False, name)
    for asked, name in (
        (_query_cuda_support, "MPIX_Query_cuda_support"),
        (_query_gpu_support, "MPIX_GPU_query_support"),
    ):
        function = getattr(library, name, None)
        said = None if function is None else asked(function)
        if said is not None:
            return Answer(said, name)
    if memory_kinds is not None:
        kinds = {kind.strip().split(":")[0] for kind in memory_kinds.split(",")}
        return Answer("cuda" in kinds, "mpi_memory_alloc_kinds")
    for name, value in _ON.items():
        if variables.get(name) == value:
            return Answer(True, name)
    return Answer(False)


def _query_cuda_support(function: Callable[..., int]) -> bool | None:
    return bool(function())


def _query_gpu_support(function: Callable[..., int]) -> bool | None:
    flag = ctypes.c_int(0)
    failed = function(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(flag))
    return None if failed else bool(flag.value)


def ask() -> Answer:
    """Ask the MPI library that runs in this process. Local."""
    from mpi4py import MPI

    # Its own functions and those of what it is linked to.
    library = ctypes.CDLL(MPI.__file__)
    info = MPI.COMM_WORLD.Get_info()
    try:
        kinds = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    return cuda_aware(library, kinds, os.environ)


def transports(kind: str, answer: Callable[[], Answer] = ask) -> tuple[str, ...]:
    """Return how the arrays of a kind of device can travel, best first. Local."""
    if kind == "cpu":
        return ("host",)
    return ("cuda_aware", "staged") if answer().yes else ("staged",)
