"""Sums are at least three times as fast as PyTorch's through gloo on the same ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launch import run, tparmpi

PROGRAM = Path(__file__).with_name("gloo.py")
SIZES = "4K,64K,1M,4M,64M"
TIMES = 3.0


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_three_times_as_fast_as_gloo(tmp_path, torch_python):
    command = tparmpi(
        2,
        "bench",
        "collectives",
        f"--sizes={SIZES}",
        "--calls=all_reduce",
        "--only-calls",
        f"--peers={torch_python} {PROGRAM}",
        "--json",
    )
    job = run(command, cwd=tmp_path, limit=500)
    assert job.code == 0, job.err
    calls = json.loads(job.out)["peers"]["calls"]
    assert all(call["ratio"] >= TIMES for call in calls), calls
