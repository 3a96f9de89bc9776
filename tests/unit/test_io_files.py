from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tracemalloc
import zlib

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.io_samples import SAVE_ID, parts, samples, unique, write
from tparmpi.config import Environment
from tparmpi.errors import CheckpointError, UsageError
from tparmpi.io import checksums, reader, staging, untrusted, writer
from tparmpi.io import format as fmt
from tparmpi.io.index import read_index
from tparmpi.io.planner import Box
from tparmpi.io.reader import BlockReader
from tparmpi.io.slabs import boxes, contiguous, place, slabs, touched
from tparmpi.io.writer import Shard, write_data_file


def shrink(patch):
    """Checksums per 64 bytes and parts of 128, so that small files have many."""
    patch.setattr(fmt, "BLOCK_BYTES", 64)
    patch.setattr(staging, "part_bytes", lambda: 128)


@pytest.fixture
def small_blocks(monkeypatch):
    shrink(monkeypatch)


def whole(array):
    return Box((0,) * array.ndim, array.shape)


def test_every_dtype_and_shape_comes_back_byte_for_byte(tmp_path):
    arrays = samples()
    folder = write(tmp_path / "a", arrays)
    index = read_index(folder)
    assert set(index.tensors) == set(arrays)
    with BlockReader(folder, index) as blocks:
        for name, array in arrays.items():
            found = blocks.read(name, whole(array))
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            assert found.tobytes() == array.tobytes(), name


def test_plain_h5py_reads_whole_tensors_without_tparmpi(tmp_path):
    arrays = samples()
    folder = write(tmp_path / "a", arrays)
    program = (
        "import h5py, json, sys\n"
        "with h5py.File(sys.argv[1]) as f:\n"
        "    w = f['model/kinds/float32'][...]\n"
        "    b = f['model/kinds/bfloat16'][...]\n"
        "    print(json.dumps([w.tolist(), b.tolist(), str(b.dtype)]))\n"
        "assert 'tparmpi' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "index.h5")],
        cwd="/",
        check=True,
        capture_output=True,
    )
    w, b, dtype = json.loads(done.stdout)
    assert w == arrays["model/kinds/float32"].tolist()
    assert b == arrays["model/kinds/bfloat16"].astype(np.float32).tolist()
    assert dtype == "float32"
    with h5py.File(folder / "index.h5") as file:
        for name, array in arrays.items():
            if array.dtype != ml_dtypes.bfloat16:
                assert file[name].dtype == array.dtype
                assert file[name][()].tobytes() == array.tobytes()


def test_a_missing_data_file_reads_as_nan_in_plain_h5py(tmp_path):
    folder = write(tmp_path / "a", samples())
    (folder / fmt.data_name(SAVE_ID, 1)).unlink()
    with h5py.File(folder / "index.h5") as file:
        for name in ("bfloat16", "float16", "float64", "complex64"):
            values = file[f"model/kinds/{name}"][...]
            assert np.isnan(values[2:]).all()
            assert not np.isnan(values[:2]).any()


def test_another_saves_files_are_never_read_in_place_of_a_missing_one(
    tmp_path, monkeypatch
):
    arrays = samples()
    folder = write(tmp_path / "a", arrays)
    other = write(tmp_path / "b", arrays, save_id="f" * 16)
    (folder / fmt.data_name(SAVE_ID, 1)).unlink()
    monkeypatch.chdir(other)
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(other))
    with h5py.File(folder / "index.h5") as file:
        assert np.isnan(file["model/kinds/float32"][2:]).all()
    with (
        BlockReader(folder, read_index(folder)) as blocks,
        pytest.raises(CheckpointError, match=r"data-.*-00001\.h5 is missing"),
    ):
        blocks.read("model/kinds/float32", Box((0, 0), (5, 3)))


def test_the_header_comes_back(tmp_path):
    extra = {"a": [1, None, {"é": 2.5}], "b": "text", "c": True}
    header = {"step": 1 << 40, "seed": -5, "position": 0, "optimizer_steps": 12}
    folder = write(tmp_path / "a", {}, extra=extra, **header)
    found = read_index(folder).header
    assert found.extra == extra
    assert {name: getattr(found, name) for name in header} == header
    with h5py.File(folder / "index.h5") as file:
        assert file.attrs["seed"] == -5
        assert json.loads(file.attrs["extra"]) == extra
    bare = read_index(write(tmp_path / "b", {})).header
    assert (bare.seed, bare.position, bare.optimizer_steps) == (None, None, None)


def test_checksums_beyond_the_size_of_a_compact_attribute(tmp_path, small_blocks):
    array = unique((2, 700_000), np.uint8)
    folder = write(tmp_path / "a", {"model/w": array})
    index = read_index(folder)
    assert sum(len(p.checksums) for p in index.tensors["model/w"].pieces) == 21876
    with BlockReader(folder, index) as blocks:
        assert np.array_equal(blocks.read("model/w", whole(array)), array)


@settings(max_examples=60)
@given(st.data())
def test_any_block_of_any_tensor_is_read_exactly(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    array = unique(shape, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        folder = write(tmp_path_factory.mktemp("io") / "a", {"model/w": array})
        with BlockReader(folder, read_index(folder)) as blocks:
            for _ in range(4):
                box = data.draw(parts(shape))
                found = blocks.read("model/w", box)
                assert np.array_equal(found, array[box.slices()])


@given(st.data())
def test_slabs_are_contiguous_small_and_hold_the_part(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    part, limit = data.draw(parts(shape)), data.draw(st.integers(1, 50))
    order = np.arange(int(np.prod(shape))).reshape(shape)
    covered = np.zeros(shape, int)
    last = -1
    for slab in slabs(shape, part, limit):
        places = np.atleast_1d(order[slab.slices()]).reshape(-1)
        assert (np.diff(places) == 1).all()
        assert places[0] > last
        assert len(places) <= limit
        last = places[-1]
        covered[slab.slices()] += 1
    assert (covered[part.slices()] == 1).all()


@given(st.data())
def test_a_range_of_file_order_is_few_boxes(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    size = int(np.prod(shape))
    end = data.draw(st.integers(0, size))
    first = data.draw(st.integers(0, end))
    order = np.arange(size).reshape(shape)
    found = boxes(shape, first, end)
    places = [order[box.slices()].reshape(-1) for box in found]
    assert np.array_equal(np.concatenate([[], *places]), np.arange(first, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for box, numbers in zip(found, places, strict=True):
        assert place(shape, box.offset) == numbers[0]
        assert contiguous(shape, box)


@given(st.data())
def test_a_part_needs_the_blocks_that_hold_its_elements(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    part, block = data.draw(parts(shape)), data.draw(st.integers(1, 60))
    order = np.arange(int(np.prod(shape))).reshape(shape)
    places = np.atleast_1d(order[part.slices()]).reshape(-1)
    assert contiguous(shape, part) == bool((np.diff(places) == 1).all())
    runs = touched(shape, part, block)
    found = [number for first, end in runs for number in range(first, end)]
    assert found == sorted(set((places // block).tolist()))


def test_a_column_block_reads_only_the_blocks_it_needs(
    tmp_path, small_blocks, monkeypatch
):
    array = unique((4, 1024), np.uint8)
    folder = write(tmp_path / "a", {"model/w": array})
    counts = []
    read_at = reader.read_at

    def counting(descriptor, target, offset):
        counts.append(len(target))
        read_at(descriptor, target, offset)

    monkeypatch.setattr(reader, "read_at", counting)
    with BlockReader(folder, read_index(folder)) as blocks:
        found = blocks.read("model/w", Box((1, 300), (2, 10)))
    assert np.array_equal(found, array[1:3, 300:310])
    assert sum(counts) == 2 * 64


def test_whole_blocks_are_read_once_straight_to_where_they_are_wanted(
    tmp_path, small_blocks, monkeypatch
):
    array = unique((20, 40), np.float32)
    folder = write(tmp_path / "a", {"model/w": array})
    target = np.empty((15, 40), np.float32)
    begin = target.__array_interface__["data"][0]
    memory = range(begin, begin + target.nbytes)
    straight, staged = [], []
    read_at = reader.read_at

    def counting(descriptor, part, offset):
        address = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
        (straight if address in memory else staged).append(
            (descriptor, offset, len(part))
        )
        read_at(descriptor, part, offset)

    monkeypatch.setattr(reader, "read_at", counting)
    with BlockReader(folder, read_index(folder)) as blocks:
        blocks.read_into("model/w", Box((3, 0), (15, 40)), target)
    assert np.array_equal(target, array[3:18])
    assert len(set(straight + staged)) == len(straight + staged)
    # From the first file bytes 480 to 1600, from the second 0 to 1280: one block is
    # needed in part.
    assert sum(count for *_, count in straight) == (1600 - 512) + 1280
    assert [count for *_, count in staged] == [64]


def test_a_check_reads_each_block_once(tmp_path, small_blocks, monkeypatch):
    array = unique((20, 1000), np.float32)
    folder = write(tmp_path / "a", {"model/w": array})
    counts = []
    read_at = reader.read_at

    def counting(descriptor, part, offset):
        counts.append(len(part))
        read_at(descriptor, part, offset)

    with BlockReader(folder, read_index(folder)) as blocks:
        blocks.check("model/w", Box((0, 0), (1, 1)))
        monkeypatch.setattr(reader, "read_at", counting)
        blocks.check("model/w", whole(array))
    assert sum(counts) == array.nbytes
    assert max(counts) == 64


def test_hdf5_is_asked_once_where_each_tensor_lies(tmp_path, monkeypatch):
    names = [f"model/blocks/{n}/{kind}" for n in range(3) for kind in "abc"]
    arrays = {name: unique((1, 5), np.float32, n) for n, name in enumerate(names)}
    folder = write(tmp_path / "a", arrays)
    index = read_index(folder)
    met = []
    child = untrusted._child

    def counting(group, key, name):
        met.append(key)
        return child(group, key, name)

    monkeypatch.setattr(untrusted, "_child", counting)
    with BlockReader(folder, index) as blocks:
        for read in (blocks.check, blocks.read, blocks.read):
            for name, array in arrays.items():
                read(name, whole(array))
    files = {piece.file for t in index.tensors.values() for piece in t.pieces}
    assert sorted(met) == sorted(
        [*"abc" * 3, *["model", "blocks"] * len(files), *groups_of(index)]
    )


def groups_of(index):
    """The last group on the way to each tensor, once for each file."""
    found = {
        (piece.file, name.split("/")[-2])
        for name, tensor in index.tensors.items()
        for piece in tensor.pieces
    }
    return [group for _, group in found]


def strided(kind):
    """An array that does not lie in memory as it does in a file, and its values."""
    values = unique((600, 350, 11), np.float32, 9)
    array = {
        "columns": np.repeat(values, 2, axis=1)[:, ::2],
        "transposed": np.asfortranarray(values),
        "backwards": values[::-1].copy()[::-1],
        "big-endian": values.astype(">f4"),
        "contiguous": values,
    }[kind]
    assert array.flags.c_contiguous == (kind in ("contiguous", "big-endian"))
    return array, values


@pytest.mark.parametrize(
    "kind", ["columns", "transposed", "backwards", "big-endian", "contiguous"]
)
def test_what_lies_otherwise_in_memory_is_copied_by_parts(tmp_path, monkeypatch, kind):
    array, values = strided(kind)
    monkeypatch.setattr(fmt, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(staging, "limit", lambda: 1 << 20)
    synced = []
    monkeypatch.setattr(
        writer, "start_writeback", lambda *args: synced.append(args[1:])
    )
    asked = []

    def to_host(part):
        asked.append(part.size)
        return np.array(part, np.float32, order="C")

    shard = Shard("model/w", "float32", array.shape, lambda: array, to_host)
    path = tmp_path / fmt.data_name(SAVE_ID, 0)
    tracemalloc.start()
    try:
        sums = write_data_file(path, SAVE_ID, [shard])["model/w"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    with h5py.File(path) as file:
        offset = file["model/w"].id.get_offset()
        assert np.array_equal(file["model/w"][...], values)
    data = values.tobytes()
    blocks = [data[at : at + (1 << 14)] for at in range(0, len(data), 1 << 14)]
    assert sums.tolist() == [zlib.crc32(block) for block in blocks]
    # The disk is told of every byte, once.
    assert sorted(synced)[0][0] == offset
    assert sum(count for _, count in synced) == len(data)
    if kind != "big-endian":
        # The limit, and what the file and threads need.
        assert peak < (1 << 20) + (1 << 18) < len(data) / 7
    assert sum(asked) == (0 if array.flags.c_contiguous else values.size)


def test_a_flipped_byte_is_found_and_its_block_named(tmp_path, small_blocks):
    array = unique((2, 640), np.uint8)
    folder = write(tmp_path / "a", {"model/w": array})
    path = folder / fmt.data_name(SAVE_ID, 1)
    with h5py.File(path) as file:
        offset = file["model/w"].id.get_offset()
    with path.open("r+b") as file:
        file.seek(offset + 3 * 64 + 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 16]))
    with BlockReader(folder, read_index(folder)) as blocks:
        assert blocks.read("model/w", Box((0, 0), (1, 640))).shape == (1, 640)
        with pytest.raises(CheckpointError, match=r"-00001\.h5.*'model/w'.*block 3"):
            blocks.read("model/w", whole(array))


def test_swapped_data_files_are_found(tmp_path):
    folder = write(tmp_path / "a", {"model/w": unique((4, 100), np.float32)})
    first, second = (folder / fmt.data_name(SAVE_ID, n) for n in (0, 1))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    with (
        BlockReader(folder, read_index(folder)) as blocks,
        pytest.raises(CheckpointError, match="checksum"),
    ):
        blocks.read("model/w", Box((0, 0), (4, 100)))


@pytest.mark.parametrize("kept", [0, 100, 1000, -1])
@pytest.mark.parametrize("name", ["index.h5", fmt.data_name(SAVE_ID, 1)])
def test_a_cut_file_is_found_and_named(tmp_path, name, kept):
    array = unique((4, 1000), np.float32)
    folder = write(tmp_path / "a", {"model/w": array})
    path = folder / name
    os.truncate(path, kept if kept >= 0 else path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{name} "):  # noqa: SIM117
        with BlockReader(folder, read_index(folder)) as blocks:
            blocks.read("model/w", whole(array))


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        read_index(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"has no index\.h5"):
        read_index(tmp_path)
    (tmp_path / "index.h5").write_text("not HDF5" * 100)
    with pytest.raises(CheckpointError, match=r"index\.h5 cannot be read"):
        read_index(tmp_path)


def test_names_become_paths():
    names = fmt.dataset_names("optimizer", {"blocks.0.w/m": 1, "blocks.0.w/v": 2})
    assert names == {"optimizer/blocks/0/w/m": 1, "optimizer/blocks/0/w/v": 2}


@pytest.mark.parametrize("name", ["", "a..b", ".a", "a/", "a%b", "a\nb", "a/b/c"])
def test_names_that_no_path_can_hold_are_refused(name):
    with pytest.raises(CheckpointError, match="cannot be saved under that name"):
        fmt.dataset_names("model", {name: 1})


@pytest.mark.parametrize("names", [("a.b", "a/b"), ("a", "a.b"), ("a.b", "a.b.c")])
def test_names_that_meet_in_one_path_are_refused(names):
    with pytest.raises(CheckpointError, match="meet in one path"):
        fmt.dataset_names("model", dict.fromkeys(names, 1))


def test_a_dtype_that_hdf5_cannot_hold_is_refused():
    with pytest.raises(CheckpointError, match="float8_e4m3fn, which checkpoints"):
        fmt.supported_dtype("w", np.dtype(ml_dtypes.float8_e4m3fn))


def test_a_write_that_the_system_takes_in_parts_is_completed(tmp_path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:100], at))
    monkeypatch.setattr(
        os, "preadv", lambda fd, data, at: preadv(fd, [data[0][:70]], at)
    )
    array = unique((4, 1000), np.float32)
    folder = write(tmp_path / "a", {"model/w": array})
    with BlockReader(folder, read_index(folder)) as blocks:
        assert np.array_equal(blocks.read("model/w", whole(array)), array)


def test_both_libraries_take_the_same_checksums(monkeypatch):
    data = unique((3, 400_001), np.uint8).data.cast("B")
    assert checksums.MADE_BY == "zlib-ng"
    assert checksums.crc32(data) == zlib.crc32(data)
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    without = importlib.reload(checksums)
    try:
        assert without.MADE_BY == "zlib"
        assert without.crc32 is zlib.crc32
    finally:
        monkeypatch.undo()
        importlib.reload(checksums)


def test_staging_memory_is_a_number_of_mebibytes():
    assert Environment.read({}).staging_mib == 256
    assert Environment.read({"TPARMPI_STAGING_MIB": "16"}).staging_mib == 16
    for wrong in ("15", "-1", "1e3", "64M", "٣٢", "9" * 20):
        with pytest.raises(UsageError, match="TPARMPI_STAGING_MIB must be a number of"):
            Environment.read({"TPARMPI_STAGING_MIB": wrong})
