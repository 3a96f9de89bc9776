"""Renames and transforms from a file, and `tparmpi ckpt import` with them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.io_samples import unique
from tparmpi.errors import CheckpointError
from tparmpi.io import checkpoint
from tparmpi.io.planner import Box
from tparmpi.io.sources import open_source, read_source
from tparmpi.io.transforms import (
    Drop,
    Interleave,
    Merge,
    Split,
    Transpose,
    Unflatten,
)

ROOT = Path(__file__).parents[2]

EVERY_KIND = r"""
remap = [['^h\.', 'blocks.'], ['\.ln$', '.norm']]

[[transforms]]
kind = "split"
pattern = '(h\.\d+)\.qkv'
targets = ['\1.q', '\1.k', '\1.v']
dim = -1
groups = 2
sizes = [1, 2, 1]

[[transforms]]
kind = "merge"
patterns = ['(h\.\d+)\.gate', '(h\.\d+)\.up']
target = '\1.fc'
groups = 3

[[transforms]]
kind = "transpose"
pattern = 'a'
axes = [1, 0]

[[transforms]]
kind = "transpose"
pattern = 'b'

[[transforms]]
kind = "unflatten"
pattern = 'c'
dim = 0
sizes = [2, 3]

[[transforms]]
kind = "interleave"
pattern = 'd'
groups = 2
parts = 4
dim = 1

[[transforms]]
kind = "drop"
pattern = '.*\.mask'
"""


def test_a_file_gives_every_kind_of_transform(tmp_path):
    path = tmp_path / "map.toml"
    path.write_text(EVERY_KIND)
    found = checkpoint.read_mapping(str(path))
    assert found.remap == [(r"^h\.", "blocks."), (r"\.ln$", ".norm")]
    names = [r"\1.q", r"\1.k", r"\1.v"]
    assert found.transforms == [
        Split(r"(h\.\d+)\.qkv", names, dim=-1, groups=2, sizes=[1, 2, 1]),
        Merge([r"(h\.\d+)\.gate", r"(h\.\d+)\.up"], r"\1.fc", groups=3),
        Transpose("a", [1, 0]),
        Transpose("b"),
        Unflatten("c", 0, [2, 3]),
        Interleave("d", groups=2, parts=4, dim=1),
        Drop(r".*\.mask"),
    ]
    path.write_text("")
    assert checkpoint.read_mapping(path) == checkpoint.WeightMapping([], [])


ONE = "[[transforms]]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("remap = 3", "remap must be a list of pairs"),
        ("remap = ['a', 'b']", "remap must be a list of pairs"),
        ("remap = [['a', 'b', 'c']]", "remap must be a list of pairs"),
        ("remap = [['a', 3]]", "remap must be a list of pairs"),
        ("renames = []", "has no key 'renames'"),
        ("remaps = []", "has no key 'remaps'; did you mean remap?"),
        ("transforms = 3", "transforms must be tables"),
        ("transforms = [3]", "transforms must be tables"),
        (ONE, "transform 1: kind must be one of split, merge, transpose"),
        (f"{ONE}kind = 'spilt'", "it is 'spilt'"),
        (f"{ONE}kind = ['split']", "kind must be one of"),
        (f"{ONE}kind = 'transpose'", "transform 1 (transpose): it needs pattern"),
        (f"{ONE}kind = 'drop'\npatern = 'a'", "did you mean pattern?"),
        (f"{ONE}kind = 'drop'\npattern = 3", "pattern must be a text, it is 3"),
        (f"{ONE}kind = 'split'\ntargets = 'a'", "targets must be a list of texts"),
        (f"{ONE}kind = 'split'\ndim = true", "dim must be a whole number, it is True"),
        (f"{ONE}kind = 'split'\nsizes = [1.5]", "sizes must be a list of whole"),
        ("remap = [", "cannot be read: "),
    ],
)
def test_what_a_file_has_wrong_is_told(tmp_path, text, words):
    path = tmp_path / "map.toml"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        checkpoint.read_mapping(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_none_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.read_mapping(tmp_path / "no.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read_mapping(tmp_path / "a.toml")


def gpt2():
    """Tensors with GPT-2's names, and GPT-2's widths that matter to the mapping."""
    width = 12 * 64
    return {
        "wte.weight": unique((5, width), np.float32, 1),
        "wpe.weight": unique((3, width), np.float32, 2),
        "h.0.ln_1.weight": unique((width,), np.float32, 3),
        "h.0.attn.bias": unique((1, 1, 3, 3), np.float32),
        "h.0.attn.c_attn.weight": unique((width, 3 * width), np.float32, 4),
        "h.0.attn.c_attn.bias": unique((3 * width,), np.float32, 5),
        "h.0.attn.c_proj.weight": unique((width, width), np.float32, 6),
        "h.0.attn.c_proj.bias": unique((width,), np.float32, 7),
        "h.0.mlp.c_fc.bias": unique((7,), np.float32, 8),
        "ln_f.bias": unique((width,), np.float32, 9),
    }


def expected():
    """The same as a GPT here names and shapes them."""
    stored = gpt2()
    width = 12 * 64
    fused = stored["h.0.attn.c_attn.weight"].reshape(width, 3, 12, 64)
    bias = stored["h.0.attn.c_attn.bias"].reshape(3, 12, 64)
    found = {f"blocks.0.attn.{k}.weight": fused[:, n] for n, k in enumerate("qkv")}
    found |= {f"blocks.0.attn.{k}.bias": bias[n] for n, k in enumerate("qkv")}
    out = stored["h.0.attn.c_proj.weight"].reshape(12, 64, width)
    return found | {
        "input.tokens.weight": stored["wte.weight"],
        "input.positions": stored["wpe.weight"],
        "blocks.0.attn_norm.gain": stored["h.0.ln_1.weight"],
        "blocks.0.attn.out.weight": out,
        "blocks.0.attn.out.bias": stored["h.0.attn.c_proj.bias"],
        "blocks.0.mlp.up.bias": stored["h.0.mlp.c_fc.bias"],
        "output.norm.bias": stored["ln_f.bias"],
    }


def write_sharded(folder, weights):
    """Three files with an index."""
    folder.mkdir()
    placed = {}
    for number in range(3):
        part = dict(sorted(weights.items())[number::3])
        name = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file(part, folder / name, {"format": "pt"})
        placed |= dict.fromkeys(part, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return index


def imported(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tparmpi", "ckpt", "import", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


GPT2 = ROOT / "docs" / "examples" / "gpt2.toml"


def is_gpt2(path):
    assert checkpoint.verify(path) == []
    found = read_source(path)
    wanted = {f"model/{n.replace('.', '/')}": array for n, array in expected().items()}
    assert found.tensors.keys() == wanted.keys()
    with open_source(path, found) as blocks:
        for name, array in wanted.items():
            read = blocks.read(name, Box((0,) * array.ndim, array.shape))
            assert read.shape == array.shape
            assert np.array_equal(read, array)


def test_the_command_takes_gpt2_in_several_files_with_the_mapping_shown(tmp_path):
    index = write_sharded(tmp_path / "a", gpt2())
    target = tmp_path / "b"
    done = imported(index.parent, target, "--mapping", GPT2, "--files=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{index.parent}: imported to {target}\n"
    is_gpt2(target)


@pytest.mark.parametrize("source", ["one file", "an index"])
def test_convert_takes_gpt2_with_the_mapping_shown(tmp_path, source):
    path = tmp_path / "model.safetensors"
    if source == "one file":
        save_file(gpt2(), path)
    else:
        path = write_sharded(tmp_path / "a", gpt2())
    mapping = checkpoint.read_mapping(GPT2)
    is_gpt2(
        checkpoint.convert(
            path,
            tmp_path / "b",
            transforms=mapping.transforms,
            remap=mapping.remap,
        )
    )


def test_the_command_says_what_a_mapping_has_wrong_and_leaves_nothing(tmp_path):
    source, target = tmp_path / "m.safetensors", tmp_path / "b"
    save_file({"a": unique((4, 3), np.float32)}, source)
    mapping = tmp_path / "map.toml"
    for text, words in (
        ("remap = 3", "remap must be a list of pairs"),
        (f"{ONE}kind = 'transpose'\npattern = 'c'", "matches no tensor"),
    ):
        mapping.write_text(text)
        refused = imported(source, target, "--mapping", mapping)
        assert refused.returncode == 1
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
        assert not target.exists()
    # What --remap renames has been through the mapping.
    mapping.write_text("remap = [['a', 'b.c']]")
    done = imported(source, target, "--mapping", mapping, "--remap", r"^b\.", "d.")
    assert done.returncode == 0, done.stderr
    assert list(checkpoint.inspect(target).tensors) == ["model/d/c"]
