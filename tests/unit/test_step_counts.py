"""How much Python a step of training runs, what it allocates, what it holds.

Counts, not times: they are the same on a busy machine. A change that raises one of them
says why, here.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import tparmpi
from tparmpi.models import GPTConfig
from tparmpi.train.layout import Layout
from tparmpi.train.measure import Job, Steps, memory

PACKAGE = str(Path(tparmpi.__file__).parent)
ALLOCATING = {"empty", "zeros", "ones", "full", "copy", "ascontiguousarray"}
# For each hidden layer, forward, backward, and update of its 16 parameters.
OPERATORS, CALLS, ALLOCATIONS = 12, 1750, 62


def counted(layers: int) -> Counter[str]:
    """Count a step's operators, calls of the package's functions, and allocations."""
    config = GPTConfig(layers, 16, 2, 8, 32, tied=False)
    work = Steps(Job(config, 2, Layout(1, 1)))
    for _ in range(2):
        work.step()
    counts: Counter[str] = Counter()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "c_call":
            counts["allocations"] += argument.__name__ in ALLOCATING
        # Newer versions of Python make comprehensions without a call.
        elif event == "call" and not code.co_name.startswith("<"):
            counts["calls"] += 1
            counts["operators"] += code.co_name == "apply" and (
                code.co_filename.endswith("dispatch.py")
            )

    sys.setprofile(look)
    try:
        work.step()
    finally:
        sys.setprofile(None)
    return counts


def test_what_a_hidden_layer_adds():
    two, three = counted(2), counted(3)
    added = {key: three[key] - two[key] for key in three}
    assert added["operators"] <= OPERATORS
    assert added["calls"] <= CALLS
    assert added["allocations"] <= ALLOCATIONS


def test_memory_is_what_the_formula_says():
    config = GPTConfig(3, 128, 4, 128, 1024, tied=False)
    for microbatches in (1, 4):
        found = memory(Job(config, 16, Layout(1, 1), microbatches), 1)
        assert found["ratio"] <= 1.15, found
