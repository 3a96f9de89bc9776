"""`tparmpi bench train` on one and two ranks: what it reports fits together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.launch import run, tparmpi

LIMIT = 60.0


PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
# By what the page says of a field, in which kinds of runs it is there.
THERE = {
    "always": {"steps", "stages", "forwards", "memory"},
    "times": {"steps", "stages", "forwards"},
    "training": {"steps", "stages"},
    "stages": {"stages"},
    "memory": {"memory"},
}


def documented(kind: str) -> list[str]:
    """The fields that the page says a kind of run prints, in their order."""
    rows = re.findall(
        rf"^\| (`.*`) \| ({'|'.join(THERE)}) \|", PAGE.read_text(), re.MULTILINE
    )
    there = [fields for fields, when in rows if kind in THERE[when]]
    return [name for fields in there for name in re.findall(r"`(\w+)`", fields)]


def measured(folder: Path, ranks: int, *arguments: str) -> dict:
    command = tparmpi(ranks, "bench", "train", "--config=tiny", "--steps=2", "--json")
    job = run([*command, *arguments], cwd=folder, limit=LIMIT)
    assert job.code == 0, job.err
    (line,) = job.out.splitlines()
    return json.loads(line)


def test_a_step_beside_its_products(tmp_path):
    found = measured(tmp_path, 2, "--tp=2")
    assert found["tp"] == found["ranks"] == 2
    tokens = 8 * 32
    assert found["tokens_per_s"] * found["s_per_step"] == pytest.approx(tokens)
    assert found["s_least"] <= found["s_per_step"]
    # 12 d² in each block and d V for the output, a forward and two gradients each.
    flops = 6 * tokens * (3 * 12 * 48**2 + 48 * 256) / 2
    assert found["gemm_gflops"] * found["gemm_s"] * 1e9 == pytest.approx(flops)
    assert found["gemm_fraction"] * found["s_per_step"] == pytest.approx(
        found["gemm_s"]
    )
    assert 0 < found["communication_share"] < 1
    assert found["communication_calls"] > 0
    assert len(found["peak_rss_bytes"]) == 2
    assert 0 < found["loss"] < 6
    assert list(found) == documented("steps")


def test_forwards_make_a_third_of_the_products(tmp_path):
    found = measured(tmp_path, 1, "--forward")
    flops = 2 * 8 * 32 * (3 * 12 * 48**2 + 48 * 256)
    assert found["gemm_gflops"] * found["gemm_s"] * 1e9 == pytest.approx(flops)
    assert list(found) == documented("forwards")
    assert found["communication_calls"] == 0


def test_stages_beside_the_simulated_schedule(tmp_path):
    found = measured(tmp_path, 2, "--pp=2")
    assert found["microbatches"] == 8
    assert sum(found["stage_layers"]) == 3 + 2
    assert len(found["layer_costs"]) == 3
    wanted = found["pipeline_expected_s"] / found["pipeline_s"]
    assert found["pipeline_ratio"] == pytest.approx(wanted)
    assert list(found) == documented("stages")


def test_memory_beside_the_formula(tmp_path):
    found = measured(tmp_path, 1, "--memory")
    assert list(found) == documented("memory")
    assert 0 < found["kept_bytes"][0] < found["array_bytes"][0]
    (wanted,) = (found["array_bytes"][0] / n for n in found["formula_bytes"])
    assert found["ratio"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config=huge", "no configuration 'huge'; there are tiny, small, medium"),
        ("--steps=0", "--steps must be at least 1"),
        ("--microbatches=9", "a batch of 8 has no row"),
    ],
)
def test_wrong_usage(tmp_path, argument, words):
    job = run(tparmpi(1, "bench", "train", argument), cwd=tmp_path, limit=LIMIT)
    assert job.code == 2
    assert words in job.err
    assert "Traceback" not in job.err


def test_a_table_for_readers(tmp_path):
    command = tparmpi(1, "bench", "train", "--config=tiny", "--steps=1")
    job = run(command, cwd=tmp_path, limit=LIMIT)
    assert job.code == 0, job.err
    assert "tiny, pp=1 dp=1 tp=1, batch 8" in job.out
    assert "gemm_fraction" in job.out
