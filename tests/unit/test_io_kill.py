"""A save that is killed at each of its steps in turn leaves a checkpoint that loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Each attempt is a child of its own, forked before MPI starts. Attempt k dies, with no
# chance to clean up, just before its k-th call that changes the disk; the next child
# loads what is newest, as a resumed run does, and leaves a fresh copy of step 1 behind.
PROGRAM = """
import itertools, os, shutil, signal, sys
import numpy as np
import tparmpi as tpm
from tparmpi.io import checkpoint, saving

folder, step, in_background = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
CALLS = [(os, name) for name in ("mkdir", "rename", "fsync", "pwrite", "unlink")]
CALLS += [(os, "rmdir"), (shutil, "rmtree"), (saving, "write_index")]


class Model:
    def __init__(self, start):
        place = tpm.device()
        self.tensors = {
            name: tpm.tensor(start + np.arange(n, dtype=np.float32), place)
            for name, n in (("a", 300_000), ("b.c", 7))
        }

    def state_dict(self):
        return self.tensors


def die_before(call):
    count = itertools.count()

    def counted(function):
        def wrapper(*args, **keywords):
            if next(count) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **keywords)

        return wrapper

    for place, name in CALLS:
        setattr(place, name, counted(getattr(place, name)))


def attempt(call):
    model = Model(100)
    die_before(call)
    path = checkpoint.step_path(folder, step)
    if not in_background:
        checkpoint.save(path, model, step=step)
        return
    with checkpoint.BackgroundSaver() as saver:
        saver.save(path, model, step=step)
        for tensor in model.tensors.values():
            tensor.write_local(np.zeros(tensor.shape))


def verify(after):
    path = checkpoint.latest(folder)
    model = Model(0)
    found = checkpoint.load(path, model)
    start = float(model.tensors["b.c"].numpy()[0])
    expected = {(1, 0.0), (step, 100.0)} if after is None else {after}
    assert (found.step, start) in expected, (found.step, start, path)
    checkpoint.save(checkpoint.step_path(folder, 1), Model(0), step=1)
    names = sorted(os.listdir(folder))
    assert all(name in ("step-00000001", "step-00000002") for name in names), names
    shutil.rmtree(checkpoint.step_path(folder, 2), ignore_errors=True)


def child(work, *args):
    pid = os.fork()
    if not pid:
        try:
            work(*args)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


child(lambda: checkpoint.save(checkpoint.step_path(folder, 1), Model(0), step=1))
for call in itertools.count():
    status = child(attempt, call)
    assert status in (0, signal.SIGKILL), status
    assert child(verify, (step, 100.0) if status == 0 else None) == 0, call
    if status == 0:
        print(call)
        break
"""


@pytest.mark.parametrize("step", [1, 2], ids=["replacing", "beside the last"])
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_kill_before_any_change_to_the_disk_leaves_a_loadable_checkpoint(
    tmp_path: Path, step: int, background: bool
):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(step), str(background)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8
