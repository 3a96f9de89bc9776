"""What Python's and NumPy's syntax does with tensors of several ranks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.sharding import Partial, Shard
from tparmpi.testing import all_layouts, laid_out

pytestmark = pytest.mark.mpi(min_size=4)

ARRAY = np.arange(1.0, 16.0).reshape(5, 3)


def everyone():
    return tpm.group(tpm.devices())


def test_numbers_are_the_same_on_all_ranks():
    group = everyone()
    for layout in all_layouts(2):
        x = laid_out(ARRAY, group, layout)
        total = x.sum()
        assert float(total) == int(total) == complex(total) == 120
        assert bool((x > 14).sum() == 1)
        for array in (np.asarray(x), np.array(x, np.float32)):
            np.testing.assert_array_equal(array, ARRAY)
    count = laid_out(np.arange(5), group, (Shard(0),)).sum()
    assert list(range(12))[count] == 10


def test_expressions_on_every_layout():
    group = everyone()
    expected = 2 / (1 + abs(-ARRAY)) ** 2 - (ARRAY // 4 != 2) * 1
    for layout in all_layouts(2, partial=False):
        x = laid_out(ARRAY, group, layout)
        found = 2 / (1 + abs(-x)) ** 2 - (x // 4 != 2) * 1
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_numbers_leave_pending_sums_pending():
    group = everyone()
    x = laid_out(ARRAY, group, (Partial(),))
    mask = tpm.tensor(ARRAY > 7, group)
    with tpm.ledger() as ledger:
        made = [
            (-x, -ARRAY),
            (x * 3, ARRAY * 3),
            (x / 3, ARRAY / 3),
            (x / tpm.tensor(ARRAY, group), np.ones((5, 3))),
            (x.copy(), ARRAY),
            (tpm.where(mask, x, 0), np.where(ARRAY > 7, ARRAY, 0)),
            (tpm.where(mask, 2, x), np.where(ARRAY > 7, 2, ARRAY)),
        ]
        assert all(result.sharding == Partial() for result, _ in made)
    assert ledger.count() == 0
    for result, expected in made:
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-14)


def test_elementwise_operators_keep_shards_and_send_nothing():
    group = everyone()
    x, y = (laid_out(ARRAY, group, (Shard(0),)) for _ in range(2))
    row = tpm.tensor(ARRAY[0], group)
    with tpm.ledger() as ledger:
        made = [
            x / y,
            x**y,
            x // 2,
            1 / x,
            tpm.maximum(x, row),
            tpm.where(x > y, x, row),
            x.clip(0, 1),
            x.silu(),
            (x > 1) & (y < 3),
        ]
        assert all(result.sharding == Shard(0) for result in made)
    assert ledger.count() == 0


def test_a_shard_is_not_lent_as_the_whole():
    group = everyone()
    whole = tpm.tensor(ARRAY, group)
    assert np.shares_memory(np.from_dlpack(whole), whole.local)
    with tpm.ledger() as ledger:
        for layout in ((Shard(0),), (Shard(1),), (Partial(),)):
            x = laid_out(ARRAY, group, layout)
            for call in (x.__dlpack__, x.__dlpack_device__):
                with pytest.raises(tpm.ShardingError, match=r"x\.local, or gather"):
                    call()
            with pytest.raises(tpm.ShardingError, match=r"Replicate\(\)"):
                np.from_dlpack(x)
            with pytest.raises(ValueError, match="leave out copy=False"):
                np.asarray(x, copy=False)
    assert ledger.count() == 0


def test_what_is_refused_is_refused_alike_and_silently():
    group = everyone()
    x = laid_out(ARRAY, group, (Shard(0),))
    with tpm.ledger() as ledger:
        with pytest.raises(tpm.ShapeError, match=r"x.any\(\)"):
            bool(x > 3)
        with pytest.raises(TypeError, match="compare with x == value"):
            _ = 3.0 in x
        with pytest.raises(TypeError, match="cannot be iterated over"):
            list(x)
        with pytest.raises(TypeError, match=r"detach\(\).copy\(\)"):
            copy.deepcopy(x)
        with pytest.raises(TypeError, match=r"tpm.checkpoint.save"):
            pickle.dumps(x)
        assert "Shard(0)" in repr(x)
        assert len(x) == 5 and x.T.shape == (3, 5)
    assert ledger.count() == 0


def test_shells_take_operators_and_give_no_values():
    place = tpm.group(tpm.devices()[:2])
    x = tpm.tensor(ARRAY, place)
    y = tpm.where((2 / x > 1) | (x == 3), x**2 - 1, tpm.maximum(x, 0)).astype("float32")
    assert (y.shape, y.dtype) == ((5, 3), np.float32)
    if not place.is_member:
        assert y.is_shell
        for call in (np.asarray, np.from_dlpack, lambda y: float(y.sum())):
            with pytest.raises(tpm.ShardingError, match="no member"):
                call(y)
    with pytest.raises(tpm.UsageError, match="does not fit into int8"):
        x.cast("int8") * 300
    with pytest.raises(tpm.UsageError, match="integers have no power"):
        x.cast("int8") ** -1
