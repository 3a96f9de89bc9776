"""Loading what other programs and other layouts wrote."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import tparmpi as tpm
from tests.gpt_samples import CONFIG
from tests.io_samples import unique
from tparmpi import Replicate, Shard, nn
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint
from tparmpi.models import GPT
from tparmpi.optim import AdamW
from tparmpi.parallel import LayerPlacement

pytestmark = pytest.mark.mpi(min_size=4)

FUSED = unique((4 * 3 * 5, 7), np.float32)
WEIGHTS = {
    "h.0.qkv": FUSED,
    "h.0.fc": unique((7, 9), np.float32, 2),
    "h.0.norm": unique((7,), ml_dtypes.bfloat16, 3),
    "h.2.q": unique((4 * 6, 3), np.float32, 4),
}
# What a model that names and splits them in its own way expects.
PARTS = FUSED.reshape(4, 3, 5, 7)
EXPECTED = {
    **{f"blocks.0.{k}": PARTS[:, n].reshape(20, 7) for n, k in enumerate("qkv")},
    "blocks.0.fc": WEIGHTS["h.0.fc"].T,
    "blocks.0.norm": WEIGHTS["h.0.norm"].astype(np.float32),
    "blocks.1.q": WEIGHTS["h.2.q"]
    .reshape(4, 2, 3, 3)
    .transpose(0, 2, 1, 3)
    .reshape(24, 3),
}
TRANSFORMS = [
    checkpoint.Split(r"h\.(\d+)\.qkv", [rf"h.\1.{k}" for k in "qkv"], groups=4),
    checkpoint.Transpose(r"h\.\d+\.fc"),
    checkpoint.Interleave(r"h\.2\.q", groups=4),
]
REMAP = [(r"^h\.2\.", "h.1."), (r"^h\.", "blocks.")]


class Bag:
    """The least that can be loaded into: named tensors."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors


def layouts():
    ranks = tpm.devices()
    mesh = tpm.mesh(ranks[:4], dp=2, tp=2)
    return [
        (tpm.group(ranks[:1]), lambda ndim: Replicate()),
        (tpm.group(ranks[:3]), lambda ndim: Shard(0)),
        (tpm.group(ranks[:4]), lambda ndim: Shard(ndim - 1)),
        (mesh, lambda ndim: (Shard(0), Shard(ndim - 1))),
    ]


def zeros(place, placement, kinds):
    return Bag(
        {
            name: tpm.tensor(np.zeros(a.shape, a.dtype), place).with_sharding(
                placement(a.ndim), allow_empty=True
            )
            for name, a in kinds.items()
        }
    )


def same(bag, expected):
    for name, array in expected.items():
        tensor = bag.tensors[name]
        if not tensor.is_shell:
            spec = tensor.spec
            at = tuple(
                slice(o, o + n)
                for o, n in zip(spec.local_offset, spec.local_shape, strict=True)
            )
            assert np.array_equal(np.asarray(tensor.local), array[at]), name


@pytest.fixture
def weights(shared_path):
    path = shared_path / "model.safetensors"
    if tpm.world().rank == 0:
        save_file(WEIGHTS, path)
    tpm.world().barrier()
    return path


def test_other_programs_weights_go_straight_to_any_layout(weights):
    for place, placement in layouts():
        model = zeros(place, placement, EXPECTED)
        report = checkpoint.load(
            weights, model, transforms=TRANSFORMS, remap=REMAP, dtype="cast"
        )
        same(model, EXPECTED)
        assert len(report.applied) == len(EXPECTED)


def test_what_does_not_fit_is_one_report_on_all_ranks(weights):
    place, placement = layouts()[1]
    model = zeros(place, placement, EXPECTED)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(weights, model, transforms=TRANSFORMS, remap=REMAP[1:])
    text = str(caught.value)
    assert "lacks 'model/blocks/1/q' (near: 'model/blocks/2/q')" in text
    assert (
        "'model/blocks/0/norm' is bfloat16 in the checkpoint and float32 here "
        "(dtype='cast' converts it)"
    ) in text
    assert len(set(tpm.world().all_gather_object(text))) == 1
    same(model, {name: np.zeros_like(a) for name, a in EXPECTED.items()})
    with pytest.raises(CheckpointError, match=r"both be called 'blocks\.0\.q'"):
        checkpoint.load(
            weights, model, transforms=TRANSFORMS, remap=[(r"^h\.\d", "blocks.0")]
        )
    remap = [("(", "")] if tpm.world().rank == 2 else []
    with pytest.raises(CheckpointError, match="no regular expression"):
        checkpoint.load(weights, model, remap=remap, strict=False)
    with pytest.raises(CheckpointError, match="dtype must be 'exact' or 'cast'"):
        checkpoint.load(weights, model, dtype="any")
    with pytest.raises(CheckpointError, match="only='\\(' is no regular expression"):
        checkpoint.load(weights, model, only="(")


def test_a_part_is_loaded_and_the_rest_left(shared_path):
    place, placement = layouts()[2]
    full = {n: unique((5, 3), np.float32, k) for k, n in enumerate(["a.w", "a.b", "c"])}
    saved = Bag({n: tpm.tensor(array, place) for n, array in full.items()})
    path = checkpoint.step_path(shared_path, 1)
    checkpoint.save(path, saved, step=1)
    model = zeros(place, placement, full | {"head": full["c"]})
    report = checkpoint.load(path, model, only=r"a\..*")
    assert report.applied == ["model/a/w", "model/a/b"]
    assert report.skipped == ["model/c"]
    assert report.missing == report.unused == []
    zero = np.zeros((5, 3), np.float32)
    same(model, {"a.w": full["a.w"], "a.b": full["a.b"], "c": zero, "head": zero})


def test_a_value_that_one_ranks_cast_cannot_hold_is_raised_on_all(shared_path):
    place, placement = layouts()[2]
    values = np.array([[1, 2, 3, 1e30]], np.float64)
    path = checkpoint.step_path(shared_path, 1)
    checkpoint.save(path, Bag({"w": tpm.tensor(values, place)}))
    model = zeros(place, placement, {"w": np.zeros((1, 4), np.float16)})
    with pytest.raises(CheckpointError, match="'model/w' has values beyond the range"):
        checkpoint.load(path, model, dtype="cast")
    model = zeros(place, placement, {"w": np.zeros((1, 4), np.float32)})
    checkpoint.load(path, model, dtype="cast")
    same(model, {"w": values.astype(np.float32)})


def test_no_rank_holds_the_whole_model(shared_path):
    path = shared_path / "model.safetensors"
    shape, names = (512, 4096), ["a", "b", "c", "d"]
    if tpm.world().rank == 0:
        save_file({n: np.ones(shape, np.float32) for n in names}, path)
    tpm.world().barrier()
    place = tpm.group(tpm.devices()[:4])
    kinds = {n: np.zeros(shape, np.float32) for n in names}
    model = zeros(place, lambda ndim: Shard(1), kinds)
    own = len(names) * int(np.prod(shape)) * 4 // 4
    tracemalloc.start()
    try:
        checkpoint.load(path, model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Its own blocks, one of them twice for a moment, and small things.
    assert peak < 1.5 * own
    same(model, {n: np.ones(shape, np.float32) for n in names})


def trained(where, seed):
    """A GPT and its optimizer, whose moments are multiples of the parameters."""
    model = GPT(CONFIG, where, dtype="float64").initialize(seed=seed)
    optimizer = AdamW(model.named_parameters())
    for name, parameter in model.named_parameters():
        for factor, moment in enumerate(optimizer.state[name].values(), 2):
            if not moment.is_shell:
                moment.write_local(np.asarray(parameter.local) * factor)
    optimizer.steps = seed
    return model, optimizer


def gpt_places():
    ranks = tpm.devices()
    one, other = (tpm.group(ranks[n : n + 1]) for n in (0, 1))
    stages = tpm.mesh(ranks[:4], pp=2, dp=1, tp=2).split("pp")
    replicas = tpm.mesh(ranks[:4], pp=2, dp=2, tp=1).split("pp")
    return {
        "one": one,
        "tp": tpm.mesh(ranks[:2], dp=1, tp=2),
        "dp": tpm.mesh(ranks[:2], dp=2, tp=1),
        "pp": LayerPlacement.even([one, other], CONFIG.n_layer),
        "pp x tp": LayerPlacement.even(stages, CONFIG.n_layer),
        "pp x dp": LayerPlacement.even(replicas, CONFIG.n_layer),
    }


def gpt2(model):
    """A GPT's values under the names and in the shapes of GPT-2."""
    names = {"input.tokens.weight": "wte.weight", "input.positions": "wpe.weight"}
    names |= {f"output.norm.{a}": f"ln_f.{b}" for a, b in NORM.items()}
    values = {name: p.numpy() for name, p in model.named_parameters()}
    found = {theirs: values[ours] for ours, theirs in names.items()}
    width = CONFIG.d_model
    for layer in range(CONFIG.n_layer):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        for a, b in NORM.items():
            found[f"{theirs}.ln_1.{b}"] = values[f"{ours}.attn_norm.{a}"]
            found[f"{theirs}.ln_2.{b}"] = values[f"{ours}.mlp_norm.{a}"]
        for kind in ("weight", "bias"):
            parts = [values[f"{ours}.attn.{part}.{kind}"] for part in "qkv"]
            flat = [p.reshape(*p.shape[:-2], width) for p in parts]
            found[f"{theirs}.attn.c_attn.{kind}"] = np.concatenate(flat, -1)
            found[f"{theirs}.mlp.c_fc.{kind}"] = values[f"{ours}.mlp.up.{kind}"]
            found[f"{theirs}.mlp.c_proj.{kind}"] = values[f"{ours}.mlp.down.{kind}"]
        out = values[f"{ours}.attn.out.weight"].reshape(width, width)
        found[f"{theirs}.attn.c_proj.weight"] = out
        found[f"{theirs}.attn.c_proj.bias"] = values[f"{ours}.attn.out.bias"]
        found[f"{theirs}.attn.bias"] = np.tri(3, dtype=np.float32)[None, None]
    return found


NORM = {"gain": "weight", "bias": "bias"}


def test_gpt2_loads_as_the_page_shows(shared_path):
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    program = next(part for part in page.split("```")[1::2] if "GPT2_NAMES" in part)
    made = {}
    exec(program.partition("\n")[2].partition("tpm.checkpoint.load")[0], made)
    path = shared_path / "model.safetensors"
    if tpm.world().rank == 0:
        own = GPT(CONFIG, tpm.group([tpm.device()]), dtype="float32")
        save_file(gpt2(own.initialize(seed=5)), path)
    tpm.world().barrier()
    for place in gpt_places().values():
        model = GPT(CONFIG, place, dtype="float64").initialize(seed=1)
        checkpoint.load(
            path,
            model,
            transforms=made["gpt2_transforms"](CONFIG.n_head, CONFIG.d_model),
            remap=made["GPT2_NAMES"],
            dtype="cast",
        )
        expected = GPT(CONFIG, place, dtype="float32").initialize(seed=5)
        for name, parameter in expected.named_parameters():
            if not parameter.is_shell:
                found = model.state_dict()[name].local
                assert np.array_equal(found, parameter.local.astype(np.float64)), name


@pytest.mark.parametrize("source", ["tp", "dp", "pp", "pp x tp", "pp x dp"])
def test_stages_load_under_other_layouts_and_back(shared_path, source):
    places = gpt_places()
    path = checkpoint.step_path(shared_path, 3)
    checkpoint.save(path, *trained(places[source], 7), step=3)
    if tpm.world().rank == 0:
        # The tied table is there once, whichever ranks hold it.
        names = checkpoint.inspect(path).tensors
        assert "model/input/tokens/weight" in names
        assert "model/output/weight" not in names
        assert checkpoint.verify(path) == []
    for place in places.values():
        model, optimizer = trained(place, 1)
        report = checkpoint.load(path, model, optimizer)
        assert len(report.applied) == 3 * len(model.state_dict())
        assert optimizer.steps == 7
        for found, expected in zip((model, optimizer), trained(place, 7), strict=True):
            others = found.state_dict()
            for name, tensor in expected.state_dict().items():
                assert others[name].is_shell == tensor.is_shell
                if not tensor.is_shell:
                    assert np.array_equal(others[name].local, tensor.local), name


def test_a_model_that_has_no_values_yet_is_loaded(shared_path):
    place = tpm.group(tpm.devices()[:3])
    path = checkpoint.step_path(shared_path, 1)
    saved = nn.Linear(7, 5, place, split="columns").initialize(seed=4)
    checkpoint.save(path, saved)
    fresh = nn.Linear(7, 5, place, split="columns")
    checkpoint.load(path, fresh)
    for name, tensor in saved.state_dict().items():
        found = fresh.state_dict()[name]
        assert tensor.is_shell or np.array_equal(found.local, tensor.local)
