"""Which GPU and how many cores a rank gets."""

from __future__ import annotations

import numpy as np
import pytest
import threadpoolctl

from tparmpi.comm import binding
from tparmpi.comm.launcher import Launched
from tparmpi.config import Environment
from tparmpi.errors import DeviceError, UsageError


def row(node: int, cores: str, quota: float | None = None, **more: object) -> dict:
    return {"node": node, "cores": [*map(int, cores)], "quota": quota, **more}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([row(0, "0123")], [4]),
        ([row(0, "0123"), row(0, "0123")], [2, 2]),
        ([row(0, "01"), row(0, "23")], [2, 2]),
        ([row(0, "0123"), row(1, "0123")], [4, 4]),
        # The second rank's only core is shared.
        ([row(0, "0123"), row(0, "3")], [3.5, 0.5]),
        ([row(0, "01"), row(0, "01"), row(0, "01")], [2 / 3] * 3),
        # A quota of three cores for the two ranks of the node.
        ([row(0, "01234567", 3.0), row(0, "01234567", 3.0)], [1.5, 1.5]),
    ],
)
def test_cores_are_divided_among_overlapping_masks(table, expected):
    cores = [binding.usable_cores(table, rank) for rank in range(len(table))]
    assert cores == pytest.approx(expected)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
def test_the_control_groups_quota(tmp_path, files, expected):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert binding.core_quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [(0, 1, 0), (1, 2, 1), (3, 2, 1), (5, 4, 1), (None, 4, 2)],
)
def test_gpus_go_round(local_rank, visible, expected):
    assert binding.choose_gpu(Launched(6, 8, local_rank), visible) == expected


def test_more_threads_than_cores_are_warned_about(monkeypatch):
    for name in binding._THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    table = [row(0, "01"), row(0, "01")]
    with threadpoolctl.threadpool_limits(limits=None):
        binding.limit_threads(table, 0)
        np.ones((8, 8)) @ np.ones((8, 8))
        assert {pool["num_threads"] for pool in threadpoolctl.threadpool_info()} <= {1}
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        with pytest.warns(UserWarning, match="may use 1 of the cores, OMP_NUM_THREADS"):
            binding.limit_threads(table, 0)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        binding.limit_threads(table, 0)


def test_ranks_that_share_a_gpu_are_named_once():
    table = [
        row(0, "0", identity="0000:01", host="a"),
        row(0, "0", identity="0000:01", host="a"),
        row(1, "0", identity="0000:01", host="b"),
    ]
    with pytest.warns(UserWarning, match="ranks 0, 1 share one GPU of a"):
        binding.warn_of_sharing(table, 0)
    binding.warn_of_sharing(table, 1)
    binding.warn_of_sharing(table, 2)


def test_a_gpu_that_is_asked_for_must_exist(monkeypatch):
    class Missing:
        class runtime:
            getDeviceCount = staticmethod(lambda: 0)

    class Backend:
        class xp:
            cuda = Missing

    monkeypatch.setattr(binding, "get", lambda kind: Backend)
    monkeypatch.setattr(binding, "environment", lambda: Environment("cuda"))
    with pytest.raises(DeviceError, match="no GPU is visible"):
        binding.choose_device(Launched())
    monkeypatch.setattr(binding, "environment", lambda: Environment("cpu"))
    assert binding.choose_device(Launched()).kind == "cpu"


def test_the_device_variable():
    assert Environment.read({"TPARMPI_DEVICE": "cpu"}).device == "cpu"
    assert Environment.read({"TPARMPI_DEVICE": ""}).device is None
    with pytest.raises(UsageError, match="must be cpu or cuda, it is 'gpu'"):
        Environment.read({"TPARMPI_DEVICE": "gpu"})
