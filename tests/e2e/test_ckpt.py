"""`tparmpi ckpt` under mpirun: one rank does the work, all leave with its code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launch import SMALL, Finished, run, tparmpi


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A folder with a run of two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    options = [*SMALL, "--run=run", f"--data={text}", "--set=checkpoint.every=2"]
    done = run(tparmpi(2, "train", *options, "--steps=4"), cwd=folder)
    assert done.code == 0, done.err
    return folder


def ckpt(folder: Path, *arguments: str) -> Finished:
    return run(tparmpi(2, "ckpt", *arguments), cwd=folder, limit=30)


def test_looking_prints_once(trained):
    listed = ckpt(trained, "ls", "run", "--json")
    assert listed.code == 0, listed.err
    (line,) = listed.out.splitlines()
    assert [fact["step"] for fact in json.loads(line)] == [2, 4]
    shown = ckpt(trained, "show", "run")
    assert shown.code == 0, shown.err
    assert shown.out.count("run/checkpoints/step-00000004\n") == 1
    whole = ckpt(trained, "verify", "run")
    assert whole.code == 0, whole.err
    assert whole.out.splitlines() == [
        f"run/checkpoints/step-{step:08}: whole" for step in (2, 4)
    ]
    first, second = (f"run/checkpoints/step-{step:08}" for step in (2, 4))
    differing = ckpt(trained, "diff", first, second)
    assert (differing.code, differing.err) == (1, "")
    assert differing.out.count("step is 2 and 4\n") == 1


def test_copies_are_made_once_and_come_back(trained):
    for arguments in (
        ("export", "run", "weights.safetensors"),
        ("export", "run", "many", "--max-file-bytes=20000"),
        ("import", "many", "back", "--files=3"),
        ("reshard", "run", "one"),
    ):
        done = ckpt(trained, *arguments)
        assert done.code == 0, done.err
        assert done.out.count("\n") == 1
    assert len(list((trained / "back").glob("data-*"))) == 3
    same = ckpt(trained, "diff", "run", "one")
    assert same.code == 0, same.out
    facts = json.loads(ckpt(trained, "diff", "run", "back", "--json").out)
    assert not facts["values"]
    assert all(name.startswith("optimizer/") for name in facts["only_first"])


def test_a_mistake_is_told_once_on_all_ranks(trained):
    refused = ckpt(trained, "import", "run", "new")
    assert refused.code == 1
    assert refused.err.count("\n") == 1
    assert "holds no safetensors files" in refused.err
    assert not (trained / "new").exists()
    assert ckpt(trained, "lst").code == 2
