"""Programs that end while a checkpoint is saved in the background."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import Finished, mpirun, run
from tparmpi.io import checkpoint

PROGRAM = """
import errno, os, sys, time
import numpy as np
import tparmpi as tpm
from tparmpi.io import checkpoint, saving

rank = tpm.world().rank
write_data_file = saving.write_data_file

def late(*args, **keywords):
    time.sleep(0.5)
    if fails and rank == 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    return write_data_file(*args, **keywords)

saving.write_data_file = late
fails = False

class Model:
    def __init__(self, start):
        place = tpm.group(tpm.devices())
        values = start + np.arange(40_000, dtype=np.float32).reshape(400, 100)
        tensor = tpm.tensor(values, place).with_sharding(tpm.Shard(0))
        self.tensors = {"w": tensor}

    def state_dict(self):
        return self.tensors

saver = checkpoint.BackgroundSaver()
model = Model(3)
path = saver.save("checkpoints/step-00000001", model, step=1)
model.tensors["w"].write_local(np.zeros(model.tensors["w"].local.shape))
"""


def job(folder: Path, body: str) -> Finished:
    (folder / "program.py").write_text(PROGRAM + body)
    return run([*mpirun(3), sys.executable, "program.py"], cwd=folder)


def test_the_end_of_the_program_waits_and_publishes(tmp_path):
    done = job(tmp_path, "print('the end')\n")
    assert (done.code, done.err) == (0, "")
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    assert checkpoint.verify(tmp_path / "checkpoints" / "step-00000001") == []


def test_an_error_after_the_last_line_fails_the_program(tmp_path):
    # To a file: a launcher may end before it has passed on what ranks say last.
    said = "os.dup2(os.open('said', os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644), 2)"
    done = job(tmp_path, f"fails = True\n{said}\n")
    assert done.code != 0
    text = (tmp_path / "said").read_text()
    assert "rank 1: cannot save the checkpoint" in text
    assert "No space left on device" in text
    assert os.listdir(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("waits", [True, False])
def test_another_exit_code_is_not_waited_for(tmp_path, waits):
    done = job(tmp_path, f"if {waits}:\n    saver.wait()\nsys.exit(75)\n")
    assert done.code == 75, done.err
    names = os.listdir(tmp_path / "checkpoints")
    if waits:
        assert (done.err, names) == ("", ["step-00000001"])
    else:
        assert "was given up, as the program ended with code 75" in done.err
        assert "Traceback" not in done.err
        assert all(name.endswith(".tmp") for name in names)
