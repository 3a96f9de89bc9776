"""`tparmpi ckpt` under mpirun: one rank does the work, all leave with its code."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import pytest

from tests.e2e.launch import SMALL, Finished, run, tparmpi


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A folder with a run of two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    options = [*SMALL, "--run=run", f"--data={text}", "--set=checkpoint.every=2"]
    options += ["--set=checkpoint.compression={'.*[.]m' = 1, '.*norm.*' = 'gzip'}"]
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


def levels(path: Path) -> dict[str, set[int | None]]:
    """The levels of compression of weights, norms and moments in a checkpoint."""
    found: dict[str, set[int | None]] = {}

    def note(name: str, entry: h5py.Group | h5py.Dataset) -> None:
        if isinstance(entry, h5py.Dataset) and entry.size:
            last = name.rpartition("/")[2]
            kind = "norm" if "norm" in name and last != "m" else last
            found.setdefault(kind, set()).add(entry.compression_opts)

    for data in path.glob("data-*"):
        with h5py.File(data) as file:
            file.visititems(note)
    return found


def test_what_is_compressed_is_configured(trained):
    expected = {"m": {1}, "v": {None}, "norm": {4}}
    expected |= {key: {None} for key in ("weight", "bias", "positions")}
    for step in (2, 4):
        path = trained / f"run/checkpoints/step-{step:08}"
        assert levels(path) == expected


def test_copies_are_made_once_and_come_back(trained):
    for arguments in (
        ("export", "run", "weights.safetensors"),
        ("export", "run", "many", "--max-file-bytes=20000"),
        ("import", "many", "back", "--files=3"),
        ("reshard", "run", "one"),
        ("reshard", "run", "small", "--compression=9"),
    ):
        done = ckpt(trained, *arguments)
        assert done.code == 0, done.err
        assert done.out.count("\n") == 1
    assert len(list((trained / "back").glob("data-*"))) == 3
    same = ckpt(trained, "diff", "run", "one")
    assert same.code == 0, same.out
    assert set().union(*levels(trained / "one").values()) == {None}
    assert set().union(*levels(trained / "small").values()) == {9}
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
