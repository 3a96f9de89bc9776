"""Random words, and blocks of them, against NumPy's own Philox stream."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from shutil import which

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tparmpi import backend
from tparmpi.backend import random
from tparmpi.backend.cupy_backend import PHILOX_SOURCE

KEYS = [(0, 0), (1, 2), (2**64 - 1, 0x9E3779B97F4A7C15), (123456789, 2**63)]
CPU = backend.get("cpu")


def numpy_stream(key, count):
    stream = np.random.Philox(key=np.array(key, np.uint64), counter=0)
    return stream.random_raw(count)


@pytest.mark.parametrize("key", KEYS)
def test_words_are_those_of_numpy_at_any_offset(key):
    whole = numpy_stream(key, 300)
    for first, count in itertools.product((0, 1, 2, 3, 4, 5, 127), (0, 1, 2, 5, 64)):
        words = CPU.random_words(key, first, count)
        assert words.dtype == np.uint64
        assert np.array_equal(words, whole[first : first + count])


def test_words_far_along_the_stream():
    key, first = (5, 6), 4 * 10**12 + 3
    stream = np.random.Philox(key=np.array(key, np.uint64), counter=0)
    stream.advance(first // 4)
    assert np.array_equal(
        CPU.random_words(key, first, 9), stream.random_raw(12)[first % 4 :]
    )


@st.composite
def blocks(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    extent = tuple(
        draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)
    )
    return shape, start, extent


@given(block=blocks(), slab=st.integers(1, 50), jump=st.integers(0, 50))
def test_a_block_is_that_part_of_the_whole(block, slab, jump):
    shape, start, extent = block
    whole = numpy_stream((3, 4), int(np.prod(shape))).reshape(shape)
    inside = tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "SLAB_WORDS", slab)
        patch.setattr(random, "JUMP_WORDS", jump)
        drawn = CPU.random_block((3, 4), shape, start, extent)
    assert drawn.shape == extent
    assert np.array_equal(drawn, whole[inside])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_any_split_gives_the_same_numbers(dim, members):
    key, shape = (7, 8), (6, 10, 700)
    draws = {
        "uniform": lambda *b: CPU.random_uniform(key, *b, np.float64),
        "normal": lambda *b: CPU.random_normal(key, *b, np.float32),
        "keep": lambda *b: CPU.random_keep(key, *b, 0.3),
    }
    pieces = np.array_split(np.arange(shape[dim]), members)
    for draw in draws.values():
        whole = draw(shape, (0, 0, 0), shape)
        parts = []
        for piece in pieces:
            start, extent = [0, 0, 0], list(shape)
            start[dim], extent[dim] = int(piece[0]), piece.size
            parts.append(draw(shape, tuple(start), tuple(extent)))
        assert np.array_equal(np.concatenate(parts, axis=dim), whole)


def test_a_large_draw_takes_bounded_memory():
    asked = []

    class Recorder(type(CPU)):
        def random_words(self, key, first, count):
            asked.append(count)
            return super().random_words(key, first, count)

    shape = (2000, 1500)
    drawn = Recorder().random_block((1, 1), shape, (100, 3), (1800, 500))
    assert max(asked) <= random.SLAB_WORDS
    assert np.array_equal(
        drawn, numpy_stream((1, 1), 3_000_000).reshape(shape)[100:1900, 3:503]
    )


def test_distributions():
    count = 1 << 18
    block = ((count,), (0,), (count,))
    uniform = CPU.random_uniform((1, 2), *block, np.float64)
    assert 0.0 < uniform.min() < uniform.max() < 1.0
    # Five standard errors each.
    assert abs(uniform.mean() - 0.5) < 5 * np.sqrt(1 / 12 / count)
    normal = CPU.random_normal((1, 2), *block, np.float64)
    assert abs(normal.mean()) < 5 / np.sqrt(count)
    assert abs(normal.var() - 1.0) < 5 * np.sqrt(2 / count)
    assert normal.dtype == np.float64
    keep = CPU.random_keep((1, 2), *block, 0.25)
    assert keep.dtype == np.bool_
    assert abs(keep.mean() - 0.75) < 5 * np.sqrt(0.1875 / count)


def test_no_word_gives_an_infinite_normal():
    extremes = np.array([0, 2**64 - 1, 2**63, 2**53 - 1], np.uint64)
    uniform = random._unit(extremes)
    assert np.all((uniform > 0.0) & (uniform < 1.0))
    assert uniform[0] == 1.0 - uniform[1]
    assert np.isfinite(CPU._normal_quantile(uniform)).all()


def test_keep_compares_integers():
    words = numpy_stream((9, 9), 1000)
    expected = (words >> np.uint64(32)) >= np.uint64(round(0.1 * 2**32))
    assert np.array_equal(
        CPU.random_keep((9, 9), (1000,), (0,), (1000,), 0.1), expected
    )
    assert CPU.random_keep((9, 9), (1000,), (0,), (1000,), 0.0).all()
    assert not CPU.random_keep((9, 9), (1000,), (0,), (1000,), 1.0).any()


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_probability_is_a_probability(p):
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\]"):
        CPU.random_keep((1, 1), (4,), (0,), (4,), p)


@pytest.mark.parametrize(
    ("start", "extent"),
    [((0, 3), (2, 3)), ((-1, 0), (1, 1)), ((0, 0), (-1, 2)), ((0,), (2,))],
)
def test_a_block_lies_inside_its_array(start, extent):
    with pytest.raises(ValueError, match=r"not inside an array of shape \(4, 5\)"):
        CPU.random_block((1, 1), (4, 5), start, extent)


@pytest.mark.skipif(which("cc") is None, reason="needs a C compiler, cc")
def test_the_device_kernel_draws_the_same_words(tmp_path):
    source = tmp_path / "philox.c"
    source.write_text(
        "#include <stdint.h>\n"
        "static unsigned long long __umul64hi(uint64_t a, uint64_t b)\n"
        "{ return (unsigned long long)(((unsigned __int128)a * b) >> 64); }\n"
        "uint64_t draw(uint64_t key0, uint64_t key1, uint64_t first, int64_t i)\n"
        f"{{ uint64_t out; {PHILOX_SOURCE} return out; }}\n"
    )
    library = tmp_path / "philox.so"
    command = ["cc", "-std=c99", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    draw = ctypes.CDLL(str(library)).draw
    draw.restype = ctypes.c_uint64
    draw.argtypes = [ctypes.c_uint64] * 3 + [ctypes.c_int64]
    for key, first in itertools.product(KEYS, (0, 1, 6, 2**34 + 3)):
        words = [draw(*key, first, i) for i in range(11)]
        assert np.array_equal(
            np.array(words, np.uint64), CPU.random_words(key, first, 11)
        )


def philox_by_hand(key, word):
    mask = 2**64 - 1
    counter, keys = [word // 4 + 1, 0, 0, 0], list(key)
    for _ in range(10):
        product0 = 0xD2E7470EE14C6C93 * counter[0]
        product1 = 0xCA5A826395121157 * counter[2]
        counter = [
            (product1 >> 64) ^ counter[1] ^ keys[0],
            product1 & mask,
            (product0 >> 64) ^ counter[3] ^ keys[1],
            product0 & mask,
        ]
        keys[0] = (keys[0] + 0x9E3779B97F4A7C15) & mask
        keys[1] = (keys[1] + 0xBB67AE8584CAA73B) & mask
    return counter[word % 4]


@pytest.mark.parametrize("key", KEYS)
def test_the_words_are_philox_with_a_counter_from_one(key):
    words = [philox_by_hand(key, i) for i in range(9)]
    assert np.array_equal(np.array(words, np.uint64), CPU.random_words(key, 0, 9))
