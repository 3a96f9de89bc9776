"""The main job with its defaults, on two ranks: one run, many checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import Finished, metrics, run, tparmpi

pytestmark = pytest.mark.timeout(400)

LIMIT_SECONDS = 300.0
STEPS = 2000


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    folder = tmp_path_factory.mktemp("main")
    finished = run(tparmpi(2, "train", "--json"), cwd=folder, limit=LIMIT_SECONDS)
    assert finished.code == 0, finished.err
    return folder / "runs" / "default", finished


def test_it_ends_in_time(job):
    assert job[1].seconds < LIMIT_SECONDS


def test_it_learns(job):
    lines = metrics(job[0])
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    # Bytes drawn evenly from 256 cost 5.55 nats.
    assert 5.0 < steps[0]["loss"] < 6.0
    assert lines[-1]["step"] == STEPS
    assert lines[-1]["val_loss"] < 2.0


def test_its_json_is_the_last_line(job):
    outcome = json.loads(job[1].out.splitlines()[-1])
    assert outcome["step"] == outcome["steps"] == STEPS
    assert outcome["val_loss"] == metrics(job[0])[-1]["val_loss"]
    assert outcome["stopped"] is False


def test_plain_python_reads_a_whole_weight(job):
    program = (
        "import h5py, sys\n"
        "file = h5py.File(sys.argv[1])\n"
        "weight = file['model/blocks/0/attn/q/weight'][...]\n"
        "print(*weight.shape, abs(weight).max() > 0)\n"
        "assert 'tparmpi' not in sys.modules\n"
    )
    index = job[0] / "checkpoints" / f"step-{STEPS:08}" / "index.h5"
    read = subprocess.run(
        [sys.executable, "-I", "-c", program, index],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert read.stdout.split() == ["128", "8", "16", "True"]


def test_it_writes_what_looks_like_python(job):
    arguments = ["generate", job[0], "--prompt=def main", "--max-tokens=300"]
    text = run(tparmpi(2, *arguments), cwd=job[0], limit=60)
    assert text.code == 0, text.err
    assert text.out.startswith("def main")
    assert "\n    " in text.out
    words = ("self", "return", "if ", "def ", "for ", "import", "None", "(", ":")
    assert sum(word in text.out for word in words) >= 4
