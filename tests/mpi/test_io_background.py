"""Saves in the background: private copies, agreement at the steps, errors on all."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

import tparmpi as tpm
from tests import ways
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint, chunked, pending, publish, saving, writer

pytestmark = pytest.mark.mpi(min_size=4)

SIZES = {"even": (64, 30), "uneven": (7, 5), "few": (3,), "one": (), "none": (0, 4)}


class Bag:
    """Named tensors, rows over the first ranks; shells on the others."""

    def __init__(self, start, members=4, dtype=np.float32):
        place = tpm.group(tpm.devices()[:members])
        self.steps = int(start)
        self.tensors = {}
        for name, shape in SIZES.items():
            tensor = tpm.tensor(values(name, start, dtype), place)
            if shape:
                tensor = tensor.with_sharding(tpm.Shard(0), allow_empty=True)
            self.tensors[name] = tensor

    def state_dict(self):
        return self.tensors

    def fill(self, value):
        """Overwrite every element in place, as an optimizer does."""
        for tensor in self.tensors.values():
            if not tensor.is_shell:
                tensor.write_local(np.full_like(tensor.local, value))


def values(name, start, dtype=np.float32):
    shape = SIZES[name]
    return (start + np.arange(np.prod(shape, dtype=int))).reshape(shape).astype(dtype)


def check(path, start, members=2):
    """A checkpoint holds the values that a bag of this `start` had."""
    found = Bag(-1, members)
    optimizer = Bag(-1, members)
    report = checkpoint.load(path, found, optimizer)
    for bag in (found, optimizer):
        for name, tensor in bag.tensors.items():
            if not tensor.is_shell:
                assert np.array_equal(tensor.numpy(), values(name, start)), name
    assert optimizer.steps == start
    assert report.step == start


@pytest.fixture
def folder(shared_path) -> Path:
    return shared_path / "checkpoints"


@pytest.fixture
def saver():
    saver = checkpoint.BackgroundSaver()
    yield saver
    assert saver.under_way is None
    assert pending.current is None
    # Threads end with their saves.
    for thread in threading.enumerate():
        if thread.name.startswith("tparmpi-save"):
            thread.join(10)
            assert not thread.is_alive()


def names(folder):
    everyone = tpm.world()
    everyone.barrier()
    return everyone.broadcast_object(sorted(os.listdir(folder)))


def poll_to_the_end(saver):
    while saver.under_way:
        saver.poll()


def refused(words):
    return pytest.raises(CheckpointError, match=words)


def begin(saver, folder, step, members=4):
    path = checkpoint.step_path(folder, step)
    state = Bag(step, members), Bag(step, members)
    extra = {"list": [step]}
    assert saver.save(path, *state, step=step, seed=1, position=2, extra=extra) == path
    return path, *state, extra


class Gate:
    """Holds a function of some ranks until it is opened."""

    def __init__(self, monkeypatch, target, name, ranks):
        self._open = threading.Event()
        self.entered = threading.Event()
        if tpm.world().rank in ranks:
            function = getattr(target, name)

            def held(*args, **keywords):
                self.entered.set()
                assert self._open.wait(60)
                return function(*args, **keywords)

            monkeypatch.setattr(target, name, held)

    def open(self):
        self._open.set()


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_a_save_holds_what_was_when_it_began(saver, folder, monkeypatch, members):
    gate = Gate(monkeypatch, saving, "write_data_file", {0, 1, 2, 3})
    path, model, optimizer, extra = begin(saver, folder, 3, members)
    model.fill(99)
    optimizer.fill(98)
    optimizer.steps = 97
    extra["list"].append("later")
    gate.open()
    assert saver.under_way == path
    assert saver.wait() == [path]
    check(path, 3)
    report = checkpoint.load(path, Bag(0))
    assert (report.seed, report.position, report.extra) == (1, 2, {"list": [3]})
    assert names(folder) == ["step-00000003"]


def test_memory_of_the_copy_is_used_again_until_closed(saver, folder):
    sizes, places = set(), set()
    for step in (1, 2, 3):
        path, *_ = begin(saver, folder, step)
        saver.wait()
        check(path, step)
        sizes.add(saver._snapshot.nbytes)
        places.add(saver._snapshot._memory.ctypes.data)
    assert len(sizes) == len(places) == 1
    saver.close()
    assert saver._snapshot.nbytes == 0
    begin(saver, folder, 4)
    saver.close()
    assert names(folder)[-1] == "step-00000004"


def test_no_rank_waits_for_one_that_writes(saver, folder, monkeypatch):
    gate = Gate(monkeypatch, saving, "write_data_file", {2})
    path, *_ = begin(saver, folder, 1)
    for _ in range(20):
        assert saver.poll() == []
    assert tpm.world().all_reduce(np.array(3)) == 12
    assert not path.exists()
    gate.open()
    published = []
    while not published:
        published = saver.poll()
    assert published == [path]
    assert saver.poll() == []
    check(path, 1)


def test_no_rank_waits_for_the_one_that_publishes(saver, folder, monkeypatch):
    gate = Gate(monkeypatch, saving, "write_index", {0})
    path, *_ = begin(saver, folder, 1)
    while not tpm.world().all_reduce(np.array(int(gate.entered.is_set()))):
        assert saver.poll() == []
    for _ in range(20):
        assert saver.poll() == []
    assert not path.exists()
    gate.open()
    assert saver.wait() == [path]
    check(path, 1)


def test_the_thread_makes_no_call_of_mpi(saver, folder, monkeypatch):
    """Nothing is communicated but what the main thread calls, and that is little."""
    gate = Gate(monkeypatch, saving, "write_data_file", {0, 1, 2, 3})
    begin(saver, folder, 1)
    with tpm.ledger() as led:
        gate.open()
        assert saver._running is not None
        saver._running.wait()
        assert led.count() == 0
        saver.poll()
        saver._running.wait()
        saver.poll()
        assert led.count("all_reduce") == 2
        assert led.count() == 3
        saver.poll()
        assert led.count() == 3
    assert saver.under_way is None


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize(("most", "expected"), [(4, 2), (3, 1), (1, 1)])
def test_it_takes_half_the_threads(
    saver, folder, monkeypatch, compression, most, expected
):
    monkeypatch.setattr(saving.fmt, "threads", lambda: most)
    asked = []
    for module in (writer, chunked):
        executor = module.ThreadPoolExecutor
        monkeypatch.setattr(
            module,
            "ThreadPoolExecutor",
            lambda threads, make=executor: (asked.append(threads), make(threads))[1],
        )
    saver.save(checkpoint.step_path(folder, 1), Bag(1), compression=compression)
    saver.wait()
    background = asked.copy()
    checkpoint.save(checkpoint.step_path(folder, 2), Bag(2), compression=compression)
    assert set(background) == {expected}
    assert set(asked[len(background) :]) == {most}


def test_one_save_is_under_way_at_a_time(saver, folder, monkeypatch):
    gate = Gate(monkeypatch, saving, "write_data_file", {1})
    first, *_ = begin(saver, folder, 1)
    timer = threading.Timer(0.2, gate.open)
    timer.start()
    second, *_ = begin(saver, folder, 2)
    assert names(folder)[0] == "step-00000001"
    assert saver.under_way == second
    assert saver.wait() == [first, second]
    timer.join()
    check(first, 1)
    check(second, 2)


@pytest.mark.parametrize("what", ["save", "another saver", "load"])
def test_other_saves_and_loads_wait(saver, folder, monkeypatch, what):
    gate = Gate(monkeypatch, saving, "write_data_file", {3})
    first, *_ = begin(saver, folder, 1)
    timer = threading.Timer(0.2, gate.open)
    timer.start()
    second = checkpoint.step_path(folder, 2)
    if what == "save":
        checkpoint.save(second, Bag(2), Bag(2), step=2)
    elif what == "another saver":
        with checkpoint.BackgroundSaver() as other:
            begin(other, folder, 2)
    else:
        check(first, 1)
    timer.join()
    assert saver.under_way is None
    assert saver.poll() == [first]
    check(first, 1)
    if what != "load":
        check(second, 2)


def test_the_end_of_the_block_waits_unless_it_ends_by_an_error(folder):
    with checkpoint.BackgroundSaver() as saver:
        path, *_ = begin(saver, folder, 1)
    assert saver.under_way is None
    check(path, 1)
    error = ValueError("mine")
    saver.__enter__()
    begin(saver, folder, 2)
    saver.__exit__(ValueError, error, None)
    assert saver.under_way is not None
    saver.abandon()
    assert pending.current is None
    left = [name for name in names(folder) if name != "step-00000001"]
    assert len(left) == 1 and left[0].endswith(".tmp")
    assert checkpoint.latest(folder) == path
    checkpoint.save(checkpoint.step_path(folder, 3), Bag(3), Bag(3), step=3)
    assert names(folder) == ["step-00000001", "step-00000003"]


def no_space(*args, **keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS = {
    "disk full, rank 1 writes": (1, writer, "write_at"),
    "sync fails, rank 2": (2, writer.os, "fsync"),
    "file cannot be made, rank 3": (3, writer, "_create"),
    "index cannot be written": (0, saving, "write_index"),
    "index cannot be synced": (0, saving.fmt, "sync"),
    "rename fails": (0, publish.os, "rename"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
def test_an_error_of_one_thread_is_raised_on_all(
    saver, folder, monkeypatch, fault, replacing
):
    before, *_ = begin(saver, folder, 1)
    saver.wait()
    rank, target, name = FAULTS[fault]
    with monkeypatch.context() as patch:
        if tpm.world().rank == rank:
            patch.setattr(target, name, no_space)
        begin(saver, folder, 1 if replacing else 2)
        with pytest.raises(CheckpointError, match=r"cannot save .*No space left"):
            poll_to_the_end(saver)
        # Whoever is late must not find the function mended.
        tpm.world().barrier()
    assert saver.under_way is None
    assert names(folder) == ["step-00000001"]
    check(before, 1)
    after, *_ = begin(saver, folder, 3)
    assert saver.wait() == [after]
    check(after, 3)


@pytest.mark.parametrize("how", ["save", "wait", "load", "close"])
def test_an_error_is_raised_by_whatever_waits(saver, folder, monkeypatch, how):
    with monkeypatch.context() as patch:
        if tpm.world().rank == 2:
            patch.setattr(writer.os, "fsync", no_space)
        begin(saver, folder, 1)
        wait = {
            "save": lambda: checkpoint.save(checkpoint.step_path(folder, 2), Bag(2)),
            "load": lambda: checkpoint.load(folder, Bag(2)),
            "wait": saver.wait,
            "close": saver.close,
        }[how]
        with pytest.raises(CheckpointError, match=r"rank 2: cannot save .*-00000001"):
            wait()
        tpm.world().barrier()
    assert names(folder) == []


def test_those_who_still_write_end_when_one_has_failed(saver, folder, monkeypatch):
    """Not at the end of all they have: at the next tensor."""
    gate = Gate(monkeypatch, writer, "_lay_out", {0, 1, 3})
    if tpm.world().rank == 2:
        monkeypatch.setattr(writer, "_lay_out", no_space)
    fetched = []
    begin(saver, folder, 1)
    running = saver._running
    cancel = running.cancel
    monkeypatch.setattr(running, "cancel", lambda: (gate.open(), cancel())[1])
    write_at = writer.write_at
    monkeypatch.setattr(
        writer, "write_at", lambda *args: (fetched.append(1), write_at(*args))
    )
    with pytest.raises(CheckpointError, match=r"rank 2: .*No space left"):
        poll_to_the_end(saver)
    assert fetched == []
    assert names(folder) == []


def test_an_error_of_another_kind_names_its_rank(saver, folder, monkeypatch):
    def broken(*args, **keywords):
        raise ZeroDivisionError("a mistake")

    if tpm.world().rank == 1:
        monkeypatch.setattr(saving, "write_data_file", broken)
    begin(saver, folder, 1)
    with pytest.raises(tpm.errors.CommunicationError, match="rank 1: ZeroDivision"):
        saver.wait()
    assert names(folder) == []


def test_what_is_refused_at_the_beginning_leaves_nothing(saver, folder, monkeypatch):
    folder.mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="step must be an integer"):
        saver.save(folder / "a", Bag(1), step=1.5 if tpm.world().rank == 1 else 1)
    tpm.world().barrier()

    def none_left(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        if tpm.world().rank == 3:
            patch.setattr(saver._snapshot, "reserve", none_left)
        with refused(r"rank 3: cannot save .* no memory for a copy of [\d,]+ bytes"):
            begin(saver, folder, 1)
    assert saver.under_way is None
    assert names(folder) == []


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_file_that_may_grow_no_more(saver, folder, background, rank):
    """The system itself refuses, in whatever call of HDF5 or of ours it is."""
    before, *_ = begin(saver, folder, 1)
    saver.wait()
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, 5000):
        model, optimizer = Bag(2), Bag(2)
        if tpm.world().rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, kept[1]))
        try:
            path = checkpoint.step_path(folder, 2)
            save = saver.save if background else checkpoint.save
            words = r"cannot save .*[Ff]ile too large"
            with contextlib.nullcontext() if background else refused(words):
                save(path, model, optimizer, step=2)
            with refused(words) if background else contextlib.nullcontext():
                saver.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        assert names(folder) == ["step-00000001"]
    check(before, 1)


@pytest.mark.parametrize("name", ways.NAMES)
def test_arrays_of_every_kind_of_device(saver, folder, monkeypatch, name):
    way = ways.Way(name, monkeypatch)
    group = way.group([2, 0, 3, 1])
    whole = np.arange(35, dtype=np.float64).reshape(7, 5)
    model = Bag(0)
    rows = tpm.tensor(way.put(whole), group).with_sharding(tpm.Shard(0))
    columns = tpm.tensor(way.put(whole), group).with_sharding(tpm.Shard(1))
    model.tensors = {"rows": rows, "columns": columns}
    path = checkpoint.step_path(folder, 1)
    saver.save(path, model, step=1)
    for tensor in model.tensors.values():
        tensor.write_local(np.zeros(tensor.local.shape))
    assert saver.wait() == [path]
    checkpoint.load(path, model)
    for tensor in model.tensors.values():
        assert np.array_equal(tensor.numpy(), whole)
    way.check()
    way.close()
