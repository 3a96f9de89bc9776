"""A cluster for this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, what_is_missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start two Slurm nodes on this machine; skip where that is impossible."""
    missing = what_is_missing()
    if missing:
        pytest.skip(f"no Slurm: {missing}")
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
