"""What rank 0 does on behalf of all ranks of a run."""

from __future__ import annotations

import pytest

import tparmpi as tpm
from tparmpi.errors import RunFolderError, TparmpiError
from tparmpi.train.ranks import from_rank_zero

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RunFolderError("it is in use"), RunFolderError, "it is in use"),
        (MemoryError("3 GiB"), TparmpiError, "rank 0 is out of memory: 3 GiB"),
        (MemoryError(), TparmpiError, "rank 0 is out of memory"),
    ],
)
def test_what_stops_rank_zero_is_raised_on_all(error, kind, words):
    called = []

    def fail():
        called.append(tpm.world().rank)
        raise error

    with pytest.raises(TparmpiError) as caught:
        from_rank_zero(fail)
    assert (type(caught.value), str(caught.value)) == (kind, words)
    assert called == ([0] if tpm.world().rank == 0 else [])
    assert from_rank_zero(lambda: 3) == 3
