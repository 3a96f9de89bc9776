"""A run that is killed, asked to stop, or moved to other ranks goes on as it was."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.launch import (
    SMALL,
    losses,
    metrics,
    mpirun,
    ranks_of,
    run,
    started,
    tparmpi,
    wait_for,
)

STEPS = 24
OPTIONS = (
    *SMALL,
    f"--steps={STEPS}",
    "--set=checkpoint.every=5",
    "--set=train.eval_every=7",
)
STOPPED = 75


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, text) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = run(train(2, text), cwd=folder)
    assert done.code == 0, done.err
    return folder / "run"


def train(ranks: int, text: Path, *options: str) -> list[str]:
    return tparmpi(ranks, "train", "--run=run", f"--data={text}", *OPTIONS, *options)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def evaluations(folder: Path) -> list[tuple[int, float]]:
    return [
        (line["step"], line["val_loss"])
        for line in metrics(folder)
        if "val_loss" in line
    ]


def reached(job: subprocess.Popen[str], folder: Path, lines: int) -> bool:
    """Whether the metrics have so many lines, or never will."""
    return len(metrics(folder)) >= lines or job.poll() is not None


def test_a_whole_run(uninterrupted):
    assert [step for step, _ in losses(uninterrupted)] == list(range(1, STEPS + 1))
    assert [step for step, _ in evaluations(uninterrupted)] == [7, 14, 21, STEPS]
    assert checkpoints(uninterrupted) == ["step-00000020", "step-00000024"]
    assert not (uninterrupted / "lock").exists()
    for line in metrics(uninterrupted):
        if "loss" in line:
            keys = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "step_s"}
            assert keys == set(line)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_run_goes_on_bit_for_bit(uninterrupted, tmp_path, text, seed):
    chance = random.Random(seed)
    folder = tmp_path / "run"
    step = chance.randint(2, STEPS - 2)
    with started(train(2, text), cwd=tmp_path) as job:
        wait_for(partial(reached, job, folder, step))
        victims = wait_for(lambda: ranks_of(job))
        os.kill(chance.choice(victims), signal.SIGKILL)
        job.communicate(timeout=30)
        assert job.returncode != 0
    again = run(train(2, text), cwd=tmp_path)
    assert again.code == 0, again.err
    assert losses(folder) == losses(uninterrupted)
    assert evaluations(folder) == evaluations(uninterrupted)
    assert checkpoints(folder) == checkpoints(uninterrupted)


def test_a_run_that_saves_in_the_background_is_the_same(uninterrupted, tmp_path, text):
    folder, option = tmp_path / "run", "--set=checkpoint.background=true"
    with started(train(2, text, option), cwd=tmp_path) as job:
        wait_for(partial(reached, job, folder, 8))
        os.kill(ranks_of(job)[0], signal.SIGUSR1)
        out, err = job.communicate(timeout=30)
        assert job.returncode == STOPPED, err
    assert f"step {losses(folder)[-1][0]}: saved" in out
    with started(train(2, text, option), cwd=tmp_path) as job:
        wait_for(partial(reached, job, folder, 17))
        os.kill(wait_for(lambda: ranks_of(job))[1], signal.SIGKILL)
        job.communicate(timeout=30)
    again = run(train(2, text, option), cwd=tmp_path)
    assert again.code == 0, again.err
    assert losses(folder) == losses(uninterrupted)
    assert evaluations(folder) == evaluations(uninterrupted)
    assert checkpoints(folder) == checkpoints(uninterrupted)


def test_a_finished_run_ends_at_once(uninterrupted, text):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    again = run(train(2, text, "--json"), cwd=uninterrupted.parent)
    assert again.code == 0, again.err
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before
    outcome = json.loads(again.out.splitlines()[-1])
    assert (outcome["step"], outcome["stopped"]) == (STEPS, False)
    assert f"run already has {STEPS} steps, nothing to do" in again.err
    assert outcome["loss"] == losses(uninterrupted)[-1][1]
    assert outcome["val_loss"] == evaluations(uninterrupted)[-1][1]


def test_fewer_steps_than_were_done_are_nothing_to_do(tmp_path, text):
    folder = tmp_path / "run"
    done = run(train(2, text, "--steps=5"), cwd=tmp_path)
    assert done.code == 0, done.err
    before = (folder / "metrics.jsonl").read_bytes()
    again = run(train(2, text, "--steps=3"), cwd=tmp_path)
    assert again.code == 0, again.err
    assert "run already has 5 steps, nothing to do" in again.out
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert "steps = 5\n" in (folder / "config.toml").read_text()


def test_metrics_outlive_their_checkpoints(tmp_path, text):
    folder = tmp_path / "run"
    assert run(train(2, text, "--steps=5"), cwd=tmp_path).code == 0
    before = (folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    again = run(train(2, text, "--steps=2"), cwd=tmp_path)
    assert again.code == 0, again.err
    assert (folder / "metrics.jsonl.old-1").read_bytes() == before
    assert "kept as run/metrics.jsonl.old-1" in again.out
    assert [step for step, _ in losses(folder)] == [1, 2]


def test_a_run_goes_on_with_other_ranks(uninterrupted, tmp_path, text):
    folder = tmp_path / "run"
    first = run(
        train(2, text, "--steps=10", "--set=train.lr_schedule=constant"), cwd=tmp_path
    )
    assert first.code == 0, first.err
    options = [
        "--set=train.lr_schedule=constant",
        "--dp=3",
        "--set=parallel.microbatches=2",
    ]
    second = run(train(3, text, *options), cwd=tmp_path)
    assert second.code == 0, second.err
    whole = tmp_path / "whole"
    whole.mkdir()
    straight = run(train(1, text, "--set=train.lr_schedule=constant"), cwd=whole)
    assert straight.code == 0, straight.err
    mine, reference = losses(folder), losses(whole / "run")
    assert [step for step, _ in mine] == list(range(1, STEPS + 1))
    # Other layouts add in another order; 24 steps in float32 agree to 1e-4.
    for (_, loss), (_, expected) in zip(mine, reference, strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)


def test_a_run_goes_on_with_other_stages(tmp_path, text):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    options = (
        "--set=train.lr_schedule=constant",
        "--set=train.precision=float64",
        "--set=model.n_layer=2",
    )
    for steps, split in ((5, "--pp=2"), (10, "--tp=2"), (15, "--pp=2")):
        done = run(train(2, text, f"--steps={steps}", split, *options), cwd=tmp_path)
        assert done.code == 0, done.err
        waits = "parallel.microbatches is 1 for 2 stages" in done.out
        assert waits == (split == "--pp=2")
    whole.mkdir()
    straight = run(train(1, text, "--steps=15", *options), cwd=whole)
    assert straight.code == 0, straight.err
    mine, reference = losses(folder), losses(whole / "run")
    assert [step for step, _ in mine] == list(range(1, 16))
    for (_, loss), (_, expected) in zip(mine, reference, strict=True):
        assert loss == pytest.approx(expected, rel=1e-10)
    arguments = ("generate", "--prompt=1", "--max-tokens=20", "--temperature=0")
    texts = [
        run(tparmpi(1, *arguments, one), cwd=tmp_path).out
        for one in (folder, whole / "run")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 2


@pytest.mark.parametrize(
    ("number", "rank"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0), (signal.SIGINT, 1)]
)
def test_a_signal_to_one_rank_saves_on_all(uninterrupted, tmp_path, text, number, rank):
    folder = tmp_path / "run"
    with started(train(2, text, "--steps=100000"), cwd=tmp_path) as job:
        wait_for(partial(reached, job, folder, 3))
        os.kill(ranks_of(job)[rank], number)
        out, err = job.communicate(timeout=30)
        assert job.returncode == STOPPED, err
    assert "the same command resumes" in out
    stopped_at = losses(folder)[-1][0]
    assert f"step-{stopped_at:08}" in checkpoints(folder)
    assert not (folder / "lock").exists()


def test_ctrl_c_reaches_the_ranks_through_the_launcher(tmp_path, text):
    version = subprocess.run(
        [mpirun(1)[0], "--version"], capture_output=True, text=True, timeout=30
    )
    if "HYDRA" not in version.stdout.upper():
        pytest.skip("only MPICH's mpirun lets the ranks live long enough to save")
    folder = tmp_path / "run"
    with started(train(2, text, "--steps=100000"), cwd=tmp_path) as job:
        wait_for(partial(reached, job, folder, 3))
        os.killpg(job.pid, signal.SIGINT)
        _, err = job.communicate(timeout=30)
        assert job.returncode == STOPPED, err
    assert f"step-{losses(folder)[-1][0]:08}" in checkpoints(folder)


def test_signals_at_any_time_never_lose_a_step(uninterrupted, tmp_path, text):
    """While starting, training, evaluating and saving, several at once."""
    folder = tmp_path / "run"
    starts = 0
    chance = random.Random(7)
    code = STOPPED
    while code == STOPPED:
        starts += 1
        with started(train(2, text), cwd=tmp_path) as job:
            victims = wait_for(lambda: ranks_of(job))
            target = len(metrics(folder)) + chance.randint(1, 6)
            wait_for(partial(reached, job, folder, target))
            for _ in range(chance.randint(1, 3)):
                if job.poll() is None:
                    os.kill(chance.choice(victims), signal.SIGUSR1)
            _, err = job.communicate(timeout=30)
            code = job.returncode
    assert code == 0, err
    assert starts > 2
    assert losses(folder) == losses(uninterrupted)
    assert evaluations(folder) == evaluations(uninterrupted)
