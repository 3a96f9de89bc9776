"""Checkpoints of the first version of the format, kept, are read by every later one.

The files in ``tests/data`` were saved by three ranks, plain and compressed. They are
never written again: a change that cannot read them breaks the promise of
``docs/checkpoint-format.md``.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.io import checkpoint
from tparmpi.io import format as fmt

DATA = Path(__file__).parents[1] / "data"
KEPT = DATA / "checkpoint-1"
COMPRESSED = DATA / "checkpoint-1-gzip"
STEPS = 1200
EXTRA = {"text": "é", "numbers": [1, None, 2.5], "nested": {"yes": True}}

# As the program names them; NumPy's own names, not the format's.
KINDS = {
    "bool": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "complex128": np.complex128,
}


def bits(shape, dtype):
    """Any bits at all, so also NaN payloads, infinities and denormal numbers."""
    size = int(np.prod(shape))
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return (np.arange(size) % 3 == 1).reshape(shape)
    words = np.arange(1, size * dtype.itemsize + 1, dtype=np.uint64)
    mixed = (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)
    return mixed.astype(np.uint8).view(dtype).reshape(shape)


def model_arrays():
    arrays = {f"kinds.{name}": bits((7, 5), dtype) for name, dtype in KINDS.items()}
    arrays |= {f"scalars.{name}": bits((), dtype) for name, dtype in KINDS.items()}
    arrays["empty"] = np.empty((0, 3), np.float64)
    arrays["short"] = bits((2, 2), np.float32)
    arrays["deep"] = bits((4, 1, 6, 3), ml_dtypes.bfloat16)
    arrays["blocks.0.é ü"] = bits((3,), np.int16)
    payloads = [0x7FC00001, 0xFFC0BEEF, 0x7F800001, 0x80000000, 0x7F800000]
    arrays["payloads"] = np.array(payloads, np.uint32).view(np.float32)
    return arrays


def optimizer_arrays():
    return {f"deep/{moment}": bits((4, 1, 6, 3), np.float32) for moment in "mv"}


def expected():
    """Every tensor by its path in the checkpoint."""
    named = {f"model/{n.replace('.', '/')}": a for n, a in model_arrays().items()}
    return named | {f"optimizer/{n}": a for n, a in optimizer_arrays().items()}


class Bag:
    def __init__(self, arrays, steps=0):
        zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
        self.tensors = {n: tpm.tensor(a, tpm.device()) for n, a in zeros.items()}
        self.steps = steps

    def state_dict(self):
        return self.tensors


def same(found, array):
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.asarray(found).tobytes() == array.tobytes()


both = pytest.mark.parametrize("kept", [KEPT, COMPRESSED], ids=lambda path: path.name)


@both
def test_it_loads_byte_for_byte(kept):
    model, optimizer = Bag(model_arrays()), Bag(optimizer_arrays())
    report = checkpoint.load(kept, model, optimizer)
    assert (report.step, report.seed, report.position) == (1234, -7, 98_765_432_109)
    assert report.extra == EXTRA
    assert optimizer.steps == STEPS
    assert sorted(report.applied) == sorted(expected())
    for bag, arrays in (model, model_arrays()), (optimizer, optimizer_arrays()):
        for name, array in arrays.items():
            same(bag.tensors[name].local, array)


@both
def test_it_is_whole_and_described(kept):
    assert checkpoint.verify(kept) == []
    found = checkpoint.inspect(kept)
    kinds = {name: (t.shape, t.dtype) for name, t in found.tensors.items()}
    assert kinds == {n: (a.shape, a.dtype.name) for n, a in expected().items()}
    assert (found.step, found.optimizer_steps) == (1234, STEPS)
    assert len(found.files) == 3
    with h5py.File(kept / "index.h5", "r") as file:
        pieces = {len(file[name].virtual_sources()) for name in expected()}
    assert pieces == {0, 1, 2, 3}
    with h5py.File(kept / found.files[0], "r") as file:
        assert file["model/deep"].compression == (None if kept == KEPT else "gzip")


@both
def test_a_copy_equals_it(tmp_path, kept):
    copy = checkpoint.convert(kept, tmp_path / "copy", files=2)
    assert not checkpoint.diff(KEPT, copy)
    assert checkpoint.verify(copy) == []


@both
@pytest.mark.parametrize("kind", KINDS)
def test_plain_h5py_reads_it(kind, kept):
    """Through the index alone: whole tensors, the bits where h5py knows the type."""
    with h5py.File(kept / "index.h5", "r") as file:
        assert file.attrs["format"].decode() == "tparmpi checkpoint"
        assert file.attrs["format_version"] == 1
        of_kind = {n: a for n, a in expected().items() if a.dtype == KINDS[kind]}
        assert of_kind
        for name, array in of_kind.items():
            assert file[name].attrs["dtype"].decode() == kind
            if kind != "bfloat16":
                same(file[name][...], array)
                continue
            # h5py has no such type and gives the same numbers as float32, but not
            # which of the NaNs.
            found = file[name][...]
            assert found.dtype == np.float32
            assert np.array_equal(found, array.astype(np.float32), equal_nan=True)


def test_the_format_that_is_written_now_is_of_this_version():
    # Another number needs another folder of files here, and this one stays.
    assert fmt.VERSION == 1


def test_the_reason_of_a_key_error_is_not_in_quotes():
    # h5py raises it where the names of a damaged file cannot be read.
    assert fmt.reason(KeyError("incorrect checksum")) == "incorrect checksum"
    assert fmt.reason(ValueError("first line\nsecond")) == "first line"
