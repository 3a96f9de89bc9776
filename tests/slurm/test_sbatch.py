"""The batch scripts that users copy, on a real Slurm."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.slurm.cluster import SRUN_ENVIRONMENT, Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]

SCRIPTS = Path(__file__).parents[2] / "slurm"

RANKS = """
from mpi4py import MPI
import os
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
print(world.rank, world.size, os.environ["SLURMD_NODENAME"], total)
"""

CONFIG = """
[model]
n_layer = 1
d_model = 32
n_head = 4
seq_len = 16

[data]
train = "text.txt"

[train]
steps = {steps}
batch_size = 4
eval_every = 0

[checkpoint]
every = 0
"""


def recorded_steps(run: Path) -> list[int]:
    """Return the numbers of the training steps that the run's metrics hold."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    # The last line may be half written while the run goes on.
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return [row["step"] for row in map(json.loads, lines) if "loss" in row]


def test_ranks_meet_over_two_nodes(cluster: Cluster) -> None:
    export = ",".join(["ALL", *(f"{k}={v}" for k, v in SRUN_ENVIRONMENT.items())])
    output = cluster.command(
        "srun",
        "--mpi=pmi2",
        "-N2",
        "-n4",
        f"--export={export}",
        sys.executable,
        "-c",
        RANKS,
    )
    rows = sorted(line.split() for line in output.splitlines())
    assert rows == [
        ["0", "4", "n1", "6"],
        ["1", "4", "n1", "6"],
        ["2", "4", "n2", "6"],
        ["3", "4", "n2", "6"],
    ]


def test_cpu_job_saves_is_requeued_and_resumes_on_fewer_ranks(
    cluster: Cluster, tmp_path: Path
) -> None:
    lines = [f"{n} times {n} is {n * n}.\n" for n in range(2000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(steps=1_000_000))
    run = tmp_path / "runs" / "tparmpi"

    def state(number: str) -> str:
        return cluster.job(number)["JobState"]

    number = cluster.command(
        "sbatch",
        "--parsable",
        "--time=10",
        SCRIPTS / "cpu.sbatch",
        config,
        folder=tmp_path,
        path=sysconfig.get_path("scripts"),
    ).strip()
    log = tmp_path / f"tparmpi-{number}.log"
    try:
        wait_until("ten steps", lambda: len(recorded_steps(run)) >= 10, 60)

        # Less is left now than the script asks to be warned ahead of the limit, so
        # Slurm sends the script's own signal, at its next look: every 30 s.
        cluster.command("scontrol", "update", f"JobId={number}", "TimeLimit=2")
        wait_until("requeued", lambda: cluster.job(number)["Restarts"] == "1", 90)
        wait_until("pending", lambda: state(number) == "PENDING", 30)
        saved = recorded_steps(run)[-1]
        assert [path.name for path in (run / "checkpoints").iterdir()] == [
            f"step-{saved:08}"
        ]

        config.write_text(CONFIG.format(steps=saved + 20))
        cluster.command(
            "scontrol",
            "update",
            f"JobId={number}",
            "NumNodes=1",
            "NumCPUs=2",
            "NumTasks=2",
            "StartTime=now",
        )
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        wait_until("the end", lambda: state(number) in ended, 90)
        if f"Job {number} already killed" in cluster.logs():
            # slurmd refuses to launch a job within the second of the kill before it.
            cluster.command("scontrol", "requeue", number)
            wait_until("pending again", lambda: state(number) == "PENDING", 30)
            cluster.command("scontrol", "update", f"JobId={number}", "StartTime=now")
            wait_until("the end again", lambda: state(number) in ended, 90)
        assert state(number) == "COMPLETED"
    finally:
        # Shown by pytest where the test fails.
        print(log.read_text() if log.exists() else "the job wrote nothing")
        print(cluster.logs())
    assert recorded_steps(run) == list(range(1, saved + 21))
    output = log.read_text()
    assert f"resuming after step {saved}" in output
    assert "on 4 ranks" in output
    assert "on 2 ranks" in output
