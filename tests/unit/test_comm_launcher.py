"""What environment variables say about a process's place in its job."""

from __future__ import annotations

import pytest

from tparmpi.comm import launcher
from tparmpi.comm.launcher import Launched, launched


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, None)),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            (3, 4, 1),
        ),
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "0"}, (2, 4, 0)),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, (2, 4, None)),
        # Under srun --mpi=pmi2, rank 2 the first of its host.
        (
            {
                "PMI_SIZE": "4",
                "PMI_RANK": "2",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "0",
            },
            (2, 4, 0),
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"},
            (5, 8, 1),
        ),
        # One process of an allocation of many tasks.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (0, 1, None)),
        # A launcher started by a step of one task for each node.
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}, (0, 1, None)),
        ({"PMI_SIZE": "many"}, (0, 1, None)),
    ],
)
def test_the_first_launcher_that_says_so(variables, expected):
    found = Launched.read(variables)
    assert (found.rank, found.size, found.local_rank) == expected


def test_a_child_of_a_rank_is_no_rank(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "2")
    # Set first, so that what `launched` sets is undone.
    monkeypatch.setenv(launcher._PROCESS, "0")
    monkeypatch.delenv(launcher._PROCESS)
    assert (launched().rank, launched().size) == (2, 4)
    monkeypatch.setenv(launcher._PROCESS, "1")
    assert (launched().rank, launched().size) == (0, 1)
