"""Jobs of several ranks as children of a test, each with a hard time limit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL = (
    "--set=model.n_layer=1",
    "--set=model.d_model=24",
    "--set=model.n_head=4",
    "--set=model.seq_len=16",
    "--set=train.batch_size=5",
    "--set=train.warmup=3",
    "--set=model.dropout=0.1",
)
"""A model whose steps take milliseconds, of sizes that do not divide."""


@dataclass(frozen=True)
class Finished:
    """A job that has ended."""

    code: int
    out: str
    err: str
    seconds: float


def mpirun(ranks: int) -> list[str]:
    """The launcher's part of a command line for some ranks of this machine."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    assert launcher, "there is no mpirun on the PATH"
    return [launcher, "-n", str(ranks)]


def tparmpi(ranks: int, *arguments: str | Path) -> list[str]:
    """The command line of `tparmpi` on some ranks."""
    program = [sys.executable, "-m", "tparmpi", *map(str, arguments)]
    return [*mpirun(ranks), *program]


@contextlib.contextmanager
def started(
    command: Sequence[str | Path], *, cwd: Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A job that runs while the block does, and not a moment longer."""
    job = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ
        | {"TPARMPI_DEVICE": "cpu", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    limit: float = 60.0,
    env: dict[str, str] | None = None,
) -> Finished:
    """Run a job to its end; one that takes over `limit` seconds fails the test."""
    began = time.monotonic()
    with started(command, cwd=cwd, env=env) as job:
        out, err = job.communicate(timeout=limit)
        return Finished(job.returncode, out, err, time.monotonic() - began)


def wait_for(condition: Callable[[], Any], limit: float = 60.0) -> Any:
    """What `condition` returns, as soon as it is true."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise TimeoutError(f"not so within {limit} s")


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics."""
    path = run_folder / "metrics.jsonl"
    if not path.exists():
        return []
    text = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in text.splitlines()]


def losses(run_folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each training line, every bit of them."""
    return [
        (line["step"], line["loss"]) for line in metrics(run_folder) if "loss" in line
    ]


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """Process ids of the job's Python processes, in the order of their ranks."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getsid(int(folder.name)) != job.pid and not _below(folder, job.pid):
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
            program = os.readlink(folder / "exe")
        except OSError:
            continue
        ranks = [
            v.partition(b"=")[2]
            for v in variables
            if v.startswith((b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK="))
        ]
        if ranks and "python" in Path(program).name:
            found[int(ranks[0])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


def _below(folder: Path, ancestor: int) -> bool:
    """Whether a process descends from another; launchers start new sessions."""
    while folder.name not in ("0", "1"):
        parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        if int(parent) == ancestor:
            return True
        folder = Path("/proc") / parent
    return False
