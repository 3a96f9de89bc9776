"""What a save and a load hold at once: the model, and bounded staging memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import tparmpi as tpm
from tests.io_samples import unique
from tests.ways import Way
from tparmpi import Replicate, Shard
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint, loading, publish, saving, staging, writer
from tparmpi.io import format as fmt
from tparmpi.io.reader import BlockReader

pytestmark = pytest.mark.mpi(min_size=4)

LIMIT = 1 << 20
SHAPE = (2048, 2048)
# A rank's block: 4 MiB.
OWN = 4 * SHAPE[0] * SHAPE[1] // 4
# The plan, the index, what threads and exceptions need.
SMALL = 1 << 18


class Bag:
    """The least that can be saved and loaded into: named tensors."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors


@pytest.fixture
def bounded(monkeypatch):
    """Staging memory of 1 MiB, checksums of each 16 KiB."""
    monkeypatch.setattr(fmt, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(staging, "limit", lambda: LIMIT)


def peak_of(work):
    """The most bytes that this rank allocates while it works, above what it had.

    The lesser of two times: a table of the process that grows meanwhile, which it does
    after thousands of tests, grows once.
    """
    return min(_peak_of(work) for _ in range(2))


def _peak_of(work):
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def four():
    return tpm.group(tpm.devices()[:4])


def block(tensor, whole):
    spec = tensor.spec
    spans = zip(spec.local_offset, spec.local_shape, strict=True)
    return whole[tuple(slice(o, o + n) for o, n in spans)]


LOADS = {
    "rows": (Shard(0), {}),
    "columns": (Shard(1), {}),
    "transposed": (Shard(0), {"transforms": [checkpoint.Transpose("w")]}),
    "cast": (Shard(0), {"dtype": "cast"}),
    "columns, cast": (Shard(1), {"dtype": "cast"}),
}


@pytest.mark.parametrize("kind", LOADS)
def test_a_load_needs_the_model_and_staging_memory(shared_path, bounded, kind):
    placement, options = LOADS[kind]
    whole = unique(SHAPE, np.float32, 5)
    path = shared_path / "step-00000001"
    checkpoint.save(path, Bag({"w": tpm.tensor(whole, four()).with_sharding(Shard(0))}))
    if "cast" in kind:
        whole = whole.astype(np.float64)
    zeros = np.zeros_like(whole)
    loaded = tpm.tensor(zeros, four()).with_sharding(placement)
    expected = whole.T if kind == "transposed" else whole
    memory = loaded.local.__array_interface__["data"]
    peak = peak_of(lambda: checkpoint.load(path, Bag({"w": loaded}), **options))
    assert peak < LIMIT + SMALL
    assert LIMIT + SMALL < OWN / 3
    assert loaded.local.__array_interface__["data"] == memory
    assert np.array_equal(loaded.local, block(loaded, expected))


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_a_save_copies_nothing(shared_path, bounded, placement):
    whole = unique(SHAPE, np.float32, 3)
    saved = tpm.tensor(whole, four()).with_sharding(placement)
    path = shared_path / "step-00000001"
    peak = peak_of(lambda: checkpoint.save(path, Bag({"w": saved})))
    assert peak < SMALL
    loaded = tpm.tensor(np.zeros_like(whole), four()).with_sharding(Shard(0))
    checkpoint.load(path, Bag({"w": loaded}))
    assert np.array_equal(loaded.local, block(loaded, whole))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_tensors_of_a_device_are_saved_and_loaded_by_parts(
    shared_path, bounded, monkeypatch, count
):
    way = Way("cuda_aware", monkeypatch)
    monkeypatch.setattr(staging, "limit", lambda: 1 << 18)
    whole = unique((700, 513), np.float32, 4)
    path = shared_path / "step-00000001"
    group = way.group(range(count))
    everyone = tpm.world()
    saved = tpm.tensor(way.put(whole), group).with_sharding(Shard(1))
    checkpoint.save(
        path, Bag({"w": saved, "s": tpm.tensor(way.put(whole[0, 0]), group)})
    )
    back = way.group(range(3, 3 - count, -1))
    loaded = Bag(
        {
            "w": tpm.tensor(way.put(np.zeros_like(whole)), back).with_sharding(
                Shard(0)
            ),
            "s": tpm.tensor(way.put(np.zeros((), np.float32)), back),
        }
    )
    checkpoint.load(path, loaded)
    if back.is_member:
        found = way.fetch(loaded.tensors["w"].local)
        assert np.array_equal(found, block(loaded.tensors["w"], whole))
        assert way.fetch(loaded.tensors["s"].local) == whole[0, 0]
    everyone.barrier()
    way.close()


def test_a_file_that_changes_during_the_load_is_told_from_a_damaged_one(
    shared_path, monkeypatch
):
    whole = unique((64, 64), np.float32, 1)
    path = shared_path / "step-00000001"
    checkpoint.save(path, Bag({"w": tpm.tensor(whole, four())}))
    loaded = tpm.tensor(np.zeros_like(whole), four()).with_sharding(Shard(0))

    def fail(*arguments):
        raise CheckpointError("it is gone")

    if tpm.world().rank == 2:
        monkeypatch.setattr(BlockReader, "read_into", fail)
    with pytest.raises(
        CheckpointError, match=r"it is gone. It was whole when the load began, and the"
    ):
        checkpoint.load(path, Bag({"w": loaded}))


def test_every_byte_is_checked_once_before_it_is_read_once(shared_path, monkeypatch):
    whole = unique((64, 64), np.float32, 1)
    path = shared_path / "step-00000001"
    checkpoint.save(path, Bag({"w": tpm.tensor(whole, four()).with_sharding(Shard(0))}))
    loaded = tpm.tensor(np.zeros_like(whole), four()).with_sharding(Shard(0))
    calls = []
    for name in ("check", "read_into"):
        method = getattr(BlockReader, name)

        def counted(self, *arguments, name=name, method=method):
            calls.append((name, arguments[1].size))
            method(self, *arguments)

        monkeypatch.setattr(BlockReader, name, counted)
    agreed = []
    on_all_ranks = loading.on_all_ranks
    monkeypatch.setattr(
        loading,
        "on_all_ranks",
        lambda what, work: agreed.append(list(calls)) or on_all_ranks(what, work),
    )
    checkpoint.load(path, Bag({"w": loaded}))
    assert calls == [("check", 16 * 64), ("read_into", 16 * 64)]
    assert agreed[-2:] == [[], calls[:1]]


SAVE_FAULTS = {
    "rank 1 describes": (1, saving, "_describe", "rank 1: cannot save"),
    "rank 0 makes room": (0, Path, "mkdir", "cannot save"),
    "rank 2 lays its file out": (2, writer, "_lay_out", "rank 2: cannot save"),
    "rank 3 writes": (3, writer, "write_at", "rank 3: cannot save"),
    "rank 0 writes the index": (0, saving, "write_index", "cannot save"),
    "rank 0 publishes": (0, publish, "publish", "cannot save"),
}
LOAD_FAULTS = {
    "rank 0 reads the index": (0, loading, "read_source", "cannot load"),
    "rank 1 looks at the index": (1, loading, "views_of", "rank 1: cannot load"),
    "rank 2 checks": (2, BlockReader, "check", "rank 2: cannot load"),
    "rank 3 reads": (3, loading, "_fill", "rank 3: cannot load"),
}


def none_left(*args, **keywords):
    raise MemoryError("Unable to allocate 8 EiB")


def refused_alike(work, words):
    """One sentence on all ranks, that says what there was no memory for."""
    words += r".* [^ ]*step-00000001.*: out of memory: Unable to allocate 8 EiB"
    with pytest.raises(CheckpointError, match=words) as caught:
        work()
    (said,) = set(tpm.world().all_gather_object(str(caught.value)))
    return said


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("fault", SAVE_FAULTS)
def test_a_rank_without_memory_to_save_makes_all_refuse(
    shared_path, monkeypatch, fault, background
):
    rank, target, name, words = SAVE_FAULTS[fault]
    whole = unique((8, 3), np.float32)
    bag = Bag({"w": tpm.tensor(whole, four()).with_sharding(Shard(0))})
    path = shared_path / "step-00000001"
    saver = checkpoint.BackgroundSaver()

    def save():
        if background:
            saver.save(path, bag)
            saver.wait()
        else:
            checkpoint.save(path, bag)

    with monkeypatch.context() as patch:
        if tpm.world().rank == rank:
            patch.setattr(target, name, none_left)
        refused_alike(save, words)
    assert list(shared_path.iterdir()) == []
    save()
    assert checkpoint.verify(path) == []


@pytest.mark.parametrize("fault", LOAD_FAULTS)
def test_a_rank_without_memory_to_load_makes_all_refuse(
    shared_path, monkeypatch, fault
):
    rank, target, name, words = LOAD_FAULTS[fault]
    whole = unique((8, 3), np.float32)
    path = shared_path / "step-00000001"
    checkpoint.save(path, Bag({"w": tpm.tensor(whole, four()).with_sharding(Shard(0))}))
    loaded = tpm.tensor(np.zeros_like(whole), four()).with_sharding(Shard(0))
    with monkeypatch.context() as patch:
        if tpm.world().rank == rank:
            patch.setattr(target, name, none_left)
        said = refused_alike(lambda: checkpoint.load(path, Bag({"w": loaded})), words)
    assert ("overwritten in part" in said) == (name == "_fill")
    checkpoint.load(path, Bag({"w": loaded}))
    assert np.array_equal(loaded.local, block(loaded, whole))
