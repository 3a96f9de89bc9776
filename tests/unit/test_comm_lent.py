"""Memory of large results comes back when the last array over it is gone."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

from tparmpi.comm import lent, pages
from tparmpi.comm.lent import Lender
from tparmpi.comm.scratch import Scratch

LARGE = (1000, 300)
F8 = np.dtype(np.float64)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_only_when_nobody_holds_it():
    lender = Lender()
    first = lender.empty(LARGE, F8)
    first[...] = np.arange(first.size).reshape(LARGE)
    place, part = address(first), first[3:5, ::2].T
    wanted = part.copy()
    del first
    gc.collect()
    other = lender.empty(LARGE, F8)
    other[...] = -1
    assert address(other) != place
    assert np.array_equal(part, wanted)
    del part
    again = lender.empty((300_000,), np.dtype(np.int64))
    assert address(again) == place
    assert lender.kept_bytes == 0


@pytest.mark.parametrize("dtype", ["bool", "complex64", ml_dtypes.bfloat16], ids=str)
def test_results_are_plain_arrays(dtype):
    for shape in [(), (0, 3), (7,), (400, 500)]:
        array = Lender().empty(shape, np.dtype(dtype))
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.flags.c_contiguous and array.flags.writeable
        array[...] = 1


def test_a_small_result_takes_no_large_memory():
    lender = Lender()
    lender.empty(LARGE, F8)
    kept = lender.kept_bytes
    assert kept >= 2_400_000
    small = lender.empty((100, 300), F8)
    assert lender.kept_bytes == kept
    del small


def test_what_is_kept_has_a_limit(monkeypatch):
    monkeypatch.setattr(lent, "KEPT_BYTES", 5_000_000)
    lender = Lender()
    arrays = [lender.empty(LARGE, F8) for _ in range(4)]
    last = address(arrays[-1])
    while arrays:
        del arrays[0]
    assert 2_400_000 <= lender.kept_bytes <= 5_000_000
    kept = [lender.empty(LARGE, F8) for _ in range(2)]
    assert last in [address(array) for array in kept]


@pytest.mark.parametrize("nbytes", [0, 5, 2**21 - 1, 2**21, 3 * 2**21 + 1])
def test_large_memory_begins_with_a_huge_page(nbytes):
    memory = pages.allocate(nbytes)
    assert memory.shape == (nbytes,) and memory.flags.writeable
    if nbytes >= pages.HUGE_BYTES:
        assert address(memory) % pages.HUGE_BYTES == 0
    memory[...] = 3
    part = memory[nbytes // 2 :].view(np.int8)
    del memory
    assert (part == 3).all()


def test_borrowed_memory_is_lent_again():
    scratch = Scratch()
    for shape in [(5, 3), (2, 2**18)]:
        first = scratch.borrow(shape, F8)
        first[...] = 1
        place = address(first)
        scratch.give_back(first)
        assert address(scratch.borrow(shape, F8)) == place
        assert address(scratch.borrow(shape, F8)) != place
