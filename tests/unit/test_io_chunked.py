"""Compressed tensors: the same bytes, plain for h5py, read without trust."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
import zlib

import h5py
import numpy as np
import pytest
from h5py import h5p, h5s
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.io_samples import SAVE_ID, parts, samples, unique, write
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint, copies, staging
from tparmpi.io import format as fmt
from tparmpi.io.chunked import Grid, Levels
from tparmpi.io.index import read_index
from tparmpi.io.planner import Box
from tparmpi.io.reader import BlockReader


def shrink(patch):
    """Checksums and chunks of 64 bytes, so that small tensors have many."""
    patch.setattr(fmt, "BLOCK_BYTES", 64)


def whole(array):
    return Box((0,) * array.ndim, array.shape)


def data_file(folder, writer=1):
    return folder / fmt.data_name(SAVE_ID, writer)


@pytest.mark.parametrize("level", [1, 4, 9])
@pytest.mark.parametrize("small", [False, True])
def test_every_dtype_and_shape_comes_back(tmp_path, monkeypatch, level, small):
    if small:
        shrink(monkeypatch)
    arrays = samples() | {"model/rows": unique((3, 5, 70), np.float32)}
    folder = write(tmp_path / "a", arrays, level=level)
    with h5py.File(data_file(folder)) as file:
        assert file["model/kinds/float32"].compression == "gzip"
        assert file["model/kinds/float32"].compression_opts == level
    with BlockReader(folder, read_index(folder)) as blocks:
        for name, array in arrays.items():
            found = blocks.read(name, whole(array))
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes(), name
    with h5py.File(data_file(folder, 0)) as file:
        assert file["model/scalar"].chunks is None
    assert checkpoint.verify(folder) == []


def test_plain_h5py_reads_through_the_index(tmp_path, monkeypatch):
    shrink(monkeypatch)
    arrays = samples()
    folder = write(tmp_path / "a", arrays, level=4)
    with h5py.File(folder / "index.h5") as file:
        for name, array in arrays.items():
            found = file[name][()]
            if array.dtype.name == "bfloat16":
                array = array.astype(np.float32)
            assert np.asarray(found).tobytes() == array.tobytes(), name


def test_what_repeats_takes_less_room(tmp_path):
    # Not a whole number of chunks, rows or blocks.
    arrays = {"model/w": np.repeat(unique((3001,), np.float32), 700).reshape(3001, 700)}
    small = write(tmp_path / "a", arrays, level=4)
    large = write(tmp_path / "b", arrays)
    sizes = [data_file(folder).stat().st_size for folder in (small, large)]
    assert sizes[0] < sizes[1] / 50
    with BlockReader(small, read_index(small)) as blocks:
        found = blocks.read("model/w", Box((1400, 300), (200, 7)))
    assert np.array_equal(found, arrays["model/w"][1400:1600, 300:307])


@given(st.data())
def test_any_block_is_read_exactly(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([np.uint8, np.int16, np.complex128]))
    array = unique(shape, dtype)
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        folder = tmp_path_factory.mktemp("io") / "a"
        write(folder, {"model/w": array}, level=1)
        with BlockReader(folder, read_index(folder)) as blocks:
            for _ in range(3):
                box = data.draw(parts(shape))
                found = blocks.read("model/w", box)
                assert np.array_equal(found, array[box.slices()])


@given(st.data())
def test_chunks_in_order_are_the_bytes_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    itemsize = data.draw(st.sampled_from([1, 2, 4, 16]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fmt, "BLOCK_BYTES", data.draw(st.sampled_from([16, 64, 256])))
        grid = Grid.of(shape, itemsize)
        assert grid.nbytes <= max(itemsize, fmt.BLOCK_BYTES)
    assert grid.is_in_file_order()
    order = np.arange(int(np.prod(shape))).reshape(shape)
    expected = 0
    for number in range(grid.count):
        first, end = grid.span(number)
        assert first == expected
        offset = grid.offset(number)
        part = tuple(slice(o, o + n) for o, n in zip(offset, grid.chunk, strict=True))
        found = order[part].reshape(-1)
        assert np.array_equal(found, np.arange(first // itemsize, end // itemsize))
        assert {grid.at(first), grid.at(end - 1)} == {number}
        expected = end
    assert expected == order.size * itemsize


def test_damage_anywhere_is_found_and_named(tmp_path):
    draw = np.random.default_rng(3)
    array = draw.integers(0, 200, (4, 3000)).astype(np.float32)
    folder = write(tmp_path / "a", {"model/w": array}, level=4)
    path = data_file(folder)
    content = path.read_bytes()
    with h5py.File(path) as file:
        info = file["model/w"].id.get_chunk_info(0)
    found = set()
    for offset in draw.choice(info.size, 40, replace=False):
        damaged = bytearray(content)
        damaged[info.byte_offset + offset] ^= 1 << draw.integers(8)
        path.write_bytes(damaged)
        (problem,) = checkpoint.verify(folder)
        assert str(path) in problem
        assert "'model/w'" in problem
        found.add(problem)
    assert len(found) > 1


def attacked(folder, shape, chunk, chunks, filters=("shuffle", "deflate"), mask=0):
    """Put a dataset with given chunks in place of the second data file's."""
    with h5py.File(data_file(folder), "r+") as file:
        del file["model/w"]
        plist = h5p.create(h5p.DATASET_CREATE)
        plist.set_chunk(chunk)
        for name in filters:
            getattr(plist, f"set_{name}")(*([4] if name == "deflate" else []))
        space = h5s.create_simple(shape)
        fmt.create_dataset(file, "model/w", "float32", space, plist)
        for offset, content in chunks.items():
            file["model/w"].id.write_direct_chunk(offset, content, mask)


HALF = (2, 1024)
PLAIN = unique(HALF, np.float32)
PACKED = zlib.compress(np.ascontiguousarray(PLAIN.view(np.uint8).reshape(-1, 4).T))


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "a", {"model/w": np.concatenate([PLAIN, PLAIN])}, level=4)


def read(folder):
    with BlockReader(folder, read_index(folder)) as blocks:
        return blocks.read("model/w", Box((2, 0), HALF))


def test_the_attacks_begin_from_what_is_read(folder):
    attacked(folder, HALF, HALF, {(0, 0): PACKED})
    assert np.array_equal(read(folder), PLAIN)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"filters": ("deflate",)}, "other filters"),
        ({"filters": ("shuffle",)}, "other filters"),
        ({"filters": ()}, "other filters"),
        ({"filters": ("shuffle", "deflate", "fletcher32")}, "other filters"),
        ({"filters": ("deflate", "shuffle")}, "other filters"),
        ({"mask": 1}, "not stored compressed"),
        ({"mask": 2}, "not stored compressed"),
        ({"chunks": {}}, "too few bytes"),
        ({"chunks": {(0, 0): PACKED[:-9]}}, "another length|is damaged"),
        ({"chunks": {(0, 0): b"no zlib" * 3}}, "is damaged"),
        ({"chunks": {(0, 0): zlib.compress(b"")}}, "another length|too few bytes"),
        ({"chunks": {(0, 0): zlib.compress(bytes(9000))}}, "another length"),
        ({"chunks": {(0, 0): zlib.compress(bytes(8192))}}, "checksum"),
        ({"chunks": {(0, 0): PACKED + bytes(9000)}}, "beyond its place"),
        ({"chunk": (2, 512), "chunks": {(0, 0): PACKED}}, "form that is never"),
        ({"chunk": (1, 1024), "chunks": {(0, 0): PACKED}}, "too few bytes"),
        ({"shape": (2, 1025), "chunk": (2, 1025)}, "has shape"),
    ],
)
def test_hostile_chunks_are_refused(folder, arguments, words):
    given_ = {"shape": HALF, "chunk": HALF, "chunks": {(0, 0): PACKED}} | arguments
    attacked(folder, **given_)
    with pytest.raises(CheckpointError, match=rf"-00001\.h5 .*({words})"):
        read(folder)


def test_a_bomb_takes_no_memory(tmp_path):
    """A MiB of chunk in which 256 MiB are packed, and 1 GiB of tensor in 1 MiB."""
    rows = (1, 1 << 18)
    folder = write(tmp_path / "a", {"model/w": np.zeros((2, 1 << 18), np.float32)})
    attacked(folder, rows, rows, {(0, 0): zlib.compress(bytes(1 << 28))})
    with BlockReader(folder, read_index(folder)) as blocks:
        target = np.empty(rows, np.float32)
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError, match="another length"):
                blocks.read_into("model/w", Box((1, 0), rows), target)
            assert tracemalloc.get_traced_memory()[1] < 5 << 20
        finally:
            tracemalloc.stop()


def test_a_chunk_of_more_than_a_block_is_refused(tmp_path):
    shape = (1, (1 << 18) + 1)
    folder = write(tmp_path / "a", {"model/w": np.zeros((2, shape[1]), np.float32)})
    attacked(folder, shape, shape, {(0, 0): zlib.compress(bytes(4 * shape[1]))})
    with (
        BlockReader(folder, read_index(folder)) as blocks,
        pytest.raises(CheckpointError, match="form that is never written"),
    ):
        blocks.read("model/w", Box((1, 0), shape))


def test_which_tensors_are_compressed():
    assert Levels(None).of("model/a/w") == Levels("none").of("model/a/w") == 0
    assert Levels("gzip").of("model/a/w") == 4
    assert Levels(9).of("optimizer/a/w/m") == 9
    chosen = Levels({r"a\.w": None, r"a\..*": 7, r".*\.[mv]": "gzip"})
    levels = [chosen.of(p) for p in ("model/a/w", "model/a/b", "model/c")]
    assert levels == [0, 7, 0]
    assert chosen.of("optimizer/c/w/m") == 4
    for wrong in ("lzf", 0, 10, 4.0, True, [4], {"a": "szip"}, {"a": {}}):
        with pytest.raises(CheckpointError, match="compression must be 'gzip'"):
            Levels(wrong)
    for pattern in ("(", 3):
        with pytest.raises(CheckpointError, match="is no regular expression"):
            Levels({pattern: "gzip"})


def test_a_pattern_that_matches_no_tensor_is_refused(tmp_path):
    folder = write(tmp_path / "a", samples())
    words = r"'kind', which matches no tensor's whole name \(near: 'kinds"
    with pytest.raises(CheckpointError, match=words):
        copies.convert(folder, tmp_path / "b", compression={"kind": 9, ".*": "gzip"})
    assert os.listdir(tmp_path) == ["a"]
    # One that others before it have taken all tensors from is no mistake.
    Levels({".*": 9, "a": "gzip"}).check(["model/a"])
    for everything in (None, "gzip", 3):
        Levels(everything).check([])
    with pytest.raises(CheckpointError, match="name: there are none"):
        Levels({".*": 9}).check([])


def test_copies_are_compressed_and_back(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "SLAB_BYTES", 256)
    arrays = samples()
    plain = write(tmp_path / "a", arrays)
    packed = copies.convert(plain, tmp_path / "b", files=3, compression="gzip")
    some = copies.convert(packed, tmp_path / "c", compression={"kinds.*": 9})
    back = copies.convert(some, tmp_path / "d", files=2)
    for path in (packed, some, back):
        assert not checkpoint.diff(plain, path)
        assert checkpoint.verify(path) == []
    with h5py.File(some / fmt.data_name(checkpoint.inspect(some).save_id, 0)) as file:
        assert file["model/kinds/int64"].compression_opts == 9
        assert file["model/deep"].chunks is None
    with pytest.raises(CheckpointError, match="compression must be"):
        copies.convert(plain, tmp_path / "e", compression="lzf")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "d"]


def test_compressed_ones_are_exported(tmp_path):
    arrays = {"model/w": unique((40, 30), np.float32)}
    folder = write(tmp_path / "a", arrays, level=4)
    path = copies.export(folder, tmp_path / "m.safetensors")
    assert np.array_equal(load_file(path)["w"], arrays["model/w"])


@pytest.mark.parametrize(("asked", "level"), [("gzip", 4), ("7", 7)])
def test_the_command_compresses(tmp_path, asked, level):
    folder = write(tmp_path / "a", samples())
    command = [sys.executable, "-m", "tparmpi", "ckpt", "reshard"]
    done = subprocess.run(
        [*command, f"--compression={asked}", str(folder), str(tmp_path / "b")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not checkpoint.diff(folder, tmp_path / "b")
    (data,) = (tmp_path / "b").glob("data-*")
    with h5py.File(data) as file:
        assert file["model/kinds/bool"].compression == "gzip"
        assert file["model/kinds/bool"].compression_opts == level
