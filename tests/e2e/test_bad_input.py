"""What a user may get wrong: one sentence, the exit code, nothing lost, nobody left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import SMALL, losses, mpirun, run, started, tparmpi, wait_for

FAILED, USAGE = 1, 2


def sentence(finished) -> str:
    """The one line that a refused command prints."""
    lines = [line for line in finished.err.splitlines() if line.startswith("tparmpi")]
    assert len(lines) == 1, finished.err
    assert "Traceback" not in finished.err
    return lines[0]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--set=model.nlayer=4"], USAGE, ["model.nlayer", "model.n_layer"]),
        (["missing.toml"], USAGE, ["missing.toml"]),
        (["--steps=many"], USAGE, ["--steps", "many"]),
        (["--tp=3"], USAGE, ["3", "2"]),
        (
            ["--set=model.n_head=1", "--set=model.d_model=8", "--tp=2"],
            USAGE,
            ["1", "2"],
        ),
        (["--set=model.n_head=5"], USAGE, ["24", "5"]),
        (["--data=no_such_file.txt"], FAILED, ["no_such_file.txt"]),
        (["--data=short.txt"], FAILED, ["short.txt"]),
        (["--data=empty"], FAILED, ["empty"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_refused_once_on_two_ranks(tmp_path, options, code, words):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty").mkdir()
    refused = run(
        tparmpi(2, "train", *SMALL, "--run=run", *options), cwd=tmp_path, limit=30
    )
    assert refused.code == code, refused.err
    text = sentence(refused)
    for word in words:
        assert word in text
    assert not (tmp_path / "run").exists()


def test_an_unknown_command_is_refused_once(tmp_path):
    refused = run(tparmpi(2, "trian"), cwd=tmp_path, limit=30)
    assert refused.code == USAGE
    assert "trian" in sentence(refused)


def test_a_run_of_another_model_is_left_as_it_was(tmp_path, text):
    options = ["train", *SMALL, "--run=run", f"--data={text}", "--steps=2"]
    assert run(tparmpi(1, *options), cwd=tmp_path).code == 0
    before = {
        path: path.read_bytes()
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    refused = run(
        tparmpi(2, *options, "--set=model.d_model=32"), cwd=tmp_path, limit=30
    )
    assert refused.code == USAGE
    for word in ("model.d_model", "32", "24", "--run"):
        assert word in sentence(refused)
    after = {
        path: path.read_bytes()
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    assert after == before
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[1:])
    refused = run(
        tparmpi(2, *options, f"--data={other}", "--steps=3"), cwd=tmp_path, limit=30
    )
    assert refused.code == USAGE
    assert "data.train" in sentence(refused)
    after = {
        path: path.read_bytes()
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    assert after == before


def test_a_folder_in_use_is_refused(tmp_path, text):
    options = ["train", *SMALL, "--run=run", f"--data={text}", "--steps=1000000"]
    with started(tparmpi(1, *options), cwd=tmp_path) as job:
        wait_for(lambda: losses(tmp_path / "run") or job.poll() is not None)
        holder = json.loads((tmp_path / "run" / "lock").read_text())
        refused = run(tparmpi(2, *options), cwd=tmp_path, limit=30)
        assert job.poll() is None
    assert refused.code == FAILED
    for word in ("in use", str(holder["pid"]), holder["host"]):
        assert word in sentence(refused)


SMALL_DISK = """
import resource, sys
from tparmpi import comm
from tparmpi.cli.main import main
comm.init()
if comm.world().rank == int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (int(sys.argv[2]),))
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("rank", "room", "words"),
    [
        (0, 20_000, "rank 0: cannot save"),
        (1, 20_000, "rank 1: cannot save"),
        (0, 700, "metrics.jsonl"),
    ],
)
def test_a_disk_that_is_full(tmp_path, text, rank, room, words):
    options = ["train", *SMALL, "--run=run", f"--data={text}"]
    first = run(tparmpi(2, *options, "--steps=3"), cwd=tmp_path)
    assert first.code == 0, first.err
    before = saved(tmp_path / "run")
    limited = [sys.executable, "-c", SMALL_DISK, str(rank), str(room)]
    full = run([*mpirun(2), *limited, *options, "--steps=6"], cwd=tmp_path, limit=30)
    assert full.code == FAILED, full.err
    assert words in sentence(full)
    assert saved(tmp_path / "run") == before
    again = run(tparmpi(2, *options, "--steps=6"), cwd=tmp_path)
    assert again.code == 0, again.err
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def saved(run_folder: Path) -> dict[Path, bytes]:
    """Everything in the folder of checkpoints."""
    folder = run_folder / "checkpoints"
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
