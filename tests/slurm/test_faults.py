"""Ranks that fail or hang under srun, on two nodes: the job step ends, and says why."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import SRUN_ENVIRONMENT, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]

SECONDS = 30.0

# Both nodes are this machine, so they must be told apart by name.
HEAD = """
import os, signal, socket, sys, time
socket.gethostname = lambda: os.environ["SLURMD_NODENAME"]
import numpy as np
import tparmpi as tpm

world = tpm.world()
rank = world.rank
# Every pair meets: MPI's own connecting to a process that is gone may abort or hang.
world.all_reduce(np.ones(4))
world.barrier()
"""


def srun(cluster: Cluster, folder: Path, body: str, **env: str) -> tuple[int, str]:
    """Exit code and output of four ranks on two nodes."""
    (folder / "program.py").write_text(HEAD + body)
    began = time.monotonic()
    log = folder / "log"
    with open(log, "wb") as output:
        try:
            code = subprocess.run(
                ["srun", "--mpi=pmi2", "-N2", "-n4", sys.executable, "program.py"],
                cwd=folder,
                env=cluster.environment
                | SRUN_ENVIRONMENT
                | {"TPARMPI_DEVICE": "cpu"}
                | env,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=100,
                check=False,
            ).returncode
        finally:
            # Shown by pytest where the test fails.
            print(log.read_text(errors="replace"))
    assert time.monotonic() - began < SECONDS
    return code, log.read_text()


FAULTS = {
    "raises": ("raise ValueError('wrong value')", "ValueError: wrong value"),
    "exits": ("sys.exit(2)", "exited with code 2 while other ranks go on"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "its process is gone"),
    "leaves": ("sys.exit(0)", "rank 3 has left the program"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_one_rank_ends(cluster: Cluster, tmp_path: Path, case: str) -> None:
    statement, text = FAULTS[case]
    body = f"""
if rank == 3:
    {statement}
world.all_reduce(np.ones(4))
world.barrier()
"""
    code, output = srun(cluster, tmp_path, body)
    assert code != 0
    assert text in output
    if case == "raises":
        assert "[rank 3] ValueError: wrong value" in output
        assert output.count("Traceback") == 1


def test_a_mismatch(cluster: Cluster, tmp_path: Path) -> None:
    body = "world.all_reduce(np.ones(4 + (rank == 3)))\n"
    code, output = srun(cluster, tmp_path, body, TPARMPI_CHECK="1")
    assert code != 0
    assert "rank 3 calls all_reduce(float64 (5,), op=sum)" in output


def test_a_rank_that_never_comes(cluster: Cluster, tmp_path: Path) -> None:
    body = """
if rank == 3:
    time.sleep(100)
world.all_reduce(np.ones(4))
"""
    code, output = srun(cluster, tmp_path, body, TPARMPI_WATCHDOG="2")
    assert code != 0
    for rank in range(4):
        assert f"[rank {rank}] process" in output, output
    assert "time.sleep(100)" in output


def test_a_plain_command_inside_an_allocation(cluster: Cluster, tmp_path: Path) -> None:
    """What a batch script runs without srun is one process of one."""
    (tmp_path / "program.py").write_text(
        HEAD.replace('os.environ["SLURMD_NODENAME"]', "'here'") + "print(world.size)\n"
    )
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH -N2 -n4\n{sys.executable} program.py\n")
    cluster.command("sbatch", "--wait", "--output=log", script, folder=tmp_path)
    assert (tmp_path / "log").read_text() == "1\n"
