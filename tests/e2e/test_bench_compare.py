"""`tparmpi bench compare` with peers that only say how long they took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import Finished, mpirun, run

LIMIT = 60.0
PEER = (
    "import json, os, sys\n"
    "assert os.environ['WORLD_SIZE'] == '2', os.environ['WORLD_SIZE']\n"
    "assert '--d_model=48' in sys.argv and '--batch=8' in sys.argv\n"
    "if os.environ['RANK'] == '0':\n"
    "    print(json.dumps(dict(s_per_step=1e3, tokens_per_s=1, peak_rss_bytes=[1])))\n"
)


def compare(folder: Path, program: str, *arguments: str) -> Finished:
    (folder / "gpt.py").write_text(program)
    command = [
        *(sys.executable, "-m", "tparmpi", "bench", "compare"),
        *("--config=tiny", "--only=tensor", "--rounds=1", "--steps=1"),
        *(f"--peers={folder}", f"--python={sys.executable}"),
        *(f"--mpirun={mpirun(1)[0]}", *arguments),
    ]
    return run(command, cwd=folder, limit=LIMIT)


def test_ratios_of_a_peer(tmp_path):
    job = compare(tmp_path, PEER, "--json")
    assert job.code == 0, job.err
    found = json.loads(job.out)
    speed, products, memory = found["rows"]
    (ours,) = found["jobs"]["tp=2"]
    assert speed["median"] == pytest.approx(1e3 / ours["s_per_step"], rel=1e-3)
    assert products["median"] == pytest.approx(ours["gemm_fraction"], rel=1e-3)
    assert memory["most"] == 0
    assert {row["part"] for row in found["rows"]} == {"tensor"}


def test_a_peer_that_fails_is_shown_and_what_there_is_is_printed(tmp_path):
    job = compare(tmp_path, "raise SystemExit('no such library')", "--json")
    assert job.code == 1
    assert "no such library" in job.err
    assert "bench: no round gave tokens/s of tp=2 over the peer's; peak" in job.err
    assert "Traceback" not in job.err
    speed, products, memory = json.loads(job.out)["rows"]
    assert [row["rounds"] for row in (speed, products, memory)] == [0, 1, 0]
    assert speed["median"] is None
    assert products["median"] > 0


def test_a_round_whose_peer_aborts_is_left_out(tmp_path):
    once = (
        "import os, pathlib, sys\n"
        "if not os.path.exists('begun') and os.environ['RANK'] == '1':\n"
        "    pathlib.Path('begun').touch()\n"
        "    print('terminate called', file=sys.stderr, flush=True)\n"
        "    os.abort()\n"
    )
    job = compare(tmp_path, once + PEER, "--json", "--rounds=2")
    assert job.code == 0, job.err
    assert "round 1: the job 'peer, tp=2' failed and is left out" in job.err
    assert "SIGABRT" in job.err
    assert "\nterminate called\n" in job.err
    found = json.loads(job.out)
    assert [row["rounds"] for row in found["rows"]] == [1, 2, 1]
    first, second = found["jobs"]["peer, tp=2"]
    assert first is None
    assert second["s_per_step"] == 1e3
    assert [(f["round"], f["job"]) for f in found["failures"]] == [(1, "peer, tp=2")]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config=huge", "no configuration 'huge'"),
        ("--only=speed", "no part 'speed'; there are tensor, one"),
        ("--python=", "name the folder of its program with --peers"),
    ],
)
def test_wrong_usage(tmp_path, argument, words):
    job = compare(tmp_path, PEER, argument)
    assert job.code == 2
    assert words in job.err
    assert "Traceback" not in job.err
