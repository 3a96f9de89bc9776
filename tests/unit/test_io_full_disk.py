"""A disk that is really full: a small tmpfs, which only root can mount."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint


class Model:
    def __init__(self, count, start):
        # So irregular that compression gains little.
        noise = np.random.default_rng(1).random(count, np.float32)
        values = start + np.where(np.arange(count), noise, 0).astype(np.float32)
        self.tensors = {
            f"layers.{i}.w": tpm.tensor(values + i, tpm.device()) for i in range(4)
        }

    def state_dict(self):
        return self.tensors


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 1 MiB."""
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def in_background(*args, **keywords):
    saver = checkpoint.BackgroundSaver()
    saver.save(*args, **keywords)
    saver.wait()


@pytest.mark.parametrize(
    ("save", "compression"),
    [(checkpoint.save, None), (checkpoint.save, 1), (in_background, None)],
)
@pytest.mark.parametrize("left", [0, 1, 2, 3, 5, 8, 40])
def test_a_full_disk_keeps_the_previous_checkpoint_and_leaves_nothing(
    small_disk, left, save, compression
):
    """With `left` free pages the save fails in the folder, the data or the index."""
    path = checkpoint.step_path(small_disk, 1)
    checkpoint.save(path, Model(20_000, 5), step=1)
    filler = small_disk / "filler"
    free = os.statvfs(small_disk).f_bavail - left
    filler.write_bytes(bytes(4096 * free))
    for again in (path, checkpoint.step_path(small_disk, 2)):
        with pytest.raises(
            CheckpointError, match=r"cannot save .*No space left on device"
        ):
            save(again, Model(20_000, 9), step=2, compression=compression)
        assert sorted(os.listdir(small_disk)) == ["filler", "step-00000001"]
    model = Model(20_000, 0)
    assert checkpoint.load(path, model).step == 1
    assert model.tensors["layers.3.w"].numpy()[0] == 8
    filler.unlink()
    checkpoint.save(path, Model(20_000, 9), step=2)
    assert checkpoint.load(path, model).step == 2
