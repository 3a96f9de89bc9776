"""Looking at checkpoints, without ranks."""

from __future__ import annotations

import os
import shutil

import h5py
import ml_dtypes
import numpy as np
import pytest

from tests.io_samples import SAVE_ID, samples, unique, write
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import inspection, staging
from tparmpi.io.index import read_index
from tparmpi.io.planner import Box
from tparmpi.io.reader import BlockReader


def flip(path, offset):
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)


def everything(folder):
    """Header and the bytes of every tensor."""
    index = read_index(folder)
    found = {}
    with BlockReader(folder, index) as blocks:
        for name, tensor in index.tensors.items():
            array = blocks.read(name, Box((0,) * len(tensor.shape), tensor.shape))
            found[name] = (array.dtype, array.shape, array.tobytes())
    return index.header, found


def test_a_summary_says_what_is_there(tmp_path):
    arrays = {"model/w": unique((5, 3), np.float32), "optimizer/w/m": unique((), "f8")}
    folder = write(tmp_path / "a", arrays, seed=3, extra={"a": 1})
    found = inspection.inspect(str(folder))
    assert (found.step, found.seed, found.position) == (7, 3, None)
    assert (found.extra, found.save_id) == ({"a": 1}, SAVE_ID)
    assert found.files == [fmt.data_name(SAVE_ID, n) for n in (0, 1)]
    kind = found.tensors["model/w"]
    assert (kind.shape, kind.dtype, kind.nbytes) == ((5, 3), "float32", 60)
    assert (found.parameters, found.nbytes) == (15, 68)


def test_a_whole_checkpoint_verifies(tmp_path):
    assert inspection.verify(write(tmp_path / "a", samples())) == []


def test_any_flipped_byte_is_found_or_without_effect(tmp_path):
    # Bytes that HDF5 leaves unused between its parts have no checksum and no meaning.
    arrays = {
        "model/w": unique((5, 30), np.float32),
        "model/b": unique((7,), ml_dtypes.bfloat16),
    }
    folder = write(tmp_path / "a", arrays, extra={"a": 1}, seed=1)
    before = everything(folder)
    found = 0
    draw = np.random.default_rng(5)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for offset in draw.choice(len(content), 150, replace=False):
            flip(path, int(offset))
            if inspection.verify(folder, threads=1):
                found += 1
            else:
                assert everything(folder) == before, (path.name, offset)
            path.write_bytes(content)
    assert found > 100


def test_every_damaged_part_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fmt, "BLOCK_BYTES", 64)
    arrays = {name: unique((4, 100), np.float32) for name in ("model/a", "model/b")}
    folder = write(tmp_path / "a", arrays)
    assert inspection.verify(folder) == []
    for number, name in ((0, "model/a"), (1, "model/b")):
        path = folder / fmt.data_name(SAVE_ID, number)
        with h5py.File(path) as file:
            offset = file[name].id.get_offset()
        flip(path, offset + 64 * (number + 4))
    (folder / "notes").write_text("mine")
    one, two, three = inspection.verify(folder)
    assert "-00000.h5" in one
    assert "'model/a' is wrong in its block 4" in one
    assert "-00001.h5" in two
    assert "'model/b' is wrong in its block 5" in two
    assert "notes is no part of the checkpoint" in three


def test_missing_cut_and_foreign_parts_are_named(tmp_path):
    folder = write(tmp_path / "a", {"model/w": unique((4, 100), np.float32)})
    first, second = (folder / fmt.data_name(SAVE_ID, n) for n in (0, 1))
    first.unlink()
    with h5py.File(second, "r+", locking=False) as file:
        file["model/other"] = [1, 2]
    one, two = inspection.verify(folder)
    assert one == f"{first} is missing; in it: 'model/w'"
    assert "holds 'model/other', unknown to the index" in two
    os.truncate(second, 300)
    assert "cannot be read" in inspection.verify(folder)[1]
    (folder / "index.h5").unlink()
    (problem,) = inspection.verify(folder)
    assert "has no index.h5" in problem


def test_equal_checkpoints_of_other_layouts_do_not_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "SLAB_BYTES", 64)
    arrays = samples()
    one = write(tmp_path / "a", arrays)
    turned = dict(reversed(arrays.items()))
    two = write(tmp_path / "b", turned, save_id="f" * 16)
    found = inspection.diff(one, two)
    assert not found
    assert found.same == len(arrays)


def test_a_difference_is_named_with_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "SLAB_BYTES", 64)
    arrays = {
        "model/w": unique((5, 9), np.float32),
        "model/z": unique((3,), np.complex128),
        "model/n": np.array([np.nan, 1, 0.0]),
        "model/gone": unique((2,), np.int8),
        "model/shape": unique((2, 3), np.int8),
    }
    other = {name: array.copy() for name, array in arrays.items()}
    other["model/w"][4, 8] += 2
    other["model/w"][0, 1] -= 0.5
    other["model/z"][1] += 3 + 4j
    other["model/n"][2] = -0.0
    other["model/new"] = other.pop("model/gone")
    other["model/shape"] = other["model/shape"].T.astype(np.int16)
    one = write(tmp_path / "a", arrays, seed=1)
    two = write(tmp_path / "b", other, seed=2)
    found = inspection.diff(one, two)
    assert found
    assert found.only_first == ["model/gone"]
    assert found.only_second == ["model/new"]
    assert found.other == [
        "seed is 1 and 2",
        "'model/shape' is int8 (2, 3) and int16 (3, 2)",
    ]
    values = {v.name: (v.count, v.size, v.largest) for v in found.values}
    assert values == {
        "model/w": (2, 45, 2.0),
        "model/z": (1, 3, 5.0),
        "model/n": (1, 3, 0.0),
    }


def test_a_path_stands_for_a_runs_checkpoints_or_for_one(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        inspection.find(run)
    steps = [run / "checkpoints" / f"step-{n:08}" for n in (9, 10)]
    for step in steps:
        write(step, {"model/w": unique((2,), np.int8)})
    shutil.copytree(steps[0], tmp_path / "copy")
    assert inspection.find(run) == steps
    assert inspection.find(run / "checkpoints") == steps
    assert inspection.find(steps[0]) == steps[:1]
    assert inspection.find(tmp_path / "copy") == [tmp_path / "copy"]
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        inspection.find(tmp_path / "nowhere")
