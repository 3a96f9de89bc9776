"""What a save may replace and remove, and which arguments it refuses."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

import tparmpi as tpm
from tests.io_samples import SAVE_ID, unique, write
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint, publish, saving
from tparmpi.io import format as fmt
from tparmpi.io.index import read_index
from tparmpi.io.planner import Box
from tparmpi.io.reader import BlockReader


class Model:
    steps = 3

    def __init__(self, start=0, name="a.w"):
        values = start + np.arange(7, dtype=np.float32)
        self.tensors = {name: tpm.tensor(values, tpm.device())}

    def state_dict(self):
        return self.tensors


def tree(folder):
    """Every file below a folder with its bytes, every folder and link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[path] = os.readlink(path)
        else:
            found[path] = path.read_bytes() if path.is_file() else None
    return found


def saved(path, start=0):
    checkpoint.save(path, Model(start), step=1)
    return path


def value(path):
    model = Model(-1)
    checkpoint.load(path, model)
    return model.tensors["a.w"].numpy()[0]


def user_file(path):
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("years of work")


def folder_of_steps(path):
    saved(path / "step-00000001")
    saved(path / "step-00000002")


def checkpoint_with_notes(path):
    saved(path)
    (path / "notes.txt").write_text("the good one")


def checkpoint_with_folder(path):
    saved(path)
    (path / "plots").mkdir()


def another_programs_index(path):
    path.mkdir(parents=True)
    (path / "index.h5").write_bytes(b"\x89HDF\r\n\x1a\n of another program")


def index_is_a_link(path):
    saved(path)
    (path / "index.h5").rename(path.parent / "elsewhere.h5")
    (path / "index.h5").symlink_to(path.parent / "elsewhere.h5")


def link_to_user_files(path):
    user_file(path.parent / "mine")
    path.symlink_to("mine")


def link_to_nothing(path):
    path.parent.mkdir(parents=True)
    path.symlink_to("unmounted")


def link_to_an_empty_folder(path):
    (path.parent / "scratch").mkdir(parents=True)
    path.symlink_to("scratch")


def a_file(path):
    path.parent.mkdir(parents=True)
    path.write_text("mine")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (user_file, r"not a checkpoint alone: it holds 'thesis\.tex'"),
        (folder_of_steps, "not a checkpoint alone: it holds 'step-00000001'"),
        (checkpoint_with_notes, r"not a checkpoint alone: it holds 'notes\.txt'"),
        (checkpoint_with_folder, "not a checkpoint alone: it holds 'plots'"),
        (another_programs_index, r"it holds an index\.h5 of another kind"),
        (index_is_a_link, r"it holds 'index\.h5'"),
        (link_to_user_files, r"it holds 'thesis\.tex'"),
        (link_to_nothing, "is a link to nothing"),
        (link_to_an_empty_folder, "is a link to an empty folder"),
        (a_file, "is not a folder"),
    ],
)
def test_a_save_replaces_nothing_but_a_checkpoint(tmp_path, make, words):
    path = tmp_path / "runs" / "name"
    make(path)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=f"name exists and .*{words}.*; save to"):
        checkpoint.save(path, Model(9))
    assert tree(tmp_path) == before


def test_what_comes_to_lie_in_a_checkpoint_during_a_save_stays(tmp_path, monkeypatch):
    path = saved(tmp_path / "name", 5)
    write_index = saving.write_index

    def and_a_note(*args):
        write_index(*args)
        (path / "notes.txt").write_text("the good one")

    monkeypatch.setattr(saving, "write_index", and_a_note)
    with pytest.raises(CheckpointError, match=r"it holds 'notes\.txt'"):
        checkpoint.save(path, Model(9))
    assert os.listdir(tmp_path) == ["name"]
    assert value(path) == 5
    assert (path / "notes.txt").read_text() == "the good one"


def test_checkpoints_and_empty_folders_are_replaced(tmp_path):
    path = tmp_path / "name"
    path.mkdir()
    assert value(saved(path, 4)) == 4
    assert value(saved(path, 5)) == 5
    os.truncate(path / "index.h5", 10)
    assert value(saved(path, 6)) == 6
    (path / "index.h5").unlink()
    assert value(saved(path, 7)) == 7
    assert os.listdir(tmp_path) == ["name"]
    nothing = Model()
    nothing.tensors = {}
    checkpoint.save(path, nothing)
    assert os.listdir(path) == ["index.h5"]
    assert value(saved(path, 8)) == 8


def test_only_leftovers_of_saves_are_removed(tmp_path):
    mine = tmp_path / f"results.{SAVE_ID}.tmp"
    user_file(mine)
    user_file(tmp_path / f"step-00000001.{SAVE_ID}.aside")
    (tmp_path / f"a.{SAVE_ID}.tmp").write_text("a file")
    (tmp_path / f"b.{SAVE_ID}.tmp").symlink_to(mine)
    (tmp_path / "c.0123456789ABCDEF.tmp").mkdir()
    before = tree(tmp_path)
    half = tmp_path / f"step-00000002.{SAVE_ID}.tmp"
    half.mkdir()
    (half / fmt.data_name(SAVE_ID, 0)).write_bytes(b"half")
    (tmp_path / f"step-00000003.{SAVE_ID}.tmp").mkdir()
    path = saved(tmp_path / "step-00000004")
    for own in (*path.iterdir(), path):
        before[own] = own.read_bytes() if own.is_file() else None
    assert tree(tmp_path) == before


def test_a_checkpoint_aside_stays_while_no_other_has_its_name(tmp_path):
    path = saved(tmp_path / "step-00000001", 5)
    aside = path.rename(tmp_path / f"step-00000001.{SAVE_ID}.aside")
    user_file(path)
    saved(tmp_path / "step-00000002")
    assert checkpoint.checkpoints(tmp_path)[0] == aside
    assert value(aside) == 5
    assert (path / "thesis.tex").exists()


def test_a_link_to_a_checkpoint_is_replaced_and_what_it_leads_to_stays(tmp_path):
    archive = saved(tmp_path / "archive" / "old", 5)
    path = tmp_path / "run" / "step-00000001"
    path.parent.mkdir()
    path.symlink_to(archive)
    saved(path, 6)
    assert not path.is_symlink()
    assert (value(path), value(archive)) == (6, 5)
    assert os.listdir(path.parent) == [path.name]


def test_a_link_left_aside_is_taken_back_or_removed(tmp_path):
    archive = saved(tmp_path / "archive" / "old", 5)
    run = tmp_path / "run"
    run.mkdir()
    aside = run / f"step-00000001.{SAVE_ID}.aside"
    aside.symlink_to(archive)
    assert checkpoint.latest(run) == aside
    saved(run / "step-00000002")
    assert sorted(os.listdir(run)) == ["step-00000001", "step-00000002"]
    assert (run / "step-00000001").is_symlink()
    aside.symlink_to(archive)
    saved(run / "step-00000002")
    assert sorted(os.listdir(run)) == ["step-00000001", "step-00000002"]
    assert value(archive) == 5


def test_prune_unlinks_links_and_keeps_what_is_not_a_checkpoint_alone(tmp_path):
    archive = saved(tmp_path / "archive" / "old", 5)
    run = tmp_path / "run"
    paths = [checkpoint.step_path(run, step) for step in range(5)]
    for path in paths[1:]:
        saved(path)
    paths[0].symlink_to(archive)
    (paths[1] / "notes.txt").write_text("the good one")
    assert checkpoint.prune(run, 2) == [paths[0], paths[2]]
    assert checkpoint.prune(run, np.int32(2)) == []
    assert sorted(os.listdir(run)) == [paths[i].name for i in (1, 3, 4)]
    assert len(os.listdir(paths[1])) == 3
    assert value(archive) == 5
    for keep in (1.5, None, "2"):
        with pytest.raises(CheckpointError, match="keep must be an integer"):
            checkpoint.prune(run, keep)


@pytest.mark.parametrize("name", ["", ".", "./", "/", "..", "a/.."])
def test_a_path_that_names_no_folder_of_its_own_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="names no folder of its own; give"):
        checkpoint.save(name, Model())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [None, 5, b"a"])
def test_a_path_that_is_no_path_is_refused(path):
    with pytest.raises(CheckpointError, match="path must be a text or a Path"):
        checkpoint.save(path, Model())
    with pytest.raises(CheckpointError, match="path must be a text or a Path"):
        checkpoint.load(path, Model())


def test_paths_that_the_system_refuses_are_told_in_a_sentence(tmp_path):
    for name in ("a\0b", "a" * 250, "a" * 5000):
        with pytest.raises(CheckpointError, match="cannot save the checkpoint"):
            checkpoint.save(tmp_path / name, Model())
    assert os.listdir(tmp_path) == []
    assert value(saved(tmp_path / os.fsdecode(b"a\xff"), 3)) == 3


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16, int, np.array])
def test_integers_of_any_kind_are_taken(tmp_path, kind):
    path = checkpoint.step_path(tmp_path, kind(5))
    assert path.name == "step-00000005"
    numbers = {"step": kind(5), "seed": kind(6), "position": kind(7)}
    optimizer = Model(name="a.w/m")
    optimizer.steps = kind(8)
    checkpoint.save(path, Model(), optimizer, **numbers)
    header = read_index(path).header
    assert (header.step, header.seed, header.position) == (5, 6, 7)
    assert header.optimizer_steps == 8


@pytest.mark.parametrize(
    "number", [5.5, 5.0, np.float32(5), float("nan"), "5", [5], 1 << 64, 1j]
)
def test_what_is_no_integer_is_refused_at_once(tmp_path, number):
    optimizer = Model(name="a.w/m")
    for name in ("step", "seed", "position"):
        words = f"{name} must be an integer of 64 bits"
        with pytest.raises(CheckpointError, match=words):
            checkpoint.save(tmp_path / "a", Model(), **{name: number})
    optimizer.steps = number
    with pytest.raises(CheckpointError, match="steps must be an integer of 64 bits"):
        checkpoint.save(tmp_path / "a", Model(), optimizer)
    with pytest.raises(CheckpointError, match="step must be an integer from 0 to 9"):
        checkpoint.step_path(tmp_path, number)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", [None, -1])
def test_a_step_must_be_there(tmp_path, step):
    with pytest.raises(CheckpointError, match="step must be"):
        checkpoint.step_path(tmp_path, step)
    if step is None:
        with pytest.raises(CheckpointError, match="step must be"):
            checkpoint.save(tmp_path / "a", Model(), step=step)


def deep(count):
    value = []
    for _ in range(count):
        value = [value]
    return {"a": value}


@pytest.mark.parametrize("extra", [5, "text", [1], {"a": {1, 2}}, deep(100_000)])
def test_an_extra_that_json_cannot_hold_is_refused(tmp_path, extra):
    with pytest.raises(CheckpointError, match="extra must be plain JSON"):
        checkpoint.save(tmp_path / "a", Model(), extra=extra)


def test_an_extra_that_no_reader_would_take_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"extra has .* bytes as JSON"):
        checkpoint.save(tmp_path / "a", Model(), extra={"a": "x" * fmt.MAX_TEXT_BYTES})


@pytest.mark.parametrize("name", ["\udcff", "a.\ud800b", "", "a\0b"])
def test_a_name_that_no_file_can_hold_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be saved under that name"):
        checkpoint.save(tmp_path / "a", Model(name=name))
    with pytest.raises(CheckpointError, match="cannot be saved under that name"):
        checkpoint.load(tmp_path / "a", Model(name=name))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", [5, None, b"w", ("a", "b")])
def test_a_name_that_is_no_text_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="tensor's name must be a text"):
        checkpoint.save(tmp_path / "a", Model(name=name))


def test_a_name_too_deep_for_a_reader_is_refused(tmp_path):
    deepest = ".".join("a" * (fmt.MAX_DEPTH - 1))
    checkpoint.save(tmp_path / "a", Model(name=deepest))
    checkpoint.load(tmp_path / "a", Model(name=deepest))
    with pytest.raises(CheckpointError, match="has 64 parts"):
        checkpoint.save(tmp_path / "b", Model(name=f"{deepest}.a"))


def test_what_is_no_tensor_is_named(tmp_path):
    model = Model()
    model.tensors["b"] = np.zeros(3)
    with pytest.raises(CheckpointError, match="'model/b' is a ndarray; a checkpoint"):
        checkpoint.save(tmp_path / "a", model)


@pytest.mark.parametrize("name", sorted(fmt.DTYPES))
@pytest.mark.parametrize("shape", [(5, 3), ()])
def test_values_of_foreign_byte_order_are_stored_as_what_they_are(
    tmp_path, name, shape
):
    native = unique(shape, fmt.dtypes.dtype(name), start=3)
    foreign = native.byteswap().view(native.dtype.newbyteorder())
    folder = write(tmp_path / "a", {"model/w": foreign})
    with BlockReader(folder, read_index(folder)) as blocks:
        found = blocks.read("model/w", Box((0,) * len(shape), shape))
    assert found.dtype == native.dtype
    assert found.tobytes() == native.tobytes()


@pytest.mark.parametrize("dtype", [">f8", ">i4", ">c8", ">f2"])
def test_tensors_of_foreign_byte_order_come_back(tmp_path, dtype):
    values = np.arange(1, 7).astype(dtype)
    model = Model()
    model.tensors = {"w": tpm.tensor(values, tpm.device())}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path / "a", model)
    model.tensors = {"w": tpm.tensor(np.zeros_like(values), tpm.device())}
    checkpoint.load(tmp_path / "a", model)
    assert np.array_equal(model.tensors["w"].numpy(), values)


def test_a_removal_that_stops_early_leaves_no_checkpoint(tmp_path, monkeypatch):
    path = saved(tmp_path / "step-00000001")
    unlink = os.unlink
    monkeypatch.setattr(
        os, "unlink", lambda p: fail(p) if "data" in str(p) else unlink(p)
    )

    def fail(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    with pytest.raises(PermissionError):
        publish.withdraw(path)
    assert publish.published(tmp_path) == []
    monkeypatch.undo()
    saved(tmp_path / "step-00000002")
    assert os.listdir(tmp_path) == ["step-00000002"]
