"""Ranks that fail inside calls, hang, or are killed: the job ends, and says where."""

from __future__ import annotations

import os
import re
import shlex
import sys
import uuid
from pathlib import Path

import pytest

from tests.e2e.launch import Finished, mpirun, run, wait_for

SECONDS = 12.0
LIMIT = 60.0

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import tparmpi as tpm
from tparmpi.comm import ring

world = tpm.world()
rank = world.rank
world.barrier()
"""
MARK = "TPARMPI_TEST_JOB"


def job(
    folder: Path,
    body: str,
    ranks: int = 3,
    head: str = HEAD,
    command: list[str] | None = None,
    **env: str,
) -> Finished:
    """Run a program; no process of it is left."""
    (folder / "program.py").write_text(head + body)
    mark = uuid.uuid4().hex
    command = command or [*mpirun(ranks), sys.executable, "program.py"]
    done = run(command, cwd=folder, limit=LIMIT, env={MARK: mark, **env})
    # A launcher may end before those that it has told to.
    wait_for(lambda: not survivors(mark), 5)
    return done


def survivors(mark: str) -> list[str]:
    """Processes that a job has left."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment and state not in "ZX":
                found.append(folder.name)
    return found


def check_failure(done: Finished, rank: int, text: str, seconds: float = SECONDS):
    """The job failed in time with one traceback, that of `rank`."""
    assert done.code != 0
    assert done.seconds < seconds
    assert done.err.count("Traceback (most recent call last)") == 1, done.err
    assert f"[rank {rank}] {text}" in done.err, done.err


# Failures around a call

INSIDE = """
class Broken:
    dtype, shape = np.dtype("f8"), (3,)
    def __array__(self, *_, **__):
        raise ValueError("wrong value")

world.all_reduce(Broken() if rank == 1 else np.ones(3))
"""
MIDWAY = """
from tparmpi.comm import operations
fold_of = operations.fold_of

def fails(*arguments):
    def fold(parts, out):
        raise ValueError("wrong value")
    return fold

if rank == 1:
    operations.fold_of = fails
world.all_reduce(np.ones(100_000), "max")
world.barrier()
"""
AFTER = """
world.all_reduce(np.ones(3))
if rank == 1:
    raise ValueError("wrong value")
world.barrier()
"""
HANDLE = """
handle = world.start.all_reduce(np.ones(3))
if rank == 1:
    raise ValueError("wrong value")
handle.wait()
world.barrier()
"""


RAISES = {
    "inside": (INSIDE, "0"),
    "midway": (MIDWAY, "0"),
    "after": (AFTER, "0"),
    "after, checked": (AFTER, "1"),
    "before a handle is waited for": (HANDLE, "0"),
}


@pytest.mark.parametrize("case", RAISES)
def test_one_rank_raises(tmp_path, case):
    body, check = RAISES[case]
    done = job(tmp_path, body, TPARMPI_CHECK=check)
    check_failure(done, 1, "ValueError: wrong value")


# Failures inside a stage of a pipeline

STAGES = """
from tparmpi import nn
from tparmpi.parallel import *

class Layer(nn.Module):
    def __init__(self, number, place, width=3):
        self.number = number
        self.calls = 0
        self.weight = nn.Parameter((width, width), place, dtype="float64")

    def forward(self, x):
        self.calls += 1
        if self.number == FAILS and self.calls == 2:
            raise ValueError("wrong value")
        return x @ self.weight

def loss(predictions, targets):
    total = predictions.sum()
    if CHECKS and not np.isfinite(total.item()):
        raise ValueError("wrong value: the loss is no number")
    return total, 1

stages = [device.autodiff() for device in tpm.devices()]
placement = LayerPlacement.even(stages, 3)
layers = [Layer(n, p, WIDTHS.get(n, 3)) for n, p in enumerate(placement.places)]
model = LayerSequence(*layers).initialize(0)
pipeline = Pipeline(DistributedLayeredModel(model, placement), SCHEDULE, 4)
x = np.ones((8, 3))
x[4] = VALUE
x, y = (tpm.tensor(x, p.inner()) for p in (placement.input, placement.output))
pipeline.forward_backward(x, y, loss)
"""


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    ("fails", "checks", "widths", "value", "rank", "text", "where"),
    [
        (2, False, {}, 1.0, 1, "ValueError: wrong value", "in stage 1 of 3 stages"),
        (0, False, {}, 1.0, 0, "ValueError: wrong value", "in stage 0 of 3 stages"),
        (9, True, {}, float("nan"), 2, "ValueError: wrong value: the", "microbatch 2"),
        (9, False, {2: 5}, 1.0, 1, "tparmpi.errors.ShapeError", "layers 2 to 2"),
    ],
    ids=["middle", "first", "not a number", "shapes"],
)
def test_a_stage_fails(
    tmp_path, schedule, fails, checks, widths, value, rank, text, where
):
    body = (
        f"FAILS, CHECKS, WIDTHS = {fails}, {checks}, {widths}\n"
        f"VALUE, SCHEDULE = float('{value}'), {schedule!r}\n{STAGES}"
    )
    done = job(tmp_path, body)
    check_failure(done, rank, text)
    if sys.version_info >= (3, 11):
        assert where in done.err


@pytest.mark.parametrize("shell", ["around", "within"])
def test_a_shell_between(tmp_path, shell):
    program = [sys.executable, "program.py"]
    if shell == "around":
        line = f"{shlex.join([*mpirun(3), *program])}; exit $?"
        command = ["sh", "-c", line]
    else:
        command = [*mpirun(3), "sh", "-c", f"{shlex.join(program)}; exit $?"]
    check_failure(job(tmp_path, AFTER, command=command), 1, "ValueError: wrong value")


# Signals

SIGNALS = """
def later(number):
    time.sleep(1)
    os.kill(os.getpid(), number)

def note(number, frame):
    print("noted", flush=True)

def send(number):
    threading.Thread(target=later, args=[number], daemon=True).start()
"""


def test_a_signal_inside_a_call_that_a_handler_notes(tmp_path):
    body = """
signal.signal(signal.SIGUSR1, note)
if rank == 0:
    send(signal.SIGUSR1)
else:
    time.sleep(2)
print(f"sum {world.all_reduce(np.array(rank))}\\n", end="", flush=True)
"""
    done = job(tmp_path, SIGNALS + body)
    assert (done.code, done.err) == (0, "")
    assert done.out.count("noted") == 1
    assert done.out.count("sum 3") == 3


def test_a_signal_inside_a_call_whose_handler_raises(tmp_path):
    body = """
def fail(number, frame):
    raise ValueError("wrong value")
signal.signal(signal.SIGUSR1, fail)
if rank == 0:
    send(signal.SIGUSR1)
if rank == 2:
    time.sleep(30)
world.all_reduce(np.array(rank))
"""
    check_failure(job(tmp_path, SIGNALS + body), 0, "ValueError: wrong value")


def test_an_interrupt_inside_a_call(tmp_path):
    body = """
if rank == 0:
    send(signal.SIGINT)
else:
    time.sleep(30)
world.all_reduce(np.array(rank))
"""
    check_failure(job(tmp_path, SIGNALS + body), 0, "KeyboardInterrupt")


def test_a_rank_that_is_killed(tmp_path):
    body = """
if rank == 1:
    print("kept in", ring.recorder.path, flush=True)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
world.all_reduce(np.ones(4))
"""
    done = job(tmp_path, body)
    assert done.code != 0
    assert done.seconds < SECONDS
    # Its calls can still be read.
    path = Path(re.search(r"kept in (\S+)", done.out)[1])
    reader = [sys.executable, "-m", "tparmpi.comm.post_mortem", str(path)]
    read = run(reader, cwd=tmp_path)
    assert "rank 1 of 3" in read.out and "is gone" in read.out
    assert re.search(r"#1  barrier, call 0 on .* at \S+program.py:9: took", read.out)
    for left in path.parent.glob(f"{path.name.partition('-')[0]}-*"):
        left.unlink()


# Ranks that never come

CHECKED = {
    "left": (
        "if rank != 1: world.all_reduce(np.ones(4))",
        ["rank 1 has left the program (its last call: barrier on", "program.py:9"],
    ),
    "in another call": (
        """
pair = tpm.group(tpm.devices()[:2])
if rank == 0:
    pair.barrier()
else:
    world.barrier()
""",
        [
            "rank 0 waits for rank 1 in barrier()",
            "rank 1 waits for rank 0 in barrier()",
        ],
    ),
    "in a group whose other member left": (
        """
groups = [tpm.group(tpm.devices()[:2]), tpm.group(tpm.devices()[1:])]
if rank < 2:
    groups[rank].all_reduce(np.ones(4))
""",
        ["rank 0 waits for rank 1", "rank 1 waits for rank 2", "rank 2 has left"],
    ),
    "making another group": (
        """
orders = [(2, 1, 0), (1, 2, 0), (2, 0, 1)]
tpm.group([tpm.devices()[other] for other in orders[rank]])
""",
        ["in making the group of ranks (1, 2, 0)", "(2, 0, 1)", "(2, 1, 0)"],
    ),
    "with another shape": (
        "world.all_reduce(np.ones(4 + (rank == 2)))",
        [
            "rank 2 calls all_reduce(float64 (5,)",
            "ranks 0, 1 call all_reduce(float64 (4",
        ],
    ),
}


@pytest.mark.parametrize("case", CHECKED)
def test_mismatches_are_told_once(tmp_path, case):
    body, texts = CHECKED[case]
    done = job(tmp_path, body, TPARMPI_CHECK="1")
    assert done.code != 0
    assert done.seconds < SECONDS
    assert "CollectiveMismatchError" in done.err
    for text in texts:
        assert text in done.err
    if case == "with another shape":
        # All ranks fail alike.
        assert done.err.count("Traceback") == 1, done.err


def test_checking_on_one_rank_is_checking_on_all(tmp_path):
    head = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.environ["TPARMPI_CHECK"] = "1"
"""
    done = job(
        tmp_path, HEAD + "world.all_reduce(np.ones(4 + (rank == 2)))\n", head=head
    )
    assert "CollectiveMismatchError" in done.err


STUCK = {
    "sleeps": ("time.sleep(100)", "time.sleep(100)"),
    "waits in the user's own MPI call": (
        "world.comm.Dup().Recv(np.ones(1), 0)",
        "program.py",
    ),
    "keeps the interpreter": (
        "import re; re.match('(a+)+$', 'a' * 50 + 'b')",
        "its threads do not run",
    ),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "its threads do not run"),
}


@pytest.mark.parametrize("case", STUCK)
def test_the_watchdog_shows_the_rank_that_never_came(tmp_path, case):
    statement, text = STUCK[case]
    body = f"""
world.comm
if rank == 1:
    {statement}
world.all_reduce(np.ones(4))
"""
    if "own MPI" in case:
        # Making the copy is collective.
        body = body.replace("world.comm\n", "copy = world.comm.Dup()\n")
        body = body.replace("world.comm.Dup().Recv", "copy.Recv")
    done = job(tmp_path, body, TPARMPI_WATCHDOG="1.5")
    assert done.code != 0
    assert done.seconds < 20
    assert "has waited 2 s in all_reduce" in done.err
    assert "for rank 1;" in done.err
    told = {r: lines_of(done.err, r) for r in range(3)}
    assert all("latest calls:" in lines for lines in told.values()), done.err
    assert text in told[1]
    for other in (0, 2):
        assert re.search(r"all_reduce, call 1 on .*program.py:\d+: not", told[other])
        assert "world.all_reduce(np.ones(4))" in told[other]
    assert re.search(r"barrier, call 0 on .*program.py:9: took", told[1])
    assert "all_reduce" not in told[1]
    for path in re.findall(r"kept in (\S+);", done.err):
        assert list(Path(path).glob("*.ring"))


def lines_of(text: str, rank: int) -> str:
    """What is marked as one rank's."""
    mark = f"[rank {rank}] "
    return "\n".join(line for line in text.splitlines() if line.startswith(mark))


HOSTS = """
import os, socket
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
socket.gethostname = lambda: f"node{rank // 2}"
"""


def test_the_watchdogs_of_several_nodes(tmp_path):
    statement, _ = STUCK["keeps the interpreter"]
    body = f"""
if rank == 0:
    {statement}
world.all_reduce(np.ones(4))
"""
    done = job(tmp_path, HEAD + body, 4, head=HOSTS, TPARMPI_WATCHDOG="1.5")
    assert done.code != 0
    assert done.seconds < 25
    for rank in range(4):
        assert "latest calls:" in lines_of(done.err, rank), done.err


@pytest.mark.parametrize("head", ["", HOSTS], ids=["one node", "two nodes"])
def test_long_work_makes_the_watchdog_patient(tmp_path, head):
    body = """
if rank == 1:
    with tpm.long_work("writing the corpus"):
        time.sleep(3)
print(f"sum {world.all_reduce(np.array(rank))}\\n", end="", flush=True)
"""
    done = job(tmp_path, HEAD + body, head=head, TPARMPI_WATCHDOG="1")
    assert (done.code, done.out.count("sum 3")) == (0, 3)
    assert "rank 1 is in long_work" in done.err
    assert "writing the corpus" in done.err
    assert done.err.count("[rank 0]") == 1


def test_without_a_watchdog(tmp_path):
    body = """
assert "tparmpi-watchdog" not in [thread.name for thread in threading.enumerate()]
if rank == 1:
    time.sleep(3)
world.barrier()
"""
    done = job(tmp_path, body, TPARMPI_WATCHDOG="0")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("name", ["TPARMPI_WATCHDOG", "TPARMPI_CHECK"])
def test_a_wrong_setting(tmp_path, name):
    done = job(tmp_path, "", **{name: "soon"})
    assert done.code != 0
    assert f"{name} must be" in done.err


# What is left behind


def test_a_clean_exit_leaves_no_file(tmp_path):
    body = """
world.all_reduce(np.ones(4))
print(f"kept in {ring.recorder.path}\\n", end="", flush=True)
"""
    done = job(tmp_path, body)
    assert (done.code, done.err) == (0, "")
    paths = [Path(path) for path in re.findall(r"kept in (\S+)", done.out)]
    assert len(paths) == 3
    token = paths[0].name.partition("-")[0]
    assert not list(paths[0].parent.glob(f"{token}-*"))


def test_what_was_left_behind_is_told(tmp_path):
    body = """
from tparmpi.comm import operations
from tparmpi.comm.runtime import world_state

def fails(*arguments):
    def fold(parts, out):
        raise ValueError("wrong value")
    return fold

operations.fold_of = fails
try:
    world.all_reduce(np.ones(100_000), "max")
except ValueError:
    pass
world_state().communicator((0, 1, 2))
"""
    done = job(tmp_path, body)
    assert done.code == 0
    for rank in range(3):
        told = lines_of(done.err, rank)
        assert "1 calls ended with an error while messages were under way" in told
        assert "1 communicators were never freed" in told


# Launchers


def test_a_plain_command_inside_an_allocation(tmp_path):
    """The variables of a batch job are not those of a step."""
    allocation = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    body = "print(world.size, world.all_reduce(np.array(3)))\n"
    done = job(tmp_path, body, command=[sys.executable, "program.py"], **allocation)
    assert (done.code, done.out, done.err) == (0, "1 3\n", "")


def test_ranks_started_by_another_mpis_launcher(tmp_path):
    """Two processes that each see one of one, as the wrong mpirun leaves them."""
    script = """
for rank in 0 1; do
    OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$rank "$0" program.py &
    last=$!
done
wait $last
"""
    command = ["sh", "-c", script, sys.executable]
    names = ("PMI_FD", "PMI_PORT", "PMI_ID", "PMI_RANK", "PMI_SIZE")
    assert not set(names) & set(os.environ)
    done = job(tmp_path, "", command=command)
    assert done.code != 0
    assert done.seconds < SECONDS
    assert "the launcher started 2 processes (OMPI_COMM_WORLD_SIZE)" in done.err
    assert "MPI connects none of them" in done.err
