"""The documentation's programs, as a reader would run them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun, run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def output_of(name: str, ranks: int, folder: Path, *arguments: str) -> list[str]:
    """Run an example and return the lines it prints; one rank without a launcher."""
    launcher = mpirun(ranks) if ranks > 1 else []
    program = [sys.executable, EXAMPLES / name, *arguments]
    finished = run([*launcher, *program], cwd=folder)
    assert finished.code == 0, finished.err
    assert finished.err == ""
    return finished.out.splitlines()


@pytest.mark.parametrize("ranks", [1, 3])
def test_split_mlp(ranks: int, tmp_path: Path) -> None:
    total, calls = output_of("split_mlp.py", ranks, tmp_path)
    # The sum is NumPy's for the same numbers, to the digits printed.
    assert total == f"{ranks} ranks, the sum of all elements is 64.082868"
    used = 1 if ranks > 1 else 0
    assert calls == f"collectives: 0 up to the product, {used} in all"


@pytest.mark.parametrize("ranks", [1, 3])
def test_own_operator(ranks: int, tmp_path: Path) -> None:
    assert output_of("own_operator.py", ranks, tmp_path) == [
        f"square has the right gradient in every layout on {ranks} ranks"
    ]


@pytest.mark.parametrize("ranks", [1, 3])
def test_plain_arrays(ranks: int, tmp_path: Path) -> None:
    assert output_of("plain_arrays.py", ranks, tmp_path) == [
        f"sorting has the right gradient in every layout on {ranks} ranks"
    ]


@pytest.mark.parametrize("ranks", [1, 3])
def test_unit_norm(ranks: int, tmp_path: Path) -> None:
    sums = 1 if ranks > 1 else 0
    assert output_of("unit_norm.py", ranks, tmp_path) == [
        f"unit_norm has the right gradient in every layout on {ranks} ranks",
        f"with its dim split: {sums} all_reduce in the forward",
    ]


@pytest.mark.parametrize(("ranks", "dp"), [(1, 1), (3, 1), (3, 3), (4, 2)])
def test_own_model(ranks: int, dp: int, tmp_path: Path) -> None:
    *steps, last = output_of("own_model.py", ranks, tmp_path, str(dp))
    assert last == "the loaded model gives the same numbers"
    losses = [float(line.split()[3].rstrip(",")) for line in steps]
    # The model learns, and the same on every layout, to the digits printed.
    assert losses == pytest.approx([0.7064, 0.1755, 0.1672, 0.0179], abs=2e-4)
    assert (tmp_path / "own_model" / "index.h5").exists()


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (3, 1), (4, 2)])
def test_placed_layers(ranks: int, tp: int, tmp_path: Path) -> None:
    *steps, last = output_of("placed_layers.py", ranks, tmp_path, str(tp))
    losses = [float(line.split()[3].rstrip(",")) for line in steps]
    # The model learns, and the same however its layers are placed.
    assert losses == pytest.approx([0.7067, 0.1804, 0.2105, 0.0044], abs=2e-4)
    assert float(last.split()[-1]) == pytest.approx(0.0019, abs=2e-4)
