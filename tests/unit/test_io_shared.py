"""Shared file systems that are behind what other nodes have written."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from tests.io_samples import unique, write
from tparmpi.errors import CheckpointError, DamagedCheckpointError
from tparmpi.io import patience, untrusted
from tparmpi.io.index import read_index
from tparmpi.io.planner import Box
from tparmpi.io.reader import BlockReader


class Behind:
    """A file system that fails on names of data files so many times."""

    def __init__(self, error: OSError, times: int) -> None:
        self.error = error
        self.times = times
        self.pauses: list[float] = []
        self._lstat = os.lstat

    def lstat(self, path):
        if self.times and "data-" in str(path):
            self.times -= 1
            raise self.error
        return self._lstat(path)


def behind(monkeypatch, number: int, times: int) -> Behind:
    found = Behind(OSError(number, os.strerror(number)), times)
    monkeypatch.setattr(untrusted.os, "lstat", found.lstat)
    monkeypatch.setattr(patience.time, "sleep", found.pauses.append)
    return found


def read(folder):
    with BlockReader(folder, read_index(folder)) as blocks:
        found = blocks.read("model/w", Box((0, 0), (4, 3)))
    assert np.array_equal(found, unique((4, 3), np.float32))


@pytest.fixture
def saved(tmp_path):
    return write(tmp_path / "a", {"model/w": unique((4, 3), np.float32)})


PASSING = (
    errno.ESTALE,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ENOLCK,
    errno.ETIMEDOUT,
    errno.ENOENT,
)


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_what_passes_is_waited_for(saved, monkeypatch, number):
    found = behind(monkeypatch, number, 3)
    read(saved)
    assert found.pauses == list(patience.PAUSES)


@pytest.mark.parametrize("number", PASSING[:-1], ids=errno.errorcode.get)
def test_what_stays_is_no_damage(saved, monkeypatch, number):
    """A resume must not fall back to an older checkpoint for it."""
    behind(monkeypatch, number, 1000)
    with pytest.raises(CheckpointError, match=r"data-.* try again$") as raised:
        read(saved)
    assert not isinstance(raised.value, DamagedCheckpointError)
    assert os.strerror(number) in str(raised.value)


def test_what_is_missing_is_told_at_once(saved, monkeypatch):
    found = behind(monkeypatch, errno.ESTALE, 0)
    gone = sorted(saved.glob("data-*.h5"))[0]
    gone.unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{gone.name} is missing"):
        read(saved)
    assert found.pauses == []


def test_a_broken_disk_is_told_at_once(saved, monkeypatch):
    found = behind(monkeypatch, errno.EIO, 1000)
    with pytest.raises(DamagedCheckpointError, match="Input/output error"):
        read(saved)
    assert found.pauses == []
