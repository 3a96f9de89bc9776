"""What the launcher's environment variables say about this process, before MPI runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_SLURM_STEP_SIZE = "SLURM_STEP_NUM_TASKS"
# Each launcher's (size, rank, rank on this host), the first whose size is set counts.
# Slurm's are those of a step: an allocation's say nothing about a plain command in it.
_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("PMIX_SIZE", "PMIX_RANK", "PMIX_LOCAL_RANK"),
    (_SLURM_STEP_SIZE, "SLURM_PROCID", "SLURM_LOCALID"),
)

_PROCESS = "TPARMPI_RANK_PROCESS"


@dataclass(frozen=True)
class Launched:
    """A process's place in a job, as its launcher states it.

    Parameters
    ----------
    rank, size : int
        Its number, and how many processes were started; 0 and 1 without a launcher.
    local_rank : int or None
        Its number among those of its host, None where the launcher does not say.
    variable : str or None
        The environment variable that the size was read from.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    variable: str | None = None

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Launched:
        """Read the job out of environment `variables`. Local."""
        for size_name, rank_name, local_name in _VARIABLES:
            size = _number(variables, size_name)
            if size is not None:
                rank = _number(variables, rank_name) or 0
                local_rank = _number(variables, local_name)
                # `srun --mpi=pmi2` sets all of PMI's variables but this one.
                if local_rank is None and size == _number(variables, _SLURM_STEP_SIZE):
                    local_rank = _number(variables, "SLURM_LOCALID")
                return cls(rank, size, local_rank, size_name)
        return cls()


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None


def launched() -> Launched:
    """Return this process's place in its job. Local.

    A process that a rank started (a loader's worker) inherits the variables and is no
    rank: for it the answer is one process of one.
    """
    found = Launched.read(os.environ)
    if found.size == 1:
        return found
    owner = os.environ.setdefault(_PROCESS, str(os.getpid()))
    return found if owner == str(os.getpid()) else Launched()
