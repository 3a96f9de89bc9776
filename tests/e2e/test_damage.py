"""A run goes on from its newest whole checkpoint, and says which are damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.launch import SMALL, losses, metrics, run, tparmpi

OPTIONS = (*SMALL, "--set=train.lr_schedule=constant")
FAILED = 1


def train(ranks: int, text: Path, *options: str) -> list[str]:
    return tparmpi(ranks, "train", "--run=run", f"--data={text}", *OPTIONS, *options)


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08}"


def data_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("data-*.h5"))


def flip_a_byte(checkpoint: Path) -> None:
    _, path = data_of(checkpoint)
    with path.open("r+b") as file:
        at = path.stat().st_size - 5
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 8]), at)


def lose_a_file(checkpoint: Path) -> None:
    data_of(checkpoint)[1].unlink()


def cut_a_file(checkpoint: Path) -> None:
    path = data_of(checkpoint)[1]
    os.truncate(path, path.stat().st_size // 2)


def swap_files(checkpoint: Path) -> None:
    """Give a file the content that its like had a step earlier."""
    number = int(checkpoint.name.removeprefix("step-"))
    earlier = data_of(checkpoint.with_name(f"step-{number - 1:08}"))[1]
    data_of(checkpoint)[1].write_bytes(earlier.read_bytes())


def lose_the_index(checkpoint: Path) -> None:
    (checkpoint / "index.h5").unlink()


DAMAGES = {
    6: (flip_a_byte, "the checksum of '"),
    5: (swap_files, "belongs to another save"),
    4: (lose_a_file, "is missing; '"),
    3: (cut_a_file, "cannot be read"),
    2: (lose_the_index, "has no index.h5"),
}


def contents(checkpoints: list[Path]) -> dict[Path, bytes]:
    return {file: file.read_bytes() for path in checkpoints for file in path.iterdir()}


def test_the_newest_whole_one_is_resumed_and_the_damaged_are_named(tmp_path, text):
    folder = tmp_path / "run"
    often = ("--set=checkpoint.every=1", "--set=checkpoint.keep=0")
    done = run(train(2, text, "--steps=6", *often), cwd=tmp_path)
    assert done.code == 0, done.err
    before = losses(folder)
    for number, (damage, _) in DAMAGES.items():
        damage(step(folder, number))
    damaged = [step(folder, number) for number in DAMAGES]
    left = contents(damaged)

    # Only its own last step is saved, and one kept: the damaged are not among those
    # that count, and stay.
    keys = ("every=0", "keep=1", "keep_best=false")
    seldom = [f"--set=checkpoint.{key}" for key in keys]
    again = run(train(2, text, "--steps=7", *seldom), cwd=tmp_path)
    assert again.code == 0, again.err
    for number, (_, words) in DAMAGES.items():
        name = f"run/checkpoints/step-{number:08}"
        (line,) = [x for x in again.out.splitlines() if x.startswith(f"{name} is dam")]
        assert words in line
        assert line.endswith("; going on from step 1")
    assert "resuming after step 1" in again.out
    assert losses(folder)[:6] == before
    assert [number for number, _ in losses(folder)] == list(range(1, 8))
    assert contents(damaged) == left
    assert not step(folder, 1).exists()

    # A later start knows of them, though it need not look at them.
    last = run(train(1, text, "--steps=8", *seldom), cwd=tmp_path)
    assert last.code == 0, last.err
    assert "is damaged" not in last.out
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {path.name for path in damaged} | {"step-00000008"}
    assert contents(damaged) == left


def test_a_damaged_one_is_replaced_when_its_step_is_done_again(tmp_path, text):
    folder = tmp_path / "run"
    often = ("--set=checkpoint.every=1", "--steps=3")
    assert run(train(1, text, *often), cwd=tmp_path).code == 0
    (data,) = data_of(step(folder, 3))
    os.truncate(data, data.stat().st_size - 1)
    written = run(tparmpi(1, "generate", "run", "--max-tokens=1"), cwd=tmp_path)
    assert written.code == 0
    assert written.err.startswith("tparmpi: run/checkpoints/step-00000003 is damaged")
    again = run(train(1, text, *often), cwd=tmp_path)
    assert again.code == 0, again.err
    assert "resuming after step 2" in again.out
    assert run(tparmpi(1, "ckpt", "verify", "run"), cwd=tmp_path).code == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_whole_one_nothing_is_begun_anew(tmp_path, text, ranks):
    folder = tmp_path / "run"
    often = ("--set=checkpoint.every=1", "--steps=2", "--set=train.eval_every=1")
    assert run(train(1, text, *often), cwd=tmp_path).code == 0
    for number in (1, 2):
        (step(folder, number) / "index.h5").unlink()
    before = contents([step(folder, 1), step(folder, 2)])
    for command in (train(ranks, text, *often), tparmpi(ranks, "generate", "run")):
        refused = run(command, cwd=tmp_path, limit=30)
        assert refused.code == FAILED
        assert "step-00000002 is not a checkpoint: it has no index.h5" in refused.err
        assert "there is no whole checkpoint before it: bring" in refused.err
        assert refused.err.count("\n") == 1
    assert contents([step(folder, 1), step(folder, 2)]) == before


def test_the_best_and_multiples_stay(tmp_path, text):
    """With a rate that runs wild after the warm-up, an early one is the best."""
    folder = tmp_path / "run"
    options = (
        "--set=checkpoint.every=1",
        "--set=checkpoint.keep=1",
        "--set=checkpoint.keep_every=5",
        "--set=train.eval_every=2",
        "--set=train.lr=0.5",
    )
    out = ""
    # In two parts: which is the best is known after a restart.
    for steps in ("--steps=5", "--steps=8"):
        done = run(train(2, text, *options, steps), cwd=tmp_path)
        assert done.code == 0, done.err
        out += done.out
    validated = [line for line in metrics(folder) if "val_loss" in line]
    best = min(validated, key=lambda line: line["val_loss"])["step"]
    assert [line["step"] for line in validated] == [2, 4, 5, 6, 8]
    assert best not in (5, 8)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {step(folder, number).name for number in (best, 5, 8)}
    end = "the lowest validation loss so far"
    said = [line for line in out.splitlines() if line.endswith(end)]
    assert said[-1].startswith(f"step {best}: saved ")
