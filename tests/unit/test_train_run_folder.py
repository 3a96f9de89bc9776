"""The run folder: what it holds and who may write it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tparmpi.errors import RunFolderError, UsageError
from tparmpi.train import lock as lock_module
from tparmpi.train.config import RunConfig
from tparmpi.train.lock import Holder, Lock
from tparmpi.train.run_folder import RunFolder


@pytest.fixture
def notes():
    return []


def hold(path, **changes):
    """Write a lock file as another process would have left it."""
    other = dataclasses.replace(Holder.this_process(), **changes)
    path.write_text(json.dumps(dataclasses.asdict(other)))
    return other


def ended_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_lock_is_exclusive_and_comes_back(tmp_path, notes):
    path = tmp_path / "lock"
    lock = Lock.take(path, notes.append)
    assert lock.is_held()
    with pytest.raises(RunFolderError) as refused:
        Lock.take(path, notes.append)
    for word in (str(tmp_path), str(os.getpid()), "in use", "--run"):
        assert word in str(refused.value)
    lock.release()
    Lock.take(path, notes.append).release()
    assert list(tmp_path.iterdir()) == []
    assert notes == []


def test_the_refusal_names_job_process_and_host(tmp_path, notes):
    hold(tmp_path / "lock", host="node7", pid=4711, job="815")
    with pytest.raises(RunFolderError, match="job 815, process 4711 on node7"):
        Lock.take(tmp_path / "lock", notes.append)


def test_a_process_that_has_ended_holds_nothing(tmp_path, notes):
    hold(tmp_path / "lock", pid=ended_process(), started="123")
    Lock.take(tmp_path / "lock", notes.append).release()
    assert len(notes) == 1
    assert "a process that has ended" in notes[0]


def test_a_later_process_with_the_same_number_is_told_apart(tmp_path, notes):
    hold(tmp_path / "lock", pid=os.getpid(), started="123")
    Lock.take(tmp_path / "lock", notes.append).release()
    assert "a process that has ended" in notes[0]


def test_an_earlier_start_of_the_same_job_holds_nothing(tmp_path, notes, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "815")
    hold(tmp_path / "lock", host="node7", restart=0)
    with pytest.raises(RunFolderError, match="job 815"):
        Lock.take(tmp_path / "lock", notes.append)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Lock.take(tmp_path / "lock", notes.append).release()
    assert "an earlier start of this job" in notes[0]


def test_a_silent_holder_loses_the_lock(tmp_path, notes):
    path = tmp_path / "lock"
    hold(path, host="node7")
    long_ago = time.time() - 2 * lock_module.STALE_SECONDS
    os.utime(path, (long_ago, long_ago))
    Lock.take(path, notes.append).release()
    assert "silent for" in notes[0]


def test_an_unreadable_lock_is_kept_while_it_is_fresh(tmp_path, notes):
    path = tmp_path / "lock"
    path.write_text("what")
    with pytest.raises(RunFolderError, match="an unreadable lock"):
        Lock.take(path, notes.append)
    os.utime(path, (1, 1))
    Lock.take(path, notes.append).release()


def test_the_heartbeat_goes_on(tmp_path, notes, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.02)
    path = tmp_path / "lock"
    lock = Lock.take(path, notes.append)
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 10
    while path.stat().st_mtime == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.time() - path.stat().st_mtime < 60
    lock.release()


def test_a_lock_that_was_taken_over_is_noticed_and_left(tmp_path, notes):
    path = tmp_path / "lock"
    lock = Lock.take(path, notes.append)
    other = hold(path, token="other")
    assert not lock.is_held()
    lock.release()
    assert json.loads(path.read_text()) == dataclasses.asdict(other)


def test_one_of_many_takes_a_stale_lock(tmp_path, notes):
    path = tmp_path / "lock"
    for _ in range(20):
        hold(path, pid=ended_process(), started="123")
        taken, refused = [], []

        def take(taken=taken, refused=refused):
            try:
                taken.append(Lock.take(path, notes.append))
            except RunFolderError as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        assert len(refused) == 7
        assert taken[0].is_held()
        taken[0].release()


def test_who_died_while_taking_over_is_in_nobodys_way(tmp_path, notes):
    path = tmp_path / "lock"
    dead = hold(path, pid=ended_process(), started="123")
    hold(tmp_path / f"lock.{dead.token}.heir", pid=ended_process(), started="123")
    Lock.take(path, notes.append).release()
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_is_recorded_whole(tmp_path, notes):
    folder = RunFolder(tmp_path / "a" / "run")
    config = RunConfig().replace({"train.seed": 3})
    lock = folder.claim(config, notes.append)
    assert folder.checkpoints.is_dir()
    folder.record(config)
    assert folder.read_config() == config.resolved()
    folder.record(config.replace({"train.steps": 7}))
    assert folder.read_config().train.steps == 7
    assert {path.name for path in folder.path.iterdir()} == {
        "checkpoints",
        "config.toml",
        "lock",
    }
    lock.release()


def begin(folder, notes):
    """Leave a run of the default model with something to resume."""
    folder.claim(RunConfig(), notes.append).release()
    folder.record(RunConfig())
    checkpoint = folder.checkpoints / "step-00000001"
    checkpoint.mkdir()
    (checkpoint / "index.h5").touch()


def test_nothing_to_resume_may_be_replaced(tmp_path, notes):
    folder = RunFolder(tmp_path)
    folder.claim(RunConfig(), notes.append).release()
    folder.record(RunConfig())
    folder.claim(RunConfig().replace({"model.n_head": 4}), notes.append).release()


def test_a_run_of_another_model_is_refused_and_left(tmp_path, notes):
    folder = RunFolder(tmp_path)
    begin(folder, notes)
    before = folder.config.read_text()
    with pytest.raises(UsageError, match=r"model\.d_model is 64 .* 128"):
        folder.claim(RunConfig().replace({"model.d_model": 64}), notes.append)
    assert folder.config.read_text() == before
    assert not folder.lock.exists()


def test_a_folder_in_use_is_not_claimed(tmp_path, notes):
    folder = RunFolder(tmp_path)
    lock = folder.claim(RunConfig(), notes.append)
    with pytest.raises(RunFolderError, match="in use"):
        folder.claim(RunConfig(), notes.append)
    assert lock.is_held()
    lock.release()


def test_a_damaged_configuration_is_an_error(tmp_path, notes):
    folder = RunFolder(tmp_path)
    begin(folder, notes)
    folder.config.write_text("[model")
    with pytest.raises(RunFolderError, match=r"config\.toml"):
        folder.claim(RunConfig(), notes.append)
    assert not folder.lock.exists()


MINE = "[model]\nn_layer = 1\n"


@pytest.mark.parametrize(
    ("holds", "named"),
    [
        ({"config.toml": MINE}, "config.toml"),
        ({"config.toml": MINE, "checkpoints/model.pt": ""}, "config.toml"),
        ({"config.toml": MINE, "metrics.jsonl": "", "lock": ""}, "config.toml"),
        ({"metrics.jsonl": '{"epoch": 1}\n'}, "metrics.jsonl"),
        ({"checkpoints/model.pt": ""}, "checkpoints"),
        ({"checkpoints": ""}, "checkpoints"),
        ({"notes.txt": "mine", ".hidden": ""}, "notes.txt"),
    ],
)
def test_a_folder_of_something_else_is_left(tmp_path, notes, holds, named):
    for name, text in holds.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFolderError) as refused:
        RunFolder(tmp_path).claim(RunConfig(), notes.append)
    for word in (str(tmp_path), f"holds {named},", "--run"):
        assert word in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert all((tmp_path / name).read_text() == text for name, text in holds.items())


def test_a_copied_configuration_is_not_a_run(tmp_path, notes):
    first, copy = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "copy")
    first.claim(RunConfig(), notes.append).release()
    first.record(RunConfig())
    copy.path.mkdir()
    copy.config.write_bytes(first.config.read_bytes())
    with pytest.raises(RunFolderError, match=r"holds config\.toml,"):
        copy.claim(RunConfig(), notes.append)


def test_a_start_that_ended_early_is_gone_on_from(tmp_path, notes):
    folder = RunFolder(tmp_path)
    (tmp_path / ".gitignore").touch()
    folder.claim(RunConfig(), notes.append).release()
    hold(folder.lock, pid=ended_process(), started="123")
    (tmp_path / "config.toml.new").write_text("[mod")
    (folder.checkpoints / "step-00000005.0123456789abcdef.tmp").mkdir()
    folder.claim(RunConfig(), notes.append).release()


def test_a_run_without_its_checkpoints_is_still_one(tmp_path, notes):
    folder = RunFolder(tmp_path)
    folder.claim(RunConfig(), notes.append).release()
    folder.record(RunConfig())
    folder.metrics.touch()
    folder.checkpoints.rmdir()
    folder.claim(RunConfig(), notes.append).release()


def test_a_path_in_any_script_is_recorded(tmp_path, notes):
    folder = RunFolder(tmp_path)
    config = RunConfig().replace({"data.train": "\u6587.txt"}).resolved()
    folder.claim(config, notes.append).release()
    folder.record(config)
    assert folder.read_config() == config


def test_a_read_only_folder_is_told_so(tmp_path, notes, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    lock = Lock.take(tmp_path / "held", notes.append)
    for name in ("write_text", "unlink"):
        monkeypatch.setattr(type(tmp_path), name, refuse)
    with pytest.raises(RunFolderError, match="Read-only file system"):
        Lock.take(tmp_path / "lock", notes.append)
    lock.release()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, notes):
    (tmp_path / "file").write_text("")
    folder = RunFolder(tmp_path / "file" / "run")
    with pytest.raises(RunFolderError, match="--run"):
        folder.claim(RunConfig(), notes.append)


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(RunFolderError, match="is no run folder"):
        RunFolder(tmp_path).read_config()
