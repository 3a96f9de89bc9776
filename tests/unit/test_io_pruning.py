"""Which checkpoints stay when a folder is tidied."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.io_samples import unique, write
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint, inspection


def fill(folder, losses):
    """Checkpoints of the given steps, with what they record as a loss."""
    folder.mkdir()
    array = {"model/w": unique((4, 3), np.float32)}
    for step, loss in losses.items():
        extra = {} if loss is None else {"val_loss": loss}
        path = checkpoint.step_path(folder, step)
        write(path, array, f"{step:016}", step=step, extra=extra)
    return folder


def steps(folder):
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(folder))


def data_file(folder, step):
    path = checkpoint.step_path(folder, step)
    return sorted(path.glob("data-*.h5"))[1]


PLAIN = dict.fromkeys(range(1, 13))
LOSSES = {1: 3.0, 2: 1.5, 3: None, 4: 2.0, 5: 1.5, 6: float("nan"), 7: None, 8: 2.5}

ODD = {1: "low", 2: [0], 3: 4, 4: 5.0, 5: 10**400, 6: -(10**400)}


@pytest.mark.parametrize(
    ("losses", "arguments", "left"),
    [
        (PLAIN, {"keep": 1}, [12]),
        (PLAIN, {"keep": 99}, list(range(1, 13))),
        (PLAIN, {"keep": 2, "keep_every": 5}, [5, 10, 11, 12]),
        (PLAIN, {"keep": 2, "keep_every": 1}, list(range(1, 13))),
        (PLAIN, {"keep": 2, "keep_best": "val_loss"}, [11, 12]),
        (LOSSES, {"keep": 2, "keep_best": "val_loss"}, [5, 7, 8]),
        (LOSSES, {"keep": 1, "keep_best": "val_loss", "keep_every": 3}, [3, 5, 6, 8]),
        (LOSSES, {"keep": 1, "keep_best": "accuracy"}, [8]),
        (ODD, {"keep": 1, "keep_best": "val_loss"}, [3, 6]),
        ({0: 1.0, 1: 2.0, 2: 0.5}, {"keep": 1, "keep_every": 7}, [0, 2]),
    ],
)
def test_the_newest_multiples_and_the_best_stay(tmp_path, losses, arguments, left):
    folder = fill(tmp_path / "a", losses)
    removed = checkpoint.prune(folder, **arguments)
    gone = [checkpoint.step_path(folder, n) for n in sorted(set(losses) - set(left))]
    assert removed == gone
    assert steps(folder) == left
    assert checkpoint.prune(folder, **arguments) == []


def test_the_newest_of_equally_good_ones_is_the_best(tmp_path):
    folder = fill(tmp_path / "a", LOSSES)
    assert checkpoint.best(folder, "val_loss") == checkpoint.step_path(folder, 5)
    (checkpoint.step_path(folder, 5) / "index.h5").unlink()
    assert checkpoint.best(folder, "val_loss") == checkpoint.step_path(folder, 2)
    data_file(folder, 2).unlink()
    assert checkpoint.best(folder, "val_loss") == checkpoint.step_path(folder, 4)
    assert checkpoint.best(folder, "accuracy") is None
    assert checkpoint.best(tmp_path / "nothing", "val_loss") is None


def test_damaged_ones_neither_count_nor_go(tmp_path):
    folder = fill(tmp_path / "a", dict.fromkeys(range(1, 10), 1.0) | {7: 0.5})
    data_file(folder, 9).unlink()
    os.truncate(data_file(folder, 8), 300)
    (checkpoint.step_path(folder, 5) / "index.h5").unlink()
    os.truncate(checkpoint.step_path(folder, 2) / "index.h5", 100)
    known = {"step-00000007", "step-00000004"}
    best = {"keep_best": "val_loss", "damaged": known}
    assert len(checkpoint.prune(folder, 2, **best)) == 1
    assert steps(folder) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert len(checkpoint.prune(folder, 1, **best)) == 1
    assert steps(folder) == [2, 4, 5, 6, 7, 8, 9]


def test_what_a_look_at_a_checkpoint_tells(tmp_path):
    folder = fill(tmp_path / "a", {1: None})
    path = checkpoint.step_path(folder, 1)
    assert inspection.flaw(path) is None
    cut = data_file(folder, 1)
    os.truncate(cut, cut.stat().st_size - 1)
    assert inspection.flaw(path).startswith(f"{cut} cannot be read: ")
    cut.unlink()
    assert inspection.flaw(path) == f"{cut} is missing"
    os.truncate(path / "index.h5", 10)
    assert "index.h5 cannot be read" in inspection.flaw(path)


@pytest.mark.parametrize("number", [1.5, "2", -1])
def test_numbers_that_are_none_are_refused(tmp_path, number):
    folder = fill(tmp_path / "a", {1: None, 2: None})
    with pytest.raises(CheckpointError, match="keep_every must be an integer from 0"):
        checkpoint.prune(folder, 1, keep_every=number)
    assert steps(folder) == [1, 2]
