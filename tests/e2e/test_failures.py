"""However one rank ends, the job ends: soon, with a nonzero code, its error once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import Finished, mpirun, run

SECONDS = 10.0
LIMIT = 45.0

ENTER = """
import os, sys, threading, time
import tparmpi as tpm

def others_work():
    time.sleep(60)

def others_wait():
    tpm.world().barrier()
"""


def script(folder: Path, body: str, ranks: int = 3, head: str = ENTER) -> Finished:
    """Run a program of `ranks` ranks."""
    (folder / "program.py").write_text(head + body)
    command = [*mpirun(ranks), sys.executable, "program.py"]
    return run(command, cwd=folder, limit=LIMIT)


def check_traceback(job: Finished, rank: int, text: str) -> None:
    """The job failed in time, with one traceback: that of `rank`, marked so."""
    assert job.code != 0
    assert job.seconds < SECONDS
    assert job.err.count("Traceback (most recent call last)") == 1, job.err
    assert f"[rank {rank}] Traceback" in job.err
    assert f"[rank {rank}] {text}" in job.err


OTHERS = pytest.mark.parametrize("others", ["others_work", "others_wait"])


@OTHERS
def test_an_exception(tmp_path, others):
    body = f"""
rank = tpm.world().rank
if rank == 1:
    raise ValueError("wrong value")
{others}()
"""
    check_traceback(script(tmp_path, body), 1, "ValueError: wrong value")


@OTHERS
def test_an_exception_in_a_thread_while_its_main_thread_works(tmp_path, others):
    body = f"""
def fail():
    raise ValueError("wrong value")

if tpm.world().rank == 1:
    threading.Thread(target=fail).start()
    time.sleep(60)
{others}()
"""
    job = script(tmp_path, body)
    check_traceback(job, 1, "ValueError: wrong value")
    assert "[rank 1] Exception in thread" in job.err


def test_an_exception_while_a_daemon_thread_works(tmp_path):
    body = """
threading.Thread(target=time.sleep, args=[60], daemon=True).start()
if tpm.world().rank == 2:
    raise ValueError("wrong value")
others_wait()
"""
    check_traceback(script(tmp_path, body), 2, "ValueError: wrong value")


@OTHERS
@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("sys.exit(2)", 2),
        ("raise SystemExit(2)", 2),
        ("exit(2)", 2),
        ("sys.exit('a last word')", 1),
    ],
)
def test_a_nonzero_exit(tmp_path, others, statement, code):
    body = f"""
if tpm.world().rank == 1:
    with open(os.devnull):
        {statement}
{others}()
"""
    job = script(tmp_path, body)
    assert (job.code, job.err.count("Traceback")) == (code, 0), job.err
    assert job.seconds < SECONDS
    assert f"[rank 1] exited with code {code} while other ranks go on" in job.err


def test_leaving_early_ends_those_who_wait(tmp_path):
    body = """
if tpm.world().rank != 1:
    others_wait()
"""
    job = script(tmp_path, body)
    assert job.code != 0
    assert job.seconds < SECONDS
    assert job.err.count("Traceback (most recent call last)") == 1, job.err
    assert "CommunicationError: barrier: rank 1 has left the program" in job.err


def test_leaving_early_does_not_end_those_who_work(tmp_path):
    body = """
if tpm.world().rank != 1:
    pair = tpm.group([tpm.devices()[0], tpm.devices()[2]])
    time.sleep(2)
    pair.barrier()
    print("done")
"""
    job = script(tmp_path, body)
    assert (job.code, job.out.count("done"), job.err) == (0, 2, "")


def test_what_fails_alike_on_all_ranks_is_printed_once(tmp_path):
    job = script(tmp_path, "tpm.init()\nraise ValueError('wrong value')\n")
    check_traceback(job, 0, "ValueError: wrong value")
    assert "Abort" not in job.err


def test_ranks_that_exit_alike_do_so_quietly(tmp_path):
    job = script(tmp_path, "tpm.init()\nsys.exit(3)\n")
    assert (job.code, job.err) == (3, "")


def test_a_caught_exit_is_none(tmp_path):
    body = """
tpm.init()
try:
    sys.exit(3)
except SystemExit as error:
    kept = error
others_wait()
"""
    job = script(tmp_path, body)
    assert (job.code, job.err) == (0, "")


@OTHERS
def test_a_failure_before_mpi_starts(tmp_path, others):
    body = f"""
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    raise ValueError("wrong value")
tpm.init()
{others}()
"""
    check_traceback(script(tmp_path, body), 1, "ValueError: wrong value")


def test_an_exit_before_mpi_starts(tmp_path):
    body = """
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    sys.exit(2)
others_wait()
"""
    job = script(tmp_path, body)
    assert job.code != 0
    assert job.seconds < SECONDS
    assert "[rank 1] exited with code 2" in job.err


def test_a_failure_of_a_rank_that_only_the_user_knows_as_such(tmp_path):
    """MPI runs, but nothing of the library has been used yet."""
    body = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("wrong value")
MPI.COMM_WORLD.Barrier()
"""
    check_traceback(script(tmp_path, body), 1, "ValueError: wrong value")


def test_a_failure_in_part_of_the_users_communicator(tmp_path):
    body = """
from mpi4py import MPI
half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
tpm.init(half)
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("wrong value")
others_work()
"""
    job = script(tmp_path, body, ranks=4)
    check_traceback(job, 0, "ValueError: wrong value")


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ],
)
def test_a_launcher_that_mpi_does_not_know(tmp_path, size, rank):
    """Each of several processes believes to be alone."""
    (tmp_path / "program.py").write_text(ENTER + "tpm.init()\nothers_work()\n")
    command = [sys.executable, "program.py"]
    job = run(command, cwd=tmp_path, limit=LIMIT, env={size: "4", rank: "0"})
    check_traceback(job, 0, "tparmpi.errors.CommunicationError: init: the launcher")
    assert f"started 4 processes ({size})" in job.err


def test_ranks_that_mpi_does_not_connect(tmp_path):
    head = """
import os
for name in ("PMI_FD", "PMI_PORT", "PMI_ID"):
    os.environ.pop(name, None)
"""
    job = script(tmp_path, head + ENTER + "tpm.init()\nothers_work()\n", head="")
    if "PMI_FD" not in launcher_variables(tmp_path):
        pytest.skip("this launcher does not connect its ranks through PMI_FD")
    check_traceback(job, 0, "tparmpi.errors.CommunicationError: init: the launcher")


def launcher_variables(folder: Path) -> str:
    """Names of the environment variables that a rank is started with."""
    listing = "import os; print(*os.environ)"
    return run([*mpirun(1), sys.executable, "-c", listing], cwd=folder, limit=LIMIT).out


PATCH = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")):
    import tparmpi.cli.train

    def run(arguments):
        import sys
        import time
        import tparmpi as tpm
        from tparmpi.errors import DataError

        if tpm.world().rank == 1:
            {failure}
        {others}

    tparmpi.cli.train.run = run
"""


@pytest.mark.parametrize("start", ["module", "command"])
@pytest.mark.parametrize("others", ["time.sleep(60)", "tpm.world().barrier()"])
@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        ("raise ValueError('wrong value')", 1, "ValueError: wrong value"),
        ("raise DataError('no text')", 1, "tparmpi: no text"),
        ("sys.exit(2)", 2, "exited with code 2"),
        ("raise SystemExit(2)", 2, "exited with code 2"),
        ("return 2", 2, "exited with code 2"),
    ],
)
def test_the_commands(tmp_path, start, others, failure, code, text):
    """One rank's failure inside `tparmpi train`."""
    patch = PATCH.format(failure=failure, others=others)
    (tmp_path / "sitecustomize.py").write_text(patch)
    beside = Path(sys.executable).with_name("tparmpi")
    installed = str(beside) if beside.exists() else shutil.which("tparmpi")
    if start == "command" and installed is None:
        pytest.skip("the command tparmpi is not installed")
    program = [sys.executable, "-m", "tparmpi"] if start == "module" else [installed]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [*mpirun(3), *map(str, program), "train"]
    job = run(command, cwd=tmp_path, limit=LIMIT, env={"PYTHONPATH": path})
    assert job.code == code, job.err
    assert job.seconds < SECONDS
    assert job.err.count(text) == 1, job.err
    assert f"[rank 1] {text}" in job.err
    assert job.err.count("Traceback") == ("ValueError" in text)


def test_workers_that_a_rank_starts_are_no_ranks(tmp_path):
    body = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

def work(number):
    import tparmpi
    from tparmpi.comm.failure import in_job
    return number if not in_job() else None

if __name__ == "__main__":
    world = tpm.world()
    for method in ("spawn", "fork"):
        with ProcessPoolExecutor(1, get_context(method)) as pool:
            assert list(pool.map(work, [1, 2])) == [1, 2]
    world.barrier()
    print("done")
"""
    job = script(tmp_path, body, ranks=2)
    assert (job.code, job.out.count("done")) == (0, 2), job.err
