"""Safetensors files in and out, and copies of checkpoints, without ranks."""

from __future__ import annotations

import json
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.io_samples import samples, unique, write
from tparmpi.errors import CheckpointError
from tparmpi.io import copies, inspection, staging, weights
from tparmpi.io.planner import Box
from tparmpi.io.sources import open_source, read_source

WEIGHTS = {
    "h.0.w": unique((6, 4), np.float32),
    "h.0.b": unique((4,), ml_dtypes.bfloat16),
    "scale": np.array(2.5, np.float16),
    "empty": np.empty((0, 3), np.float64),
    "mask": unique((5,), np.bool_),
    "count": unique((2, 2), np.int64),
}


def whole(tensor):
    return Box((0,) * len(tensor.shape), tensor.shape)


def values_of(path):
    """Every tensor of a source by its name with dots."""
    source = read_source(path)
    with open_source(path, source) as blocks:
        return {
            name.partition("/")[2].replace("/", "."): blocks.read(name, whole(tensor))
            for name, tensor in source.tensors.items()
        }


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes(), name


def sharded(folder):
    """The weights in two files with an index."""
    folder.mkdir()
    names = sorted(WEIGHTS)
    placed = {}
    for number in (1, 2):
        part = {name: WEIGHTS[name] for name in names[number - 1 :: 2]}
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return index


def test_one_file_is_read_whole_and_in_parts(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path, {"format": "pt", "step": "12"})
    same(values_of(path), WEIGHTS)
    source = read_source(path)
    assert source.header.step == 12
    with open_source(path, source) as blocks:
        found = blocks.read("model/h/0/w", Box((1, 2), (3, 2)))
        assert np.array_equal(found, WEIGHTS["h.0.w"][1:4, 2:])
        found = blocks.read("model/h/0/b", Box((1,), (2,)))
        assert np.array_equal(found, WEIGHTS["h.0.b"][1:3])


def test_several_files_are_read_by_their_index_or_folder(tmp_path):
    index = sharded(tmp_path / "a")
    same(values_of(index), WEIGHTS)
    same(values_of(index.parent), WEIGHTS)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    index = sharded(tmp_path / "a")
    content = json.loads(index.read_text())
    placed = content["weight_map"]
    first, second = sorted(set(placed.values()))
    for change, words in [
        ({"more": first}, "names 'more', but .* lacks it"),
        ({"scale": first if placed["scale"] == second else second}, "another file"),
        ({"scale": "../a.safetensors"}, "is no file of weights beside it"),
        ({"scale": "/etc/passwd"}, "is no file of weights beside it"),
        ({"scale": 3}, "is no file of weights beside it"),
        ({"more": "model-3.safetensors"}, "model-3.safetensors is missing"),
    ]:
        index.write_text(json.dumps({"weight_map": placed | change}))
        with pytest.raises(CheckpointError, match=words):
            read_source(index)
    for text in ("[]", "{}", "{", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"no index|cannot be read"):
            read_source(index)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="missing"):
        read_source(path)
    save_file(WEIGHTS, path)
    content = path.read_bytes()
    for damaged in (b"", content[:6], content[:100], content[:-1], b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_source(path)
    header = b'{"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"12")
    with pytest.raises(CheckpointError, match=r"'a' in .* has dtype F8_E4M3"):
        read_source(path)
    save_file({"a..b": WEIGHTS["mask"]}, path)
    with pytest.raises(CheckpointError, match="cannot be saved under that name"):
        read_source(path)


def test_export_writes_what_the_library_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "SLAB_BYTES", 64)
    arrays = {f"model/{n.replace('.', '/')}": a for n, a in WEIGHTS.items()}
    moments = {"optimizer/h/0/w/m": WEIGHTS["h.0.w"]}
    folder = write(tmp_path / "a", arrays | moments, step=12)
    path = copies.export(folder, tmp_path / "out" / "model.safetensors")
    package = weights.safetensors()
    with package.safe_open(path, framework="np") as file:
        same({name: np.asarray(file.get_tensor(name)) for name in file.keys()}, WEIGHTS)  # noqa: SIM118
        assert file.metadata() == {"format": "pt", "step": "12"}
    assert sorted(os.listdir(path.parent)) == ["model.safetensors"]
    split = copies.export(folder, tmp_path / "b", max_file_bytes=60)
    names = sorted(os.listdir(split))
    assert names[0] == f"model-00001-of-0000{len(names) - 1}.safetensors"
    assert names[-1] == "model.safetensors.index.json"
    assert len(names) == 4
    same(values_of(split), WEIGHTS)
    assert read_source(split).header.step == 12


def test_export_refuses_what_it_cannot_write_and_leaves_nothing(tmp_path):
    folder = write(tmp_path / "a", samples())
    with pytest.raises(CheckpointError, match=r"cannot hold 'kinds\.complex128'"):
        copies.export(folder, tmp_path / "b.safetensors")
    folder = write(tmp_path / "c", {"model/w": WEIGHTS["h.0.w"]})
    with pytest.raises(CheckpointError, match=r"must end with \.safetensors"):
        copies.export(folder, tmp_path / "b")
    with pytest.raises(CheckpointError, match="exists; give a new name"):
        copies.export(folder, folder)
    (data,) = [p for p in folder.iterdir() if p.name.endswith("1.h5")]
    data.unlink()
    for limit in (None, 10):
        with pytest.raises(CheckpointError, match="missing"):
            copies.export(folder, tmp_path / "b.safetensors", max_file_bytes=limit)
    with pytest.raises(CheckpointError, match="missing"):
        copies.convert(folder, tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]


def test_a_copy_has_the_same_tensors_in_other_files(tmp_path):
    arrays = samples() | {"model/large": unique((300, 900), np.float32)}
    folder = write(tmp_path / "a", arrays, step=9, optimizer_steps=4, extra={"a": 1})
    for files in (1, 3):
        path = copies.convert(folder, tmp_path / f"b{files}", files=files)
        assert not inspection.diff(folder, path)
        assert inspection.verify(path) == []
        assert len(inspection.inspect(path).files) == files
    with pytest.raises(CheckpointError, match="files must be an integer from 1"):
        copies.convert(folder, tmp_path / "c", files=0)
    with pytest.raises(CheckpointError, match="exists; give a new name"):
        copies.convert(folder, path)


def test_weights_become_a_checkpoint_with_other_names(tmp_path):
    index = sharded(tmp_path / "a")
    path = copies.convert(index, tmp_path / "b", remap=[(r"^h\.", "blocks.")])
    assert inspection.verify(path) == []
    expected = {n.replace("h.0", "blocks.0"): array for n, array in WEIGHTS.items()}
    same(values_of(path), expected)


def test_neither_copy_nor_export_holds_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "SLAB_BYTES", 1 << 20)
    monkeypatch.setattr(staging, "part_bytes", lambda: 1 << 20)
    monkeypatch.setattr(staging, "limit", lambda: 4 << 20)
    mebibytes = 48
    arrays = {
        f"model/w{n}": unique((4, 1 << 20), np.uint8, n) for n in range(mebibytes // 4)
    }
    folder = write(tmp_path / "a", arrays)
    del arrays
    tracemalloc.start()
    try:
        path = copies.export(folder, tmp_path / "b.safetensors")
        exported = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        copies.convert(path, tmp_path / "c")
        converted = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 1 MiB at a time in up to three copies, and a buffer of each of at most 5 threads.
    assert exported < 9 << 20
    assert converted < 9 << 20
    assert not inspection.diff(folder, tmp_path / "c").values
