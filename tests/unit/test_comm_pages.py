"""Memory on huge pages."""

from __future__ import annotations

import pytest

from tparmpi.comm import pages
from tparmpi.io.snapshot import Snapshot


@pytest.mark.parametrize("take", [pages.allocate, Snapshot().reserve])
def test_memory_that_a_system_lacks_is_a_memory_error(take):
    with pytest.raises(MemoryError):
        take(1 << 60)
