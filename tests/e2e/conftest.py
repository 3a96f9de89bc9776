"""Text that small runs train on."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file without repetition, long enough for a few hundred samples."""
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
    return path
