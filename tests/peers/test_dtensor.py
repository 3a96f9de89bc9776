"""Small operators are faster than those of PyTorch's DTensor, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launch import run, tparmpi

PROGRAM = Path(__file__).with_name("dtensor.py")
TIMES = 1.3


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_faster_than_dtensor(tmp_path, torch_python):
    peers = f"--peers={torch_python} {PROGRAM}"
    job = run(tparmpi(2, "bench", "dispatch", peers, "--json"), cwd=tmp_path, limit=240)
    assert job.code == 0, job.err
    report = json.loads(job.out)
    ratios = [
        theirs / ours["us"]
        for ours, theirs in zip(report["calls"], report["peers"]["us"], strict=True)
    ]
    assert min(ratios) >= TIMES, report
