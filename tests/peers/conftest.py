"""What measures of other programs share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def torch_python() -> str:
    """The Python that has torch; without one the test is skipped."""
    python = os.environ.get("TPARMPI_TORCH")
    if python is None:
        pytest.skip("TPARMPI_TORCH names no Python that has torch")
    return python
