"""Ranks that are killed while they save: the next start finds a whole checkpoint.

Each job loads what the one before has left, which verifies every byte, and checks that
all values are of one step; then it saves step after step, each of them twice, so that
one is also replaced, until it is killed itself.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun, ranks_of, run, started, wait_for
from tparmpi.io import checkpoint

PROGRAM = """
import itertools, os, signal, sys
from pathlib import Path
import numpy as np
import tparmpi as tpm
from tparmpi.io import background, checkpoint, publish, saving, writer
from tparmpi.io import format as fmt

last, in_background, crash = int(sys.argv[1]), sys.argv[2] == "background", sys.argv[3:]
folder, world = Path("checkpoints"), tpm.world()
SHAPES = {"rows": (300, 401), "columns": (7, 5), "few": (1,)}
MODULES = {"os": os, "Path": Path, "fmt": fmt, "saving": saving, "writer": writer,
           "background": background}


class Model:
    def __init__(self):
        self.steps = 0
        place = tpm.group(tpm.devices())
        self.tensors = {
            name: tpm.tensor(np.zeros(shape, np.float32), place).with_sharding(
                tpm.Shard(name == "columns"), allow_empty=True
            )
            for name, shape in SHAPES.items()
        }

    def state_dict(self):
        return self.tensors

    def fill(self, step):
        self.steps = step
        for tensor in self.tensors.values():
            tensor.write_local(np.full(tensor.local.shape, step, np.float32))


def die_before(rank, module, name, call):
    place, calls = MODULES[module], itertools.count(1)
    function = getattr(place, name)

    def counted(*args, **keywords):
        if next(calls) == int(call):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **keywords)

    if world.rank == int(rank):
        setattr(place, name, counted)


def say(*words):
    if world.rank == 0:
        print(*words, flush=True)


model, optimizer, step = Model(), Model(), 0
newest = checkpoint.latest(folder)
if newest is not None:
    step = checkpoint.load(newest, model, optimizer).step
    assert optimizer.steps == step
    for bag in (model, optimizer):
        for name, tensor in bag.tensors.items():
            assert np.array_equal(tensor.numpy(), np.full(SHAPES[name], step)), name
say("resumed", step)
if crash:
    die_before(*crash)
saver = checkpoint.BackgroundSaver()
while step < last:
    step += 1
    path = checkpoint.step_path(folder, step)
    for _ in range(2):
        model.fill(step)
        optimizer.fill(step)
        if in_background:
            saver.save(path, model, optimizer, step=step)
            model.fill(-1)
            while saver.under_way:
                world.barrier()
                saver.poll()
        else:
            checkpoint.save(path, model, optimizer, step=step)
        say("published", step)
    checkpoint.prune(folder, 2)
"""

# Each kind of step of a save: a rank, and before which call of it that rank dies.
POINTS = {
    "the temporary folder is made": (0, "Path", "mkdir", 2),
    "the file is laid out": (1, "writer", "_lay_out", 1),
    "bytes are written": (1, "writer", "write_at", 4),
    "the file is synced": (1, "os", "fsync", 1),
    "the file is checked": (0, "writer", "_check_layout", 2),
    "the ranks agree": (1, "{mode}", "agree", 1),
    "the index is written": (0, "saving", "write_index", 2),
    "the folder is synced": (0, "fmt", "sync", 2),
    "the old one is moved aside": (0, "os", "rename", 2),
    "the new one gets its name": (0, "os", "rename", 3),
    "the parent is synced": (0, "fmt", "sync", 6),
    "the old one is removed": (0, "os", "unlink", 1),
}


def check_output(out: str, published: int) -> int:
    """The job began with a step that was published; return the last one it did."""
    resumed = int(re.search(r"^resumed (\d+)$", out, re.MULTILINE)[1])
    # What was published without a chance to say so is one step more.
    assert resumed in (published, published + 1)
    return max([resumed, *map(int, re.findall(r"^published (\d+)$", out, re.M))])


@pytest.mark.parametrize("first", ["saving", "background"])
def test_a_rank_dies_at_each_kind_of_step(tmp_path, first):
    """In the foreground and in the background by turns."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*mpirun(2), sys.executable, "program.py"]
    modes = ["saving", "background"]
    published = 0
    for number, (point, crash) in enumerate(POINTS.items()):
        mode = modes[(number + modes.index(first)) % 2]
        words = [str(word).format(mode=mode) for word in crash]
        done = run([*command, "99", mode, *words], cwd=tmp_path)
        assert done.code != 0, point
        published = check_output(done.out, published)
        assert published < 99, point
    done = run([*command, str(published + 2), first], cwd=tmp_path)
    assert done.code == 0, done.err
    assert check_output(done.out, published) == published + 2
    names = [checkpoint.step_path("", published + n).name for n in (1, 2)]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == names


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["saving", "background"])
def test_ranks_die_at_random_moments(tmp_path: Path, mode: str):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*mpirun(3), sys.executable, "program.py", "100000", mode]
    chance = random.Random(mode)
    published = 0
    folder = tmp_path / "checkpoints"

    def newest() -> str:
        return max(os.listdir(folder), default="") if folder.is_dir() else ""

    for _ in range(40):
        before = newest()
        with started(command, cwd=tmp_path) as job:
            wait_for(lambda before=before: newest() > before or job.poll() is not None)
            time.sleep(chance.uniform(0, 0.3))
            victims = ranks_of(job)
            for rank in victims if chance.random() < 0.5 else [chance.choice(victims)]:
                os.kill(rank, signal.SIGKILL)
            out, err = job.communicate(timeout=60)
        assert "Error" not in err, err
        published = check_output(out, published)
        found = checkpoint.latest(folder)
        assert checkpoint.verify(found) == []
    print(f"{published} steps were published")
