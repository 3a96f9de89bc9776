"""`tparmpi ckpt`: checkpoints on the command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.io_samples import SAVE_ID, samples, unique, write
from tparmpi.cli.ckpt import diff
from tparmpi.io import format as fmt


def ckpt(*arguments, program="-m tparmpi"):
    return subprocess.run(
        [sys.executable, *program.split(" ", 1), "ckpt", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two checkpoints."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (5, 10):
        arrays = samples() | {"model/w": unique((4, 300), np.float32, step)}
        write(folder / f"step-{step:08}", arrays, step=step, save_id=f"{step:016}")
    return tmp_path / "run"


def test_ls_lists_a_runs_checkpoints(run):
    listed = ckpt("ls", run)
    assert listed.returncode == 0, listed.stderr
    head, *rows = listed.stdout.splitlines()
    assert head.split() == ["step", "val_loss", "tensors", "bytes", "files", "path"]
    assert [row.split()[0] for row in rows] == ["5", "10"]
    assert rows[1].endswith("checkpoints/step-00000010")
    facts = json.loads(ckpt("ls", run, "--json").stdout)
    assert [fact["step"] for fact in facts] == [5, 10]
    assert facts[0]["tensors"] == len(samples()) + 1


def test_show_takes_a_run_or_a_step(run):
    newest = ckpt("show", run)
    assert newest.returncode == 0, newest.stderr
    assert newest.stdout.startswith(f"{run}/checkpoints/step-00000010\n")
    (row,) = [line for line in newest.stdout.splitlines() if line[:8] == "model/w "]
    assert row.split() == ["model/w", "float32", "4x300", "4.7", "KiB"]
    facts = json.loads(ckpt("show", run / "checkpoints/step-00000005", "--json").stdout)
    assert facts["step"] == 5
    assert facts["tensors"]["model/w"] == {
        "shape": [4, 300],
        "dtype": "float32",
        "bytes": 4800,
    }


def test_verify_finds_a_flipped_byte_with_code_1(run):
    whole = ckpt("verify", run)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count(": whole\n") == 2
    path = run / "checkpoints/step-00000005" / fmt.data_name(f"{5:016}", 1)
    with path.open("r+b") as file:
        at = file.read().index(unique((2, 300), np.float32, 5 + 600 * 7).tobytes())
        os.pwrite(file.fileno(), b"\xff", at + 100)
    damaged = ckpt("verify", run)
    assert damaged.returncode == 1
    assert damaged.stderr == ""
    first, second, third = damaged.stdout.splitlines()
    assert first.endswith("step-00000005: damaged")
    assert str(path) in second
    assert "'model/w'" in second
    assert third.endswith("step-00000010: whole")
    facts = json.loads(ckpt("verify", run, "--json").stdout)
    assert [len(fact["problems"]) for fact in facts] == [1, 0]


def flip(folder):
    path = folder / fmt.data_name(SAVE_ID, 1)
    with path.open("r+b") as file:
        at = file.read().index(unique((2, 300), np.float32, 5 + 600 * 7).tobytes())
        os.pwrite(file.fileno(), b"\xff", at + 100)
    return path


def lose(folder):
    path = folder / fmt.data_name(SAVE_ID, 1)
    path.unlink()
    return path


def cut(folder):
    path = folder / fmt.data_name(SAVE_ID, 1)
    os.truncate(path, path.stat().st_size - 1)
    return path


def swap(folder):
    """The two data files of one save, which are laid out alike."""
    first, second = (folder / fmt.data_name(SAVE_ID, number) for number in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return first


def swap_with_another_saves(folder):
    other = write(
        folder.parent / "b", {"model/w": unique((4, 300), np.float32)}, "f" * 16
    )
    path = folder / fmt.data_name(SAVE_ID, 1)
    path.write_bytes((other / fmt.data_name("f" * 16, 1)).read_bytes())
    return path


@pytest.mark.parametrize("damage", [flip, lose, cut, swap, swap_with_another_saves])
def test_verify_names_file_and_tensor_of_each_damage(tmp_path, damage):
    arrays = {"model/w": unique((4, 300), np.float32, 5)}
    folder = write(tmp_path / "a", arrays)
    path = damage(folder)
    damaged = ckpt("verify", folder)
    assert (damaged.returncode, damaged.stderr) == (1, "")
    head, first, *_ = damaged.stdout.splitlines()
    assert head == f"{folder}: damaged"
    assert first.startswith(f"  {path} ")
    assert "'model/w'" in first


def test_a_lost_index_is_named_and_not_passed_over(run):
    newest = run / "checkpoints/step-00000010"
    (newest / "index.h5").unlink()
    words = f"{newest} is not a checkpoint: it has no index.h5"
    for command in ("ls", "verify"):
        told = ckpt(command, run)
        assert told.returncode == 1
        assert words in told.stdout
    for arguments in (("verify", newest), ("ls", newest)):
        assert words in ckpt(*arguments).stdout
    refused = ckpt("show", run)
    assert refused.returncode == 1
    assert refused.stderr == f"tparmpi: {words}\n"


def test_ls_shows_validation_losses_and_what_a_look_tells(run):
    folder = run / "checkpoints"
    array = {"model/w": unique((4, 300), np.float32)}
    for step, loss in ((20, 1.25), (30, float("nan"))):
        write(
            folder / f"step-{step:08}", array, f"{step:016}", extra={"val_loss": loss}
        )
    cut = folder / "step-00000005" / fmt.data_name(f"{5:016}", 1)
    os.truncate(cut, 100)
    listed = ckpt("ls", run)
    assert listed.returncode == 1
    assert f"(damaged: {cut} cannot be read: " in listed.stdout
    facts = json.loads(ckpt("ls", run, "--json").stdout)
    assert [fact.get("val_loss") for fact in facts] == [None, None, 1.25, None]
    assert "1.2500" in listed.stdout


def test_diff_says_how_two_differ(run, tmp_path):
    steps = [run / f"checkpoints/step-{n:08}" for n in (5, 10)]
    differing = ckpt("diff", *steps)
    assert differing.returncode == 1
    assert "step is 5 and 10" in differing.stdout
    (row,) = [line for line in differing.stdout.splitlines() if line[:8] == "model/w "]
    assert row.split()[1:3] == ["1,200", "1,200"]
    facts = json.loads(ckpt("diff", *steps, "--json").stdout)
    assert facts["values"][0]["name"] == "model/w"
    assert facts["same"] == len(samples())
    same = ckpt("diff", run, steps[1])
    assert same.returncode == 0
    assert same.stdout == f"{len(samples()) + 1} tensors equal\n"


WEIGHTS = ("model/a/weight", "model/b/weight")
M, V = (tuple(f"optimizer/{part}/weight/{moment}" for part in "abc") for moment in "mv")


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        ((*WEIGHTS, *M, *V), WEIGHTS, ["only in A: optimizer, 2 x 3 tensors (m, v)"]),
        (M + V, M, ["only in A: optimizer, 3 tensors (v)"]),
        (M + V[:2], WEIGHTS[:1], ["A: optimizer, 5 tensors (m, v)", "B: model/a"]),
        (WEIGHTS + M, M, ["only in A: model, 2 tensors"]),
        # What the other has some of is named one by one.
        (WEIGHTS + M, WEIGHTS[:1] + M[:1], [WEIGHTS[1], *M[1:]]),
        (M[:1] + V[:1], (), [M[0], V[0]]),
        (V, M, ["A: optimizer, 3 tensors (v)", "B: optimizer, 3 tensors (m)"]),
    ],
)
def test_diff_names_kinds_that_one_lacks_in_a_line(tmp_path, first, second, lines):
    folders = [
        write(tmp_path / name, {path: unique((2,), np.int8) for path in names})
        for name, names in (("A", first), ("B", second))
    ]
    arguments = argparse.Namespace(first=folders[0], second=folders[1])
    code, found, facts = diff.run(arguments)
    missing = [line for line in found if line.startswith("only in ")]
    expected = set(first) ^ set(second)
    assert (code, {*facts["only_first"], *facts["only_second"]}) == (1, expected)
    assert len(missing) == len(lines)
    for line, words in zip(missing, lines, strict=True):
        assert words in line.replace(f"{tmp_path}/", "")


def test_what_is_no_checkpoint_is_one_sentence(tmp_path):
    for command in ("ls", "show", "verify"):
        refused = ckpt(command, tmp_path)
        assert refused.returncode == 1
        (line,) = refused.stderr.splitlines()
        assert line.startswith(f"tparmpi: there is no checkpoint in {tmp_path}")
    wrong = ckpt("lst")
    assert wrong.returncode == 2


def test_alone_it_starts_no_mpi(tmp_path):
    folder = write(tmp_path / SAVE_ID, {"model/w": unique((2,), np.int8)})
    program = (
        "-c import sys; from tparmpi.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or int('mpi4py.MPI' in sys.modules))"
    )
    for command in ("ls", "show", "verify"):
        done = ckpt(command, folder, program=program)
        assert done.returncode == 0, done.stderr


def test_weights_go_out_and_come_in(tmp_path):
    folder = write(tmp_path / "a", {"model/w": unique((4, 300), np.float32)})
    out = ckpt("export", folder, tmp_path / "model.safetensors")
    assert out.returncode == 0, out.stderr
    assert out.stdout == f"{folder}: exported to {tmp_path}/model.safetensors\n"
    many = ckpt("export", folder, tmp_path / "many", "--max-file-bytes=100", "--json")
    assert json.loads(many.stdout)["path"] == f"{tmp_path}/many"
    for source in ("model.safetensors", "many"):
        back = tmp_path / f"back-{source}"
        come = ckpt("import", tmp_path / source, back, "--remap", "^w$", "v.w")
        assert come.returncode == 0, come.stderr
        assert list(json.loads(ckpt("show", back, "--json").stdout)["tensors"]) == [
            "model/v/w"
        ]
    wrong = ckpt("import", folder, tmp_path / "c")
    assert wrong.returncode == 1
    assert "holds no safetensors files" in wrong.stderr


def test_reshard_changes_the_number_of_files(tmp_path):
    folder = write(tmp_path / "a", samples())
    done = ckpt("reshard", folder, tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert ckpt("diff", folder, tmp_path / "b").returncode == 0
    assert len(list((tmp_path / "b").glob("data-*"))) == 1
