"""Checkpoints load at least as fast as PyTorch's distributed ones, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launch import run, tparmpi

PROGRAM = Path(__file__).with_name("dcp.py")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_loads_are_as_fast_as_dcp(tmp_path, torch_python):
    peers = f"--peers={torch_python} {PROGRAM}"
    job = run(
        tparmpi(2, "bench", "checkpoint", peers, "--json"), cwd=tmp_path, limit=500
    )
    assert job.code == 0, job.err
    found = json.loads(job.out)
    assert found["peers"]["load"]["ratio"] >= 1, found
    assert found["save"]["ratio"] >= 0.9, found
    assert found["load"]["verification"] <= 0.25, found
