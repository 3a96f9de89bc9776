"""The command line of `tparmpi`."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time

import pytest

from tparmpi.cli import main as cli
from tparmpi.cli import parser
from tparmpi.comm.launcher import Launched
from tparmpi.errors import UsageError
from tparmpi.train.config import KEYS

HELP_SECONDS = 0.3


def tparmpi(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tparmpi", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_quick():
    # The clock is disturbed by other processes, the processor's time by NumPy's threads
    # starting; the lower of the two is an upper bound of what a user waits.
    best = float("inf")
    for _ in range(20):
        before, began = children_seconds(), time.perf_counter()
        helped = tparmpi("--help")
        waited, used = time.perf_counter() - began, children_seconds() - before
        best = min(best, waited, used)
        assert helped.returncode == 0
        assert "train" in helped.stdout
        assert "generate" in helped.stdout
        if best < HELP_SECONDS:
            break
    assert best < HELP_SECONDS


def test_help_imports_no_more_than_it_shows():
    program = (
        "import json, sys\n"
        "from tparmpi.cli.main import parser\n"
        "parser().format_help()\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    modules = json.loads(done.stdout)
    tops = {name.partition(".")[0] for name in modules}
    assert not tops & {"scipy", "h5py", "rich", "mpi4py", "threadpoolctl", "cupy"}
    rooms = {name.split(".")[1] for name in modules if name.startswith("tparmpi.")}
    assert not rooms & {"models", "io", "optim", "parallel", "nn", "ops", "tensors"}


def test_the_help_of_train_lists_every_key():
    helped = tparmpi("train", "--help")
    assert helped.returncode == 0
    for key in KEYS.values():
        assert re.search(rf"^  {re.escape(key.name)} +\S", helped.stdout, re.MULTILINE)
    for flag in ("--set", "--run", "--tp", "--dp", "--steps", "--data", "--json"):
        assert flag in helped.stdout


def test_the_help_of_generate_can_be_read():
    helped = tparmpi("generate", "--help")
    assert helped.returncode == 0
    assert "text to go on from (a line break)" in helped.stdout


def test_help_into_a_pipe_that_is_closed_is_quiet():
    program = [sys.executable, "-m", "tparmpi", "train", "--help"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_every_command_says_what_it_does():
    for command in cli.COMMANDS.values():
        assert command.SUMMARY in tparmpi("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["trian"], "trian"),
        (["train", "--stepz=3"], "--stepz"),
        (["train", "--step=3"], "--step"),
        (["train", "--steps=three"], "three"),
        (["generate"], "RUN"),
        (["train", "--run="], "--run"),
        (["generate", ""], "RUN"),
        (["generate", "nowhere", "--max-tokens=many"], "many"),
        (["plan"], "--show-schedule"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_code_2(arguments, words):
    refused = tparmpi(*arguments)
    assert refused.returncode == 2
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert line.startswith("tparmpi: ")
    assert words in line
    assert "--help" in line


def test_plan_draws_a_schedule():
    shown = tparmpi("plan", "--show-schedule", "--pp=2", "--microbatches=3")
    assert shown.returncode == 0, shown.stderr
    assert "stage 1  .  F0 B0 == F1 B1 == F2 B2 == .  ." in shown.stdout
    told = tparmpi("plan", "--show-schedule", "--schedule=interleaved", "--json")
    assert json.loads(told.stdout) == {
        "schedule": "interleaved",
        "pp": 4,
        "microbatches": 8,
        "chunks": 2,
        "waiting": 0.1579,
        "live": [11, 9, 7, 5],
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule=2f2b"], "2f2b"),
        (["--pp=0"], "--pp"),
        (["--chunks=2"], "interleaved"),
    ],
)
def test_plan_refuses_what_cannot_be(arguments, words):
    refused = tparmpi("plan", "--show-schedule", *arguments)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert words in line


def test_the_parser_raises_instead_of_leaving():
    with pytest.raises(UsageError, match="frobnicate"):
        cli.parser().parse_args(["train", "--frobnicate"])


def test_other_ranks_do_not_repeat_the_help(monkeypatch, capsys):
    monkeypatch.setattr(parser, "launched", lambda: Launched(rank=1, size=2))
    with pytest.raises(SystemExit) as left:
        cli.parser().parse_args(["train", "--help"])
    assert left.value.code == 0
    assert capsys.readouterr() == ("", "")
