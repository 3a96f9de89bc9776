from __future__ import annotations

import json
import os
import subprocess
import sys

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.io_samples import SAVE_ID, samples, unique, write
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import reader, writer
from tparmpi.io.index import read_index
from tparmpi.io.planner import Box
from tparmpi.io.reader import BlockReader, slabs


def shrink(patch):
    """Checksums per 64 bytes and slabs of 256, so that small files have many."""
    patch.setattr(fmt, "BLOCK_BYTES", 64)
    patch.setattr(writer, "WRITE_BYTES", 128)
    patch.setattr(reader, "STAGING_BYTES", 256)


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
                offset = [data.draw(st.integers(0, n - 1)) for n in shape]
                extent = [
                    data.draw(st.integers(1, n - o))
                    for n, o in zip(shape, offset, strict=True)
                ]
                box = Box(tuple(offset), tuple(extent))
                found = blocks.read("model/w", box)
                assert np.array_equal(found, array[box.slices()])


@given(st.data())
def test_slabs_are_contiguous_small_and_hold_the_part(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(
        data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)
    )
    part, limit = Box(offset, extent), data.draw(st.integers(1, 50))
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
