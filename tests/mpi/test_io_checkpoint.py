from __future__ import annotations

import errno
import os
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest

import tparmpi as tpm
from tests.io_samples import unique
from tparmpi import Partial, Replicate, Shard
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint, publish, saving, writer

pytestmark = pytest.mark.mpi(min_size=4)

SHAPES = {
    "layers.0.w": ((7, 5), np.float32),
    "layers.0.b": ((5,), np.float64),
    "layers.1.heads": ((4, 6, 3), ml_dtypes.bfloat16),
    "scale": ((), np.float32),
    "empty": ((0, 3), np.float32),
    "short": ((2, 2), np.int64),
    "large": ((700, 300), np.float32),
    "mask": ((9,), np.bool_),
    "spectrum": ((3, 4), np.complex64),
}


class Bag:
    """The least that can be saved: named tensors."""

    def __init__(self, tensors, steps=0):
        self.tensors, self.steps = tensors, steps

    def state_dict(self):
        return self.tensors


def places():
    """The layouts that are saved from and loaded to, by name."""
    ranks = tpm.devices()
    mesh = tpm.mesh(ranks[:4], dp=2, tp=2)
    rows = {name: Shard(0) for name, (shape, _) in SHAPES.items() if shape}
    last = {n: Shard(len(s) - 1) for n, (s, _) in SHAPES.items() if s}
    both = {
        "layers.0.w": (Shard(0), Shard(1)),
        "layers.1.heads": (Shard(1), Shard(1)),
        "large": (Replicate(), Shard(1)),
        "short": (Shard(1), Replicate()),
    }
    return {
        "1": (tpm.group(ranks[:1]), {}),
        "2": (tpm.group(ranks[:2]), rows),
        "3": (tpm.group(ranks[:3]), last),
        "4": (tpm.group(ranks[:4]), rows),
        "reversed": (tpm.group([ranks[3], ranks[1]]), last),
        "replicated": (tpm.group(ranks[:4]), {}),
        "mesh": (mesh, both),
    }


def build(layout, start):
    """Tensors of position-unique values in a layout; shells on non-members."""
    place, shardings = layout
    tensors = {}
    for name, (shape, dtype) in SHAPES.items():
        tensor = tpm.tensor(unique(shape, dtype, start), place)
        if name in shardings:
            tensor = tensor.with_sharding(shardings[name], allow_empty=True)
        tensors[name] = tensor
    return Bag(tensors)


def same(found, expected):
    for name, tensor in expected.tensors.items():
        other = found.tensors[name]
        assert other.layout == tensor.layout
        if not tensor.is_shell:
            assert (
                np.asarray(other.local).tobytes() == np.asarray(tensor.local).tobytes()
            )


@pytest.fixture(scope="module")
def layouts():
    return places()


@pytest.fixture
def folder(tmp_path):
    """One folder that all ranks see."""
    everyone = tpm.world()
    shared = Path(everyone.broadcast_object(str(tmp_path)))
    yield shared / "checkpoints"
    everyone.barrier()


def entries(folder):
    """What rank 0 sees in a folder once all ranks are there."""
    everyone = tpm.world()
    everyone.barrier()
    return everyone.broadcast_object(sorted(path.name for path in folder.iterdir()))


def on_rank(rank, monkeypatch, target, name, error):
    """Make a function fail on one rank."""
    if tpm.world().rank == rank:

        def fail(*args, **keywords):
            raise error

        monkeypatch.setattr(target, name, fail)


@pytest.mark.parametrize(
    "source", ["1", "2", "3", "4", "reversed", "replicated", "mesh"]
)
def test_any_layout_loads_into_any_other(folder, layouts, source):
    path = checkpoint.step_path(folder, 12)
    saved = build(layouts[source], 1)
    assert checkpoint.save(path, saved, step=12, seed=3, position=48) == path
    if tpm.world().rank == 0:
        with h5py.File(path / "index.h5") as file:
            for name, (shape, dtype) in SHAPES.items():
                stored = file["model/" + name.replace(".", "/")]
                assert np.array_equal(stored[()], unique(shape, dtype, 1)), name
    for layout in layouts.values():
        loaded = build(layout, 0)
        report = checkpoint.load(path, loaded)
        same(loaded, build(layout, 1))
        assert len(report.applied) == len(SHAPES)
        assert (report.step, report.seed, report.position) == (12, 3, 48)
    assert entries(folder) == ["step-00000012"]


@pytest.mark.parametrize("background", [False, True])
def test_compressed_tensors_load_into_any_layout(folder, layouts, background):
    path = checkpoint.step_path(folder, 1)
    compression = {r"layers\.0\..*": None, r"large": 9, ".*": "gzip"}
    saver = checkpoint.BackgroundSaver() if background else checkpoint
    saver.save(path, build(layouts["mesh"], 1), compression=compression)
    if background:
        saver.close()
    if tpm.world().rank == 0:
        levels = {}
        for data in path.glob("data-*"):
            with h5py.File(data) as file:
                levels |= {
                    name: file[f"model/{name.replace('.', '/')}"].compression_opts
                    for name in SHAPES
                    if f"model/{name.replace('.', '/')}" in file
                }
        expected = dict.fromkeys(SHAPES, 4) | {"large": 9, "scale": None}
        expected |= {"layers.0.w": None, "layers.0.b": None}
        del expected["empty"]
        assert levels == expected
        with h5py.File(path / "index.h5") as file:
            for name, (shape, dtype) in SHAPES.items():
                stored = file["model/" + name.replace(".", "/")]
                assert np.array_equal(stored[()], unique(shape, dtype, 1)), name
        assert checkpoint.verify(path) == []
    for name in ("1", "3", "4", "reversed"):
        loaded = build(layouts[name], 0)
        checkpoint.load(path, loaded)
        same(loaded, build(layouts[name], 1))
    wrong = "lzf" if tpm.world().rank == 2 else "gzip"
    with pytest.raises(CheckpointError, match="compression must be 'gzip'"):
        checkpoint.save(path, build(layouts["3"], 2), compression=wrong)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        (r"layers\.0\.weight", "layers.0.w"),
        (r".*\.[mv]", "layers.0.w"),
        ("larg", "large"),
        (r"model/large", "large"),
    ],
)
def test_a_pattern_that_matches_no_tensor_is_refused(
    folder, layouts, background, pattern, near
):
    saver = checkpoint.BackgroundSaver() if background else checkpoint
    path = checkpoint.step_path(folder, 1)
    compression = {"large": 9, pattern: "gzip", ".*": None}
    with pytest.raises(CheckpointError) as caught:
        saver.save(path, build(layouts["mesh"], 1), compression=compression)
    (said,) = set(tpm.world().all_gather_object(str(caught.value)))
    assert f"{pattern!r}, which matches no tensor" in said
    assert f"(near: {near!r})" in said
    assert not folder.exists()


def test_replicas_share_the_writing(folder, layouts):
    path = checkpoint.step_path(folder, 1)
    checkpoint.save(path, build(layouts["replicated"], 1))
    assert len(entries(path)) == 5
    sizes = [file.stat().st_size for file in path.glob("data-*")]
    assert max(sizes) < 1.2 * sum(sizes) / 4


def test_the_optimizer_comes_back(folder, layouts):
    path = checkpoint.step_path(folder, 5)
    tensors = build(layouts["mesh"], 2).tensors
    moments = {f"{n}/{k}": t for n, t in tensors.items() for k in ("m", "v")}
    checkpoint.save(path, build(layouts["mesh"], 1), Bag(moments, 17), step=5)
    tensors = build(layouts["3"], 0).tensors
    fresh = {f"{n}/{k}": t.detach() for n, t in tensors.items() for k in ("m", "v")}
    model, optimizer = build(layouts["3"], 0), Bag(fresh)
    report = checkpoint.load(path, model, optimizer)
    assert optimizer.steps == 17
    assert len(report.applied) == 3 * len(SHAPES)
    same(model, build(layouts["3"], 1))
    expected = build(layouts["3"], 2).tensors
    for name, tensor in expected.items():
        same(Bag({name: optimizer.tensors[f"{name}/v"]}), Bag({name: tensor}))
    report = checkpoint.load(path, build(layouts["1"], 0))
    assert len(report.skipped) == 2 * len(SHAPES)


def test_extra_comes_back(folder, layouts):
    path = checkpoint.step_path(folder, 5)
    extra = {"run": [1, {"é": None}], "scale": 2.5}
    checkpoint.save(path, build(layouts["2"], 1), extra=extra)
    assert checkpoint.load(path, build(layouts["4"], 0)).extra == extra
    with pytest.raises(CheckpointError, match="extra must be plain JSON"):
        checkpoint.save(path, build(layouts["2"], 1), extra={"a": object()})
    with pytest.raises(CheckpointError, match="seed must be an integer of 64 bits"):
        checkpoint.save(path, build(layouts["2"], 1), seed=1 << 64)


FAULTS = {
    "disk full, rank 1 writes": (1, writer, "write_at", "No space left"),
    "sync fails, rank 2": (2, writer.os, "fsync", "No space left"),
    "index cannot be written": (0, saving, "write_index", "No space left"),
    "folder cannot be made": (0, Path, "mkdir", "No space left"),
    "index cannot be synced": (0, saving.fmt, "sync", "No space left"),
    "rename fails": (0, publish.os, "rename", "No space left"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_ranks_failure_is_raised_on_all_and_leaves_all_as_it_was(
    folder, layouts, monkeypatch, fault
):
    path = checkpoint.step_path(folder, 3)
    checkpoint.save(path, build(layouts["replicated"], 1), step=3)
    before = entries(path)
    rank, target, name, words = FAULTS[fault]
    full = OSError(errno.ENOSPC, "No space left on device")
    for again in (path, checkpoint.step_path(folder, 4)):
        with monkeypatch.context() as patch:
            on_rank(rank, patch, target, name, full)
            with pytest.raises(CheckpointError, match=words):
                checkpoint.save(again, build(layouts["replicated"], 2), step=4)
        assert entries(folder) == ["step-00000003"]
    assert entries(path) == before
    assert checkpoint.latest(folder) == path
    loaded = build(layouts["4"], 0)
    assert checkpoint.load(path, loaded).step == 3
    same(loaded, build(layouts["4"], 1))
    checkpoint.save(path, build(layouts["replicated"], 2), step=3)
    checkpoint.load(path, loaded)
    same(loaded, build(layouts["4"], 2))


def test_damage_that_one_rank_meets_is_raised_on_all_and_changes_nothing(
    folder, layouts
):
    path = checkpoint.step_path(folder, 3)
    checkpoint.save(path, build(layouts["4"], 1))
    everyone = tpm.world()
    if everyone.rank == 0:
        data = sorted(path.glob("data-*"))[3]
        with h5py.File(data) as file:
            offset = file["model/large"].id.get_offset()
        with data.open("r+b") as file:
            os.pwrite(file.fileno(), b"\xff" * 8, offset + 40)
    everyone.barrier()
    loaded = build(layouts["4"], 0)
    with pytest.raises(
        CheckpointError, match=r"-00003\.h5 .*checksum of 'model/large'"
    ):
        checkpoint.load(path, loaded)
    same(loaded, build(layouts["4"], 0))


def test_what_does_not_fit_is_listed_with_near_names_and_changes_nothing(
    folder, layouts
):
    path = checkpoint.step_path(folder, 3)
    checkpoint.save(path, build(layouts["2"], 1))
    place = layouts["4"][0]
    loaded = build(layouts["4"], 0)
    loaded.tensors["layers.0.weight"] = loaded.tensors.pop("layers.0.w")
    loaded.tensors["layers.0.b"] = tpm.tensor(unique((5,), np.float32, 0), place)
    loaded.tensors["large"] = tpm.tensor(unique((700, 299), np.float32, 0), place)
    del loaded.tensors["scale"]
    before = {name: np.array(t.local) for name, t in loaded.tensors.items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, loaded)
    text = str(caught.value)
    for words in (
        "lacks 'model/layers/0/weight' (near: 'model/layers/0/w')",
        "'model/layers/0/b' is float64 in the checkpoint and float32 here",
        "'model/large' has shape (700, 300) in the checkpoint and (700, 299) here",
        "the model has no place for",
        "'model/scale'",
    ):
        assert words in text
    for name, tensor in loaded.tensors.items():
        assert np.array_equal(np.asarray(tensor.local), before[name])
    report = checkpoint.load(path, loaded, strict=False)
    assert report.missing == ["model/layers/0/weight"]
    assert sorted(report.unused) == ["model/layers/0/w", "model/scale"]
    assert len(report.errors) == 2
    assert len(report.applied) == len(SHAPES) - 4
    assert np.array_equal(loaded.tensors["short"].numpy(), unique((2, 2), np.int64, 1))


def test_a_pending_sum_is_refused(folder, layouts):
    place = layouts["2"][0]
    array = np.ones((3, 2), np.float32)
    partial = tpm.from_local(array, place, Partial(), shape=(3, 2))
    with pytest.raises(CheckpointError, match=r"'model/w' is a pending sum"):
        checkpoint.save(folder / "step-00000001", Bag({"w": partial}))
    with pytest.raises(CheckpointError, match=r"'model/w' is a pending sum"):
        checkpoint.load(folder / "step-00000001", Bag({"w": partial}))


def test_ranks_that_disagree_are_named(folder, layouts):
    own = build(layouts["4"], 1)
    if tpm.world().rank == 2:
        del own.tensors["scale"]
    with pytest.raises(CheckpointError, match="save: rank 2 has other tensors"):
        checkpoint.save(folder / "step-00000001", own)
    checkpoint.save(folder / "step-00000001", build(layouts["4"], 1))
    with pytest.raises(CheckpointError, match="load: rank 2 has other tensors"):
        checkpoint.load(folder / "step-00000001", own)


def test_each_rank_may_load_a_model_of_its_own(folder, layouts):
    checkpoint.save(folder / "step-00000001", build(layouts["mesh"], 1))
    alone = tpm.group([tpm.device()]), {}
    loaded = build(alone, 0)
    checkpoint.load(folder / "step-00000001", loaded)
    same(loaded, build(alone, 1))


def test_latest_and_prune_see_published_checkpoints_only(folder, layouts):
    assert checkpoint.latest(folder) is None
    for step in (5, 100_000_000, 20):
        path = checkpoint.step_path(folder, step)
        checkpoint.save(path, build(layouts["3"], 1), step=step)
    everyone = tpm.world()
    if everyone.rank == 0:
        (folder / "step-00000300").mkdir()
        (folder / "step-00000400.0123456789abcdef.tmp").mkdir()
        (folder / "notes").write_text("mine")
    everyone.barrier()
    names = [path.name for path in checkpoint.checkpoints(folder)]
    assert names == ["step-00000005", "step-00000020", "step-100000000"]
    assert checkpoint.latest(folder) == folder / "step-100000000"
    assert checkpoint.prune(folder, 2) == [folder / "step-00000005"]
    assert checkpoint.prune(folder, 2) == []
    with pytest.raises(CheckpointError, match="at least 1 checkpoint"):
        checkpoint.prune(folder, 0)
    checkpoint.save(folder / "step-00000300", build(layouts["3"], 1), step=300)
    assert entries(folder) == [
        "notes",
        "step-00000020",
        "step-00000300",
        "step-100000000",
    ]


def test_a_checkpoint_left_aside_is_found_and_taken_back(folder, layouts):
    path = checkpoint.step_path(folder, 8)
    checkpoint.save(path, build(layouts["2"], 1), step=8)
    aside = path.with_name("step-00000008.0123456789abcdef.aside")
    if tpm.world().rank == 0:
        path.rename(aside)
    tpm.world().barrier()
    assert checkpoint.latest(folder) == aside
    loaded = build(layouts["3"], 0)
    assert checkpoint.load(aside, loaded).step == 8
    same(loaded, build(layouts["3"], 1))
    checkpoint.save(checkpoint.step_path(folder, 9), build(layouts["2"], 2), step=9)
    assert entries(folder) == ["step-00000008", "step-00000009"]


def test_a_missing_checkpoint_is_named_on_all_ranks(folder, layouts):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint folder .*-7"):
        checkpoint.load(folder / "step-7", build(layouts["3"], 0))


def test_a_name_taken_by_a_file_is_refused(folder, layouts):
    if tpm.world().rank == 0:
        folder.mkdir(parents=True)
        (folder / "step-00000001").write_text("mine")
    tpm.world().barrier()
    with pytest.raises(CheckpointError, match="exists and is not a folder"):
        checkpoint.save(folder / "step-00000001", build(layouts["1"], 0))
    assert entries(folder) == ["step-00000001"]


def test_the_parent_of_the_steps_is_refused_on_all_ranks_and_left_alone(
    folder, layouts
):
    for step in (1, 2):
        path = checkpoint.step_path(folder, step)
        checkpoint.save(path, build(layouts["4"], step), step=step)
    inside = entries(path)
    with pytest.raises(CheckpointError, match=r"exists and is not .* 'step-00000001'"):
        checkpoint.save(folder, build(layouts["4"], 9))
    assert entries(folder.parent) == [folder.name]
    assert entries(folder) == ["step-00000001", "step-00000002"]
    assert entries(path) == inside
    loaded = build(layouts["4"], 0)
    checkpoint.load(path, loaded)
    same(loaded, build(layouts["4"], 2))


def test_an_argument_that_one_rank_has_wrong_is_refused_on_all(folder, layouts):
    model = build(layouts["4"], 1)
    wrong = tpm.world().rank == 2
    path = folder / "step-00000001"
    with pytest.raises(CheckpointError, match=r"step must be an integer .* 5\.5"):
        checkpoint.save(path, model, step=5.5 if wrong else 5)
    with pytest.raises(CheckpointError, match="names no folder of its own"):
        checkpoint.save("" if wrong else path, model)
    with pytest.raises(CheckpointError, match="must be a text or a Path"):
        checkpoint.load(None if wrong else path, model)
    if wrong:
        model.tensors["\udcff"] = model.tensors["scale"]
    with pytest.raises(CheckpointError, match="cannot be saved under that name"):
        checkpoint.save(path, model)
    with pytest.raises(CheckpointError, match="cannot be saved under that name"):
        checkpoint.load(path, model)
    tpm.world().barrier()
    assert not folder.exists()
