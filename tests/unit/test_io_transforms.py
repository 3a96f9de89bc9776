"""Renamed, split, merged and turned tensors, read part by part."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from tests.io_samples import unique
from tparmpi.errors import CheckpointError
from tparmpi.io.planner import Box
from tparmpi.io.transforms import (
    Interleave,
    Merge,
    Split,
    Transpose,
    Unflatten,
    arrange,
)
from tparmpi.io.views import Cast, Stored, castable


class Memory:
    """Reads parts of arrays, and counts the elements."""

    def __init__(self, arrays):
        self.arrays, self.count = arrays, 0

    def read(self, name, box):
        self.count += box.size
        return self.arrays[name][box.slices()].copy()


def stored(arrays):
    return {n: Stored(n, a.shape, a.dtype.name) for n, a in arrays.items()}


def check(arrays, transforms, remap, expected):
    """Each tensor, whole and in random parts, is the expected one."""
    views = arrange(stored(arrays), transforms, remap)
    assert views.keys() == expected.keys()
    reader, draw = Memory(arrays), np.random.default_rng(3)
    for name, array in expected.items():
        view = views[name]
        assert (view.shape, view.dtype) == (array.shape, array.dtype.name)
        boxes = [Box((0,) * array.ndim, array.shape)]
        for _ in range(20):
            low = [int(draw.integers(0, n)) for n in array.shape]
            size = [
                int(draw.integers(1, n - o + 1))
                for n, o in zip(array.shape, low, strict=True)
            ]
            boxes.append(Box(tuple(low), tuple(size)))
        for box in boxes:
            found = view.read(reader, box)
            assert np.array_equal(found, array[box.slices()]), (name, box)


def test_split_into_equal_parts_and_into_sizes():
    fused = unique((12, 5), np.float32)
    wide = unique((3, 10), np.float32, 7)
    check(
        {"model/h/0/qkv": fused, "model/h/1/up": wide, "model/norm": wide[0]},
        [
            Split(r"h\.(\d+)\.qkv", [rf"h.\1.{k}" for k in "qkv"]),
            Split(r"(.*)\.up", (r"\1.a", r"\1.b"), dim=-1, sizes=(3, 7)),
        ],
        [],
        {
            "model/h/0/q": fused[:4],
            "model/h/0/k": fused[4:8],
            "model/h/0/v": fused[8:],
            "model/h/1/a": wide[:, :3],
            "model/h/1/b": wide[:, 3:],
            "model/norm": wide[0],
        },
    )


def test_split_where_each_head_has_its_own_parts():
    fused = unique((4 * 3 * 2, 5), np.float32)
    parts = fused.reshape(4, 3, 2, 5)
    check(
        {"model/qkv": fused},
        [Split("qkv", "qkv", groups=4)],
        [],
        {f"model/{k}": parts[:, n].reshape(8, 5) for n, k in enumerate("qkv")},
    )


def test_merge_is_splits_inverse():
    fused = unique((5, 24), np.float32)
    parts = fused.reshape(5, 4, 3, 2)
    check(
        {f"model/h/0/{k}": parts[:, :, n].reshape(5, 8) for n, k in enumerate("qkv")},
        [Merge([rf"h\.(\d+)\.{k}" for k in "qkv"], r"b.\1.qkv", dim=1, groups=4)],
        [],
        {"model/b/0/qkv": fused},
    )
    uneven = unique((3, 5), np.float32), unique((4, 5), np.float32, 9)
    check(
        {"model/a": uneven[0], "model/b": uneven[1]},
        [Merge(["b", "a"], "ba")],
        [],
        {"model/ba": np.concatenate(uneven[::-1])},
    )


def test_transpose_and_interleave():
    array = unique((4, 6, 5), np.float32)
    heads = unique((3 * 8, 5), np.float32)
    pairs = heads.reshape(3, 2, 4, 5).transpose(0, 2, 1, 3).reshape(24, 5)
    check(
        {"model/a": array, "model/b": array, "model/q": heads, "model/p": pairs},
        [
            Transpose("a"),
            Transpose("b", (2, 0, 1)),
            Interleave("q", groups=3),
            Interleave("p", groups=3, parts=4),
        ],
        [],
        {
            "model/a": array.T,
            "model/b": array.transpose(2, 0, 1),
            "model/q": pairs,
            "model/p": heads,
        },
    )


def test_a_dim_becomes_several():
    array = unique((5, 24), np.float32)
    check(
        {"model/a": array, "model/b": array, "model/c": array},
        [
            Unflatten("a", -1, (4, 6)),
            Unflatten("b", 1, (2, 3, 4)),
            Unflatten("c", 0, (5, 1)),
        ],
        [],
        {
            "model/a": array.reshape(5, 4, 6),
            "model/b": array.reshape(5, 2, 3, 4),
            "model/c": array.reshape(5, 1, 24),
        },
    )


def test_remap_renames_the_optimizer_alike_and_may_compute():
    array = unique((2, 3), np.float32)
    check(
        {"model/h/2/w": array, "optimizer/h/2/w/m": array + 1},
        [],
        [
            (r"^h\.", "blocks."),
            (r"\.(\d+)\.", lambda match: f".{int(match[1]) - 1}."),
        ],
        {"model/blocks/1/w": array, "optimizer/blocks/1/w/m": array + 1},
    )


def test_a_part_reads_little_more_than_itself():
    fused = unique((4 * 3 * 8, 16), np.float32)
    reader = Memory({"model/qkv": fused})
    views = arrange(stored(reader.arrays), [Split("qkv", "qkv", groups=4)], [])
    views["model/k"].read(reader, Box((0, 0), (32, 16)))
    assert reader.count == 32 * 16
    reader.count = 0
    turned = arrange(stored(reader.arrays), [Interleave("qkv", groups=4)], [])
    turned["model/qkv"].read(reader, Box((24, 0), (24, 16)))
    assert reader.count == 24 * 16


@pytest.mark.parametrize(
    ("transforms", "remap", "words"),
    [
        ([], [("^[ab]$", "c")], "both be called 'c'"),
        ([], [("(", "c")], "no regular expression"),
        ([], [("a", r"\1")], "remap: "),
        ([], [("a", "a//b")], "no name that a tensor can have"),
        ([Split("(", ["x"])], [], "no regular expression"),
        ([Split("a", ["x", r"\1"])], [], "does not go with 'a'"),
        ([Split("a", ["x", "b"])], [], "both be called 'b'"),
        ([Split("a", ["x", "y", "z", "u", "v"])], [], "6 is not 5 equal parts"),
        ([Split("a", ["x", "y"], sizes=[1, 2])], [], "add up to 6"),
        ([Split("a", ["x", "y"], dim=2)], [], "whose shape is (6, 4)"),
        ([Split("a", ["x", "y"], groups=4)], [], "6 is not 4 equal parts"),
        ([Merge(["a", "b"], "ab")], [], "merged tensors differ in dim 0 alone"),
        ([Merge(["a", "no"], "ab")], [], "lacks the part that matches 'no'"),
        ([Merge(["[ab]", "no"], "ab")], [], "are both part 0"),
        ([Transpose("a", (0, 0))], [], "does not fit 'a'"),
        ([Interleave("a", groups=2, parts=2)], [], "3 is not 2 equal parts"),
        ([Unflatten("a", 0, (2, 4))], [], "product of its sizes must be 6"),
        ([Unflatten("a", 0, ())], [], "product of its sizes must be 6"),
        ([Transpose("nothing")], [], "matches no tensor"),
    ],
)
def test_what_does_not_fit_is_refused(transforms, remap, words):
    arrays = {"model/a": unique((6, 4), np.float32), "model/b": unique((6, 3), "f4")}
    with pytest.raises(CheckpointError, match=re.escape(words)):
        arrange(stored(arrays), transforms, remap)


def test_a_cast_keeps_to_the_range():
    values = np.array([1.5, np.inf, np.nan, 3e38], np.float32)
    reader = Memory({"a": values})
    view = Stored("a", (4,), "float32")
    found = Cast(view, "bfloat16", "a").read(reader, Box((0,), (3,)))
    assert found.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found, values[:3].astype(ml_dtypes.bfloat16), equal_nan=True)
    with pytest.raises(CheckpointError, match="'a' has values beyond the range of fl"):
        Cast(view, "float16", "a").read(reader, Box((0,), (4,)))


def test_which_dtypes_turn_into_which():
    yes = [("float64", "bfloat16"), ("float16", "float64"), ("int8", "int64")]
    yes += [("uint8", "int16"), ("complex128", "complex64"), ("bool", "bool")]
    no = [("int64", "int32"), ("float32", "int32"), ("int32", "float32")]
    no += [("bool", "int8"), ("complex64", "float32"), ("uint8", "int8")]
    assert [pair for pair in yes if not castable(*pair)] == []
    assert [pair for pair in no if castable(*pair)] == []
