from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.errors import DataError
from tparmpi.io import text

pytestmark = pytest.mark.mpi(min_size=4)


def test_all_ranks_have_the_bytes_that_rank_zero_read(tmp_path):
    everyone = tpm.world()
    folder = Path(everyone.broadcast_object(str(tmp_path)))
    path = folder / "text"
    if everyone.rank == 0:
        path.write_bytes(np.arange(5000, dtype=np.uint16).tobytes())
    elsewhere = path if everyone.rank == 0 else tmp_path / "only rank 0 may look"
    data = text.TextData(elsewhere, 16)
    assert len(set(everyone.all_gather_object(data.digest))) == 1
    samples = everyone.all_gather_object(data.batch(7, 11, 3).tobytes())
    assert len(set(samples)) == 1


def test_a_missing_text_is_refused_on_every_rank(tmp_path):
    with pytest.raises(DataError, match=r"there is no file or folder .*nothing\.txt"):
        text.TextData(tmp_path / "nothing.txt", 16)


@pytest.mark.parametrize("source", ["", "~nosuchuser/x", "a\udcff", "x" * 300, None])
def test_a_path_that_cannot_be_one_is_refused_on_every_rank(source):
    with pytest.raises(DataError):
        text.TextData(source, 16)
