"""Tensors between places."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.testing import all_layouts, laid_out

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture(scope="module")
def places():
    devices = tpm.devices()
    return [
        devices[1],
        tpm.group(devices[:2]),
        tpm.group(devices[1:]),
        tpm.group([devices[3], devices[0]]),
        tpm.mesh(dp=2, tp=2),
    ]


def test_every_place_and_layout_reaches_every_other(places):
    array = np.arange(15.0).reshape(5, 3)
    for a, b in product(places, repeat=2):
        for layout in all_layouts(2, len(a.axes)):
            x = laid_out(array, a, layout)
            for wanted in all_layouts(2, len(b.axes), partial=False):
                moved = x.to(b, wanted, allow_empty=True)
                assert moved.layout == wanted
                assert moved.spec.place is b.inner()
                if b.is_member:
                    assert np.array_equal(moved.local, array[moved.spec.local_slices])
                else:
                    assert moved.is_shell


def test_the_layout_is_kept_by_the_names_of_axes(places):
    mesh = places[-1]
    x = laid_out(np.arange(12.0).reshape(4, 3), mesh, (tpm.Shard(0), tpm.Partial()))
    other = tpm.mesh(tp=1, dp=4)
    assert x.to(other).layout == (tpm.Replicate(), tpm.Shard(0))


def test_numbers_and_small_dtypes_travel(places):
    for dtype in (np.bool_, np.int8, np.float16, np.complex128):
        x = tpm.tensor(np.array(1, dtype), places[1])
        moved = x.to(places[2])
        assert moved.shape == () and moved.dtype == dtype
        if places[2].is_member:
            assert moved.item() == 1


def test_a_moved_value_is_a_copy(places):
    x = tpm.tensor(np.ones(3), places[0])
    moved = x.to(places[1])
    if places[0].is_member:
        x.write_local(np.zeros(3))
        assert np.array_equal(moved.local, np.ones(3))


def test_only_what_lacks_is_sent(places):
    x = tpm.tensor(np.ones(8), places[1])
    x.to(places[2])
    with tpm.ledger() as led:
        x.to(places[2])
    # Rank 1 has it; ranks 2 and 3 get it from ranks 0 and 1 in some way.
    sent = tpm.world().all_reduce(np.array(led.bytes()))
    assert sent == 2 * 64


def test_what_cannot_be_moved_is_refused(places):
    x = tpm.tensor(np.ones(3), places[1].autodiff())
    with pytest.raises(tpm.AutodiffError, match="no_grad"):
        x.to(places[2])
    with tpm.no_grad():
        x.to(places[2])
    with pytest.raises(tpm.ShardingError, match="allow_empty"):
        tpm.tensor(np.ones(3), places[1]).to(
            places[-1], dp=tpm.Shard(0), tp=tpm.Shard(0)
        )
    with pytest.raises(tpm.UsageError, match="no place"):
        tpm.tensor(np.ones(3), places[1]).to("gpu")
