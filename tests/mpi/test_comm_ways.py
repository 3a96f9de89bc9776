"""A tuning table changes how sums go, never a bit of them."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.comm import measure
from tparmpi.comm.tuning import Way

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_the_same_bits_whatever_the_table(members):
    group = tpm.group(tpm.devices()[:members])
    if not group.is_member:
        return
    arrays = []
    for member in range(members):
        rng = np.random.default_rng(member)
        values = rng.normal(size=3001) * 10.0 ** rng.integers(-8, 8, 3001)
        arrays.append(values.astype(np.float32))
    wanted = reduce(np.add, arrays)
    for whole in (0, 10**6):
        for piece in (64, 1000, 10**6):
            group.take_way(Way(members, 1, whole, piece))
            got = group.all_reduce(arrays[group.rank])
            assert got.tobytes() == wanted.tobytes()
            started = group.start.all_reduce(arrays[group.rank]).wait()
            assert started.tobytes() == wanted.tobytes()
            own = arrays[group.rank].copy()
            assert group.all_reduce(own, out=own) is own
            assert own.tobytes() == wanted.tobytes()
            own = arrays[group.rank].copy()
            assert group.start.all_reduce(own, out=own).wait() is own
            assert own.tobytes() == wanted.tobytes()
            small = group.all_reduce(arrays[group.rank][:9])
            assert small.tobytes() == wanted[:9].tobytes()
    group.take_way(None)
    group.close()


def test_tuning_measures_and_leaves_all_as_it_was():
    pair = tpm.group(tpm.devices()[:2])
    if pair.is_member:
        before = pair._channel.way
        way = measure.tune(pair, 1024, 0.001)
        assert way.members == 2
        assert way.whole_bytes >= 0
        assert way.piece_bytes == 2**21
        assert pair._channel.way is before
    pair.close()


def test_every_call_is_measured():
    pair = tpm.group(tpm.devices()[:2])
    if pair.is_member:
        rows = list(measure.rows(pair, measure.CALLS, [8, 4096], 0.001))
        assert [row.call for row in rows[::2]] == list(measure.CALLS)
        assert all(row.us > 0 and row.raw_us > 0 for row in rows)
        assert all(row.transport == "host" for row in rows)
        found = measure.overlap(pair, 4096, 0.001, 2)
        assert set(found) >= {"blocking_ms", "wait_ms"}
    pair.close()
