"""One rank without a launcher: the same calls, nothing sent."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from tparmpi.comm import failure, objects, tags
from tparmpi.comm.ledger import Ledger, Record
from tparmpi.comm.settings import DeviceSettings
from tparmpi.errors import UsageError

PROGRAM = """
import sys
import numpy as np
import tparmpi as tpm
from tparmpi.errors import GroupError

assert "mpi4py.MPI" not in sys.modules
world = tpm.world()
own = np.arange(6.0).reshape(2, 3)
with tpm.ledger() as led:
    for got in (
        world.all_reduce(own), world.all_reduce(own, "mean"), world.all_gather(own, 1),
        world.reduce_scatter(own), world.all_to_all(own, 0, 1), world.broadcast(own),
        world.gather(own), world.scatter(own),
    ):
        assert np.array_equal(got, own)
        assert not np.shares_memory(got, own)
    world.barrier()
    assert world.all_gather_object({1}) == [{1}]
assert led.count() == 0
mesh = tpm.mesh(dp=1, tp=1)
assert mesh.axis("tp").size == 1
assert mesh.axis("tp").comm.size == 1
assert tpm.device().axis_group(0).all_reduce(own).shape == (2, 3)
mesh.close()
raise SystemExit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_one_rank(code):
    command = [sys.executable, "-c", PROGRAM, str(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")


def test_uncaught_exceptions_of_one_rank_look_as_ever():
    program = "import tparmpi as tpm; tpm.init(); raise ValueError('wrong value')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("\nValueError: wrong value\n")


def test_settings_are_of_their_kind():
    settings = DeviceSettings(float=ml_dtypes.bfloat16, int="int32")
    assert settings.float == ml_dtypes.bfloat16
    assert settings.int == np.int32
    assert DeviceSettings(float=np.float32) == DeviceSettings()
    for given in ({"float": "int32"}, {"int": "float32"}, {"bool": "int8"}):
        with pytest.raises(UsageError, match="is not a"):
            DeviceSettings(**given)
    with pytest.raises(UsageError, match="is no dtype"):
        DeviceSettings(float="float33")


@pytest.mark.parametrize("bound", [2, 7, 32_767, 2**29])
def test_tags_stay_below_the_bound(bound):
    tagged = {
        tags.fold(group, sequence, bound)
        for group in (0, 1, 77, 65_535)
        for sequence in range(0, 5000, 7)
    }
    assert min(tagged) >= 0
    assert max(tagged) + tags.PHASES - 1 <= bound
    assert all(tag % tags.PHASES == 0 for tag in tagged)


@pytest.mark.parametrize("length", [0, 200, 256, 5000])
def test_objects_in_frames(length):
    value = {"shape": (3, 4), "text": "é" * length}
    frame, body = objects.pack(value)
    assert frame.size == objects.FRAME_BYTES
    assert (body.size > 0) == (length > 150)
    assert objects.body_for(frame).size == body.size
    assert objects.unpack(frame, body) == value


def test_the_ledgers_table():
    led = Ledger()
    led.records += [
        Record("all_reduce", "tp", "matmul", 100, 0.5, "model.py:7"),
        Record("all_reduce", "tp", "matmul", 20, 0.25, "model.py:7"),
        Record("send", "pp", "", 8, 0.125, "user.py:1"),
    ]
    lines = [line.split() for line in led.table().splitlines()]
    assert lines == [
        ["call", "axis", "operator", "count", "bytes", "seconds", "site"],
        ["all_reduce", "tp", "matmul", "2", "120", "0.750000", "model.py:7"],
        ["send", "pp", "-", "1", "8", "0.125000", "user.py:1"],
    ]
    assert led.seconds("all_reduce") == 0.75


@pytest.mark.parametrize("error", [OSError("full"), ValueError("closed")])
def test_what_cannot_be_said_stops_nobody(monkeypatch, error):
    """A rank whose stderr is full or closed must still end its job."""

    class Unwritable:
        def write(self, text: str) -> int:
            raise error

        def flush(self) -> None:
            raise error

    monkeypatch.setattr(sys, "stderr", Unwritable())
    failure.say("wrong value", 1)
