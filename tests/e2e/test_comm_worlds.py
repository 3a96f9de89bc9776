"""Worlds that one run of the tests cannot have: a user's own ranks, mixed settings."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.launch import Finished, mpirun, run


def program(folder: Path, body: str, ranks: int) -> Finished:
    """Run a program, which must end well and say nothing on stderr."""
    (folder / "program.py").write_text(body)
    command = [*mpirun(ranks), sys.executable, "-W", "error", "program.py"]
    job = run(command, cwd=folder, limit=60)
    assert (job.code, job.err) == (0, ""), job.err
    return job


OWN_COMMUNICATOR = """
import numpy as np
from mpi4py import MPI
import tparmpi as tpm
from tparmpi.comm import is_initialized

# Even and odd ranks apart, each backwards.
here = MPI.COMM_WORLD.rank
comm = MPI.COMM_WORLD.Split(here % 2, -here)
assert not is_initialized()
device = tpm.init(comm)
assert tpm.init(comm) is device
n = comm.size
assert (device.rank, len(tpm.devices()), tpm.world().size) == (comm.rank, n, n)
members = tpm.world().all_gather(np.array([here])).tolist()
assert members == [r for r in range(4, -1, -1) if r % 2 == here % 2], members
if n == 3:
    group = tpm.group([tpm.devices()[2], tpm.devices()[0]])
    if group.is_member:
        assert group.all_gather(np.array([here])).tolist() == [0, 4]
    group.close()
mesh = tpm.mesh(a=n, b=1)
assert mesh.axis("a").all_reduce(np.array(here)) == sum(members)
mesh.close()
# The user's own calls on it, and the end of it, are the user's.
assert comm.allreduce(1) == n
comm.Free()
assert tpm.world().all_reduce(np.array(1)) == n
assert MPI.COMM_WORLD.allreduce(1) == 5
"""


def test_a_communicator_of_the_users(tmp_path):
    program(tmp_path, OWN_COMMUNICATOR, 5)


MIXED_SETTINGS = """
import os
import numpy as np
import tparmpi as tpm
from mpi4py import MPI
from tparmpi.errors import GroupError

rank = MPI.COMM_WORLD.rank
own = [
    tpm.DeviceSettings(float="float64", int="int32"),
    tpm.DeviceSettings(float="bfloat16"),
    tpm.DeviceSettings(quantization="int8"),
][rank]
tpm.init(settings=own)
first, second, third = tpm.devices()
assert first.settings.float == np.float64 and second.settings.float.name == "bfloat16"
pair, back = tpm.group([first, second]), tpm.group([second, first])
assert (pair.settings.float, pair.settings.int) == (np.float64, np.int32)
assert (back.settings.float.name, back.settings.int) == ("bfloat16", np.int64)
for devices in ([first, third], [third, second], tpm.devices()):
    try:
        tpm.group(devices)
    except GroupError as error:
        assert "quantizes with" in str(error), error
    else:
        raise AssertionError("devices that quantize differently")
try:
    tpm.world()
except GroupError as error:
    assert "quantizes with" in str(error), error
assert tpm.group([third]).settings.quantization == "int8"
if pair.is_member:
    assert pair.all_reduce(np.array(rank)) == 1
    assert back.all_gather(np.array([rank])).tolist() == [1, 0]
"""


def test_mixed_settings(tmp_path):
    program(tmp_path, MIXED_SETTINGS, 3)


EIGHT = """
from functools import reduce
import numpy as np
import tparmpi as tpm
from tparmpi.comm import algorithms
from tparmpi.sharding import chunk

group = tpm.group(tpm.devices()[::-1])
n, me = group.size, group.rank
assert n == 8
for whole in (2**20, 0):
    algorithms.WHOLE_BYTES = whole
    algorithms.PIECE_BYTES = 4096
    for dtype in ("int64", "float16", "complex128"):
        arrays = [
            (np.arange(1234) * 7 % 23 + m).reshape(617, 2).astype(dtype)
            for m in range(n)
        ]
        own = arrays[me]
        wide = "float32" if dtype == "float16" else dtype
        total = reduce(np.add, [a.astype(wide) for a in arrays]).astype(dtype)
        start, size = chunk(617, n, me)
        mine = slice(start, start + size)
        assert np.array_equal(group.all_reduce(own), total)
        assert np.array_equal(group.reduce_scatter(own), total[mine])
        assert np.array_equal(group.all_gather(own, 1), np.concatenate(arrays, 1))
        parts = [a[mine] for a in arrays]
        assert np.array_equal(group.all_to_all(own, 0, 1), np.concatenate(parts, 1))
        for root in (0, 5):
            assert np.array_equal(group.broadcast(own, root), arrays[root])
            part = group.scatter(own, root)
            assert np.array_equal(part, arrays[root][mine])
            got = group.gather(part, root)
            assert got is None if me != root else np.array_equal(got, arrays[root])
        to, source = (me + 3) % n, (me - 3) % n
        handle = group.start.recv(source)
        group.send(own, to)
        assert np.array_equal(handle.wait(), arrays[source])
group.barrier()
mesh = tpm.mesh(a=2, b=2, c=2)
here = tpm.device().rank
assert mesh.coordinates == (here // 4, here // 2 % 2, here % 2)
for axis, stride in (("a", 4), ("b", 2), ("c", 1)):
    line = mesh.axis(axis).all_gather(np.array([here])).tolist()
    assert here in line and line[1] - line[0] == stride
mesh.close()
group.close()
"""


def test_eight_ranks(tmp_path):
    program(tmp_path, EIGHT, 8)
