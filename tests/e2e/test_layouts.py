"""A run gives the same numbers however its ranks share the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import metrics, run, tparmpi

STEPS = 20
OPTIONS = (
    f"--steps={STEPS}",
    "--set=model.n_layer=4",
    "--set=model.d_model=32",
    "--set=model.n_head=8",
    "--set=model.d_ff=51",
    "--set=model.seq_len=12",
    "--set=model.dropout=0.1",
    "--set=train.batch_size=3",
    "--set=train.warmup=5",
    "--set=train.precision=float64",
)


def numbers(folder: Path, text: Path, ranks: int, *options: str) -> list[float]:
    """Loss and gradient norm of every step, and the validation loss."""
    command = tparmpi(ranks, "train", f"--run={folder}", f"--data={text}", *OPTIONS)
    done = run([*command, *options], cwd=text.parent)
    assert done.code == 0, done.err
    lines = metrics(folder)
    assert len(lines) == STEPS + 1
    names = ("loss", "grad_norm", "val_loss")
    return [line[name] for line in lines for name in names if name in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, text: Path) -> list[float]:
    return numbers(tmp_path_factory.mktemp("alone") / "run", text, 1)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ["--set=parallel.microbatches=5"]),
        (2, ["--tp=2"]),
        (3, ["--tp=3"]),
        (4, ["--tp=4", "--set=parallel.microbatches=2"]),
        (2, ["--dp=2"]),
        (3, ["--dp=3", "--set=parallel.microbatches=2"]),
        (4, ["--dp=4"]),
        (4, ["--tp=2", "--dp=2", "--set=parallel.microbatches=2"]),
        (3, ["--tp=3", "--set=parallel.sequence=true"]),
        (4, ["--dp=4", "--set=parallel.fully_sharded=true"]),
        (4, ["--pp=2", "--tp=2", "--set=parallel.sequence=true"]),
        (
            4,
            [
                "--pp=2",
                "--dp=2",
                "--set=parallel.fully_sharded=true",
                "--set=parallel.schedule=zero_bubble",
                "--set=parallel.microbatches=2",
            ],
        ),
        (
            4,
            [
                "--pp=2",
                "--dp=2",
                "--set=parallel.microbatches=2",
                "--set=parallel.recompute=true",
            ],
        ),
        (
            2,
            [
                "--pp=2",
                "--set=parallel.schedule=interleaved",
                "--set=parallel.chunks=2",
                "--set=parallel.microbatches=3",
            ],
        ),
        (
            4,
            [
                "--pp=4",
                "--set=parallel.schedule=gpipe",
                "--set=parallel.microbatches=3",
            ],
        ),
        (
            4,
            [
                "--tp=2",
                "--dp=2",
                "--set=parallel.sequence=true",
                "--set=parallel.fully_sharded=true",
                "--set=parallel.microbatches=2",
            ],
        ),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else str(value),
)
def test_every_layout_gives_the_same_numbers(alone, tmp_path, text, ranks, options):
    # Sums in another order: 1e-15 each, grown by 20 optimizer steps.
    others = numbers(tmp_path / "run", text, ranks, *options)
    assert others == pytest.approx(alone, rel=1e-10, abs=0.0)
