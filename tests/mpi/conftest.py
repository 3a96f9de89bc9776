"""What tests of several ranks share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tparmpi as tpm
from tparmpi.comm import progress
from tparmpi.comm.runtime import world_state

# What somebody measured on this machine must not choose the ways that tests take.
os.environ["TPARMPI_TUNING"] = "0"


@pytest.fixture(autouse=True)
def together(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start and end each test on all ranks at a time, and the same test on each.

    It leaves no operation under way.
    """
    names = tpm.world().all_gather_object(request.node.nodeid)
    assert names == names[:1] * len(names)
    yield
    tpm.world().barrier()
    channels = world_state().channels
    assert not progress.active
    assert not [members for members in channels if channels[members].in_flight]


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """An empty folder, the same one on every rank."""
    path: Path = tpm.world().broadcast_object(tmp_path)
    return path
