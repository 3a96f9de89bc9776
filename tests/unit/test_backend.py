"""Backends as places for arrays, and number types."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tparmpi import backend
from tparmpi.backend import dtypes, host_memory
from tparmpi.errors import DeviceError


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_a_backend_is_one_object(kind):
    assert backend.get(kind) is backend.get(kind)
    assert backend.get(kind).kind == kind


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(DeviceError, match=r"'tpu'.*'cpu', 'cuda' or 'meta'"):
        backend.get("tpu")


def test_a_missing_cupy_names_the_extra(monkeypatch):
    from tparmpi.backend import cupy_backend

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"'\.\[gpu\]'"):
        cupy_backend.CupyBackend()


def test_importing_the_backend_loads_neither_cupy_nor_scipy():
    program = (
        "import sys, tparmpi.backend as b; b.get('cpu'); b.get('meta'); "
        "print([m for m in ('cupy', 'scipy', 'mpi4py.MPI') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert output.stdout.strip() == "[]"


def test_cuda_backend_without_a_gpu():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    cuda = backend.get("cuda")
    assert cuda.xp.__name__ == "cupy"
    assert {"float32", "bfloat16"} <= cuda.supported_dtypes
    assert not cuda.__abstractmethods__


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.array(7.5),
        np.zeros((0, 4), np.int32),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.arange(10)[::-2],
    ],
    ids=["transposed", "0-d", "empty", "bfloat16", "reversed"],
)
def test_cpu_arrays(values):
    cpu = backend.get("cpu")
    fresh = cpu.from_host(values)
    assert fresh.flags.c_contiguous
    assert not np.shares_memory(fresh, values)
    assert (fresh.shape, fresh.dtype) == (values.shape, values.dtype)
    assert np.array_equal(cpu.to_host(fresh), values)

    packed = cpu.contiguous(values)
    assert packed.flags.c_contiguous
    assert packed.shape == values.shape
    assert np.array_equal(packed, values)
    assert (packed is values) == values.flags.c_contiguous
    cpu.synchronize()


FAULTS = """
import resource
import numpy as np
from tparmpi.backend.host_memory import keep_freed

kept = keep_freed()
for number in range(11):
    np.empty(2**25, np.uint8)[:] = number
    if number == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("chosen", ["", "MALLOC_MMAP_THRESHOLD_"])
def test_freed_memory_is_kept_unless_the_user_chose(chosen):
    """Else each array of 32 MiB begins with at least 16 page faults."""
    variables = {k: v for k, v in os.environ.items() if k not in host_memory.CHOICES}
    if chosen:
        variables[chosen] = "131072"
    command = [sys.executable, "-c", FAULTS]
    kept, faults = subprocess.check_output(command, env=variables).split()
    assert kept == (b"False" if chosen else b"True")
    assert (int(faults) < 100) == (not chosen)


HUGE = """
import re
import resource
import sys
import numpy as np
from tparmpi.backend.host_memory import keep_freed, may_set_aside

if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (2**34, resource.RLIM_INFINITY))
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
keep_freed()
taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
# NumPy itself asks for huge pages from 4 MiB on. The last lies in no hole left before.
arrays = [np.ones(3 * 2**20, np.uint8) for _ in range(8)]
address = arrays[-1].ctypes.data
for line in open("/proc/self/smaps"):
    if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
        low, high = (int(bound, 16) for bound in found.groups())
    elif line.startswith("VmFlags") and low <= address < high:
        is_advised = "hg" in line.split()
print(may_set_aside(), is_advised, taken)
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or platform.libc_ver()[0] != "glibc",
    reason="needs glibc and a system with huge pages",
)
@pytest.mark.parametrize("limits", ["unlimited", "limited"])
def test_memory_to_come_is_to_lie_on_huge_pages(limits):
    """None is taken before it is used; limited addresses are left alone."""
    variables = {k: v for k, v in os.environ.items() if k not in host_memory.CHOICES}
    command = [sys.executable, "-c", HUGE, limits]
    may, is_advised, taken = subprocess.check_output(command, env=variables).split()
    assert is_advised == may
    assert (may, limits) != (b"True", "limited")
    assert int(taken) < 16 * 1024


def test_cpu_allocation():
    cpu = backend.get("cpu")
    assert cpu.empty((2, 3), "bfloat16").dtype == ml_dtypes.bfloat16
    zeros = cpu.zeros((2, 0, 3), np.float32)
    assert (zeros.shape, zeros.dtype) == ((2, 0, 3), np.float32)
    assert "bfloat16" in cpu.supported_dtypes


def test_add_into():
    target = np.arange(6.0).reshape(2, 3)
    backend.get("cpu").add_into(target, np.full((2, 3), 0.5))
    assert np.array_equal(target, np.arange(6.0).reshape(2, 3) + 0.5)


def test_meta_arrays():
    meta = backend.get("meta")
    array = meta.zeros([2, 3], "bfloat16")
    assert (array.shape, array.dtype) == ((2, 3), dtypes.dtype("bfloat16"))
    assert (array.ndim, array.size, array.nbytes) == (2, 6, 12)
    assert meta.empty((), "float64").size == 1
    copied = meta.from_host(np.zeros((4, 0), np.int8))
    assert (copied.shape, copied.dtype) == ((4, 0), np.dtype("i1"))
    assert meta.contiguous(array) is array
    meta.synchronize()
    with pytest.raises(DeviceError, match=r"\(2, 3\).*no values"):
        meta.to_host(array)


def test_dtype_names():
    assert dtypes.dtype("bfloat16") == ml_dtypes.bfloat16
    assert dtypes.dtype(np.float32) == dtypes.dtype("float32") == np.dtype("f4")
    with pytest.raises(TypeError):
        dtypes.dtype("float31")


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        (("float32", "float64"), "float64"),
        (("float32", 1.5), "float32"),
        (("float32", 2), "float32"),
        (("float32", 1j), "complex64"),
        (("int8", 1000), "int8"),
        (("int8", 1.5), "float64"),
        (("uint8", "int8"), "int16"),
        (("bool", True), "bool"),
        (("bool", 1), "int64"),
        (("bfloat16", 1.5), "bfloat16"),
        (("bfloat16", True, 3), "bfloat16"),
        (("bfloat16", "bfloat16"), "bfloat16"),
        (("bfloat16", "float16"), "float32"),
        (("bfloat16", "float64"), "float64"),
        (("bfloat16", "int32"), "float64"),
        (("bfloat16", "uint8"), "bfloat16"),
        (("bfloat16", 1j), "complex64"),
        ((1, 2.0), "float64"),
        ((True, False), "bool"),
        ((1, 1), "int64"),
    ],
    ids=str,
)
def test_promotion(operands, expected):
    assert dtypes.promote(*operands) == dtypes.dtype(expected)
    assert dtypes.promote(*reversed(operands)) == dtypes.dtype(expected)


def test_promotion_of_nothing():
    with pytest.raises(TypeError, match="at least one"):
        dtypes.promote()


def test_kinds_of_numbers():
    floating = {"float16", "bfloat16", "float32", "float64"}
    for name in backend.get("cpu").supported_dtypes:
        assert dtypes.is_floating(name) == (name in floating)
        assert dtypes.is_complex(name) == name.startswith("complex")
        assert dtypes.is_integer(name) == ("int" in name)
        half = name in ("float16", "bfloat16")
        assert dtypes.accumulation_dtype(name).name == ("float32" if half else name)
