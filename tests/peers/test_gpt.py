"""Steps of training are faster than PyTorch's with DTensor, and take less memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import run


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", ["small", "medium"])
def test_faster_than_dtensor(tmp_path, config, torch_python):
    command = [
        *(sys.executable, "-m", "tparmpi", "bench", "compare", "--json"),
        *("--only=tensor,forward", f"--config={config}", f"--python={torch_python}"),
        f"--peers={Path(__file__).parent}",
    ]
    job = run(command, cwd=tmp_path, limit=800)
    assert job.code == 0, job.err
    rows = json.loads(job.out)["rows"]
    assert all(row["median"] >= row["bar"] for row in rows), rows
