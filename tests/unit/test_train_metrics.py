"""`metrics.jsonl`: written line by line, cut back to a checkpoint."""

from __future__ import annotations

import errno
import os

import pytest

from tparmpi.errors import RunFolderError
from tparmpi.train import metrics


def opened(path, step=0, notes=None):
    return metrics.MetricsFile(path, step, [].append if notes is None else notes.append)


@pytest.fixture
def path(tmp_path):
    file = opened(tmp_path / "metrics.jsonl")
    for step in range(1, 8):
        file.write(step, loss=step + 0.125)
        if step % 3 == 0:
            file.write(step, val_loss=step + 0.5)
    file.close()
    return file.path


def test_lines_come_back_as_written(path):
    lines = metrics.read(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6, 7]
    assert lines[2:4] == [{"step": 3, "loss": 3.125}, {"step": 3, "val_loss": 3.5}]


@pytest.mark.parametrize(
    ("step", "kept", "evaluated"),
    [(0, 0, -1), (2, 2, -1), (3, 4, 3), (5, 6, 3), (7, 9, 6), (9, 9, 6)],
)
def test_a_resume_cuts_back_to_its_checkpoint(path, step, kept, evaluated):
    before = metrics.read(path)
    file = opened(path, step)
    assert file.evaluated == evaluated
    assert file.loss == (min(step, 7) + 0.125 if step else None)
    assert file.val_loss == (evaluated + 0.5 if evaluated > 0 else None)
    file.write(step + 1, loss=0.5)
    file.close()
    assert metrics.read(path) == [*before[:kept], {"step": step + 1, "loss": 0.5}]


def test_a_line_that_a_kill_cut_short_is_dropped(path):
    before = metrics.read(path)
    with open(path, "ab") as file:
        file.write(b'{"step": 8, "lo')
    assert metrics.read(path) == before
    notes = []
    opened(path, 100, notes).close()
    assert path.read_bytes().endswith(b"}\n")
    assert metrics.read(path) == before
    assert notes == []


DAMAGE = [
    b"what\n",
    b"\xff\n",
    b"\n",
    b"[]\n",
    b'{"loss": 1}\n',
    b'{"step": "x"}\n',
    b'{"step": null}\n',
    b'{"step": 2, "loss": "much"}\n',
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: repr(damage[:12]))
def test_a_damaged_line_takes_no_other_with_it(path, damage):
    before, lines = metrics.read(path), path.read_bytes().splitlines(keepends=True)
    lines[1] = damage
    path.write_bytes(b"".join(lines))
    notes = []
    file = opened(path, 6, notes)
    assert (file.loss, file.val_loss, file.evaluated) == (6.125, 6.5, 6)
    file.write(7, loss=0.5)
    file.close()
    expected = [before[0], *before[2:8], {"step": 7, "loss": 0.5}]
    assert metrics.read(path) == expected
    assert len(path.read_bytes().splitlines()) == len(expected)
    (aside,) = path.parent.glob("*.old-1")
    assert aside.read_bytes() == b"".join(lines)
    (note,) = notes
    assert "damaged lines (2)" in note and str(aside) in note
    opened(path, 7, notes).close()
    assert len(notes) == 1


def test_a_whole_run_is_never_cut_to_nothing(path):
    for number in (1, 2):
        before = path.read_bytes()
        notes = []
        file = opened(path, 0, notes)
        assert (file.loss, file.val_loss, file.evaluated) == (None, None, -1)
        file.write(1, loss=number)
        file.close()
        aside = path.with_name(f"metrics.jsonl.old-{number}")
        assert aside.read_bytes() == before
        assert metrics.read(path) == [{"step": 1, "loss": number}]
        assert len(notes) == 1 and str(aside) in notes[0]


def test_what_json_cannot_hold_becomes_null(tmp_path):
    file = opened(tmp_path / "metrics.jsonl")
    file.write(1, loss=float("nan"), lr=float("inf"))
    file.close()
    assert metrics.read(file.path) == [{"step": 1, "loss": None, "lr": None}]


def test_a_full_disk_is_an_error_of_one_sentence(tmp_path, monkeypatch):
    file = opened(tmp_path / "metrics.jsonl")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl.*No space left"):
        file.write(1, loss=1.0)
    monkeypatch.undo()
    file.close()


def test_a_folder_in_the_way_is_an_error(tmp_path):
    with pytest.raises(RunFolderError, match=str(tmp_path)):
        opened(tmp_path)
