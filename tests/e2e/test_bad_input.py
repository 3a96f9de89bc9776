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
        (["missing.toml"], USAGE, ["/missing.toml: No such file"]),
        (["outside.toml"], USAGE, ["'n_layer' in outside.toml", "'model.n_layer'"]),
        (["--run="], USAGE, ["--run", "empty"]),
        (["--steps=many"], USAGE, ["--steps", "many"]),
        (["--tp=3"], USAGE, ["tp=3 is for 3 ranks but there are 2"]),
        (
            ["--set=model.n_head=1", "--set=model.d_model=8", "--tp=2"],
            USAGE,
            ["1", "2"],
        ),
        (["--set=model.n_head=5"], USAGE, ["24", "5"]),
        ([f"--set=train.seed={2**63}"], USAGE, ["train.seed must be at most"]),
        (
            ["--set=model.d_model=100000000"],
            FAILED,
            ["training this model takes", "bytes on each rank", "model.d_model"],
        ),
        (
            ["--set=checkpoint.compression={'weigth' = 9}"],
            USAGE,
            ["checkpoint.compression has 'weigth'", "(near: '", "weight"],
        ),
        (["--data=no_such_file.txt"], FAILED, ["/no_such_file.txt; give a text"]),
        (["--data=*.nothing"], FAILED, ["no file matches", "/*.nothing; "]),
        (["--data=short.txt"], FAILED, ["/short.txt has 9 bytes", "needs 17"]),
        (["--data=empty.txt"], FAILED, ["/empty.txt is empty"]),
        (["--data=empty"], FAILED, ["/empty holds no text file"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_refused_once_on_two_ranks(tmp_path, options, code, words):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "outside.toml").write_text("n_layer = 2\n")
    refused = run(
        tparmpi(2, "train", *SMALL, "--run=run", *options), cwd=tmp_path, limit=30
    )
    assert refused.code == code, refused.err
    text = sentence(refused)
    for word in words:
        assert word in text
    assert not (tmp_path / "run").exists()


def test_a_misspelt_variable_is_refused_once(tmp_path):
    for command in (["train", *SMALL], ["generate", "run"]):
        refused = run(
            tparmpi(2, *command),
            cwd=tmp_path,
            limit=30,
            env={"TPARMPI_TRIAN_STEPS": "5"},
        )
        assert refused.code == USAGE
        for word in ("'TPARMPI_TRIAN_STEPS'", "'TPARMPI_TRAIN_STEPS'"):
            assert word in sentence(refused)


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
    for word in (words, "ile too large; make room", "the same command resumes"):
        assert word in sentence(full)
    assert saved(tmp_path / "run") == before
    again = run(tparmpi(2, *options, "--steps=6"), cwd=tmp_path)
    assert again.code == 0, again.err
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_numbers_that_run_away(tmp_path, text):
    options = ["--set=train.lr=1e30", "--set=train.warmup=0", "--set=train.grad_clip=0"]
    ended = run(
        tparmpi(2, "train", *SMALL, "--run=run", f"--data={text}", *options),
        cwd=tmp_path,
    )
    assert ended.code == FAILED
    assert "train.lr" in sentence(ended)
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "generate"])
def test_a_pipe_that_nobody_reads_on(tmp_path, text, command):
    options = ["train", *SMALL, "--run=run", f"--data={text}"]
    assert run(tparmpi(1, *options, "--steps=3"), cwd=tmp_path).code == 0
    more = {"train": [*options, "--steps=300"], "generate": ["generate", "run"]}
    program = [sys.executable, "-m", "tparmpi", *more[command]]
    with started(program, cwd=tmp_path) as job:
        assert job.stdout.read(1)
        job.stdout.close()
        err = job.stderr.read()
        assert (job.wait(60), err) == (0, "")
    steps = 300 if command == "train" else 3
    assert losses(tmp_path / "run")[-1][0] == steps


OUTPUTS = {
    "closed": "exec >&-",
    "both closed": "exec >&- 2>&-",
    "full": "exec >/dev/full",
    "both full": "exec >/dev/full 2>&1",
    "not writable": "exec 1</dev/null",
    "ascii": "export PYTHONIOENCODING=ascii",
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_output_that_cannot_be_written_ends_nothing(tmp_path, text, output):
    name = tmp_path / "t\u00e9xt.txt"
    name.write_bytes(text.read_bytes())
    options = ["train", *SMALL, "--run=r\u00fcn", f"--data={name}"]
    for arguments in (
        [*options, "--steps=2"],
        [*options, "--steps=3", "--json"],
        ["generate", "r\u00fcn", "--max-tokens=9"],
        ["generate", "r\u00fcn", "--max-tokens=9", "--prompt=\u00e9", "--json"],
    ):
        program = [sys.executable, "-m", "tparmpi", *arguments]
        script = f'{OUTPUTS[output]}; exec "$@"'
        done = run(["/bin/sh", "-c", script, "sh", *program], cwd=tmp_path)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err and "ignored" not in done.err
    assert losses(tmp_path / "r\u00fcn")[-1][0] == 3


def test_the_users_own_configuration_is_not_overwritten(tmp_path, text):
    mine = tmp_path / "config.toml"
    mine.write_text(f'[data]\ntrain = "{text}"\n')
    refused = run(
        tparmpi(2, "train", "config.toml", *SMALL, "--run=."), cwd=tmp_path, limit=30
    )
    assert refused.code == FAILED
    assert "it holds config.toml, which is not of a run" in sentence(refused)
    assert mine.read_text() == f'[data]\ntrain = "{text}"\n'
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_more_microbatches_than_rows(tmp_path, text):
    options = ["--dp=2", "--set=parallel.microbatches=4", "--steps=2"]
    done = run(
        tparmpi(2, "train", *SMALL, "--run=run", f"--data={text}", *options),
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    assert (
        "parallel.microbatches is 4 but no rank has more than 3 rows of a batch: "
        "1 of the microbatches always empty"
    ) in done.out


def saved(run_folder: Path) -> dict[Path, bytes]:
    """Everything in the folder of checkpoints."""
    folder = run_folder / "checkpoints"
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
