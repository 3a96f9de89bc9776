"""Attention kernels: gradients by finite differences, NumPy's against the plain."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.test_backend_kernels import (
    CPU,
    IMPLEMENTATIONS,
    PLAIN,
    Case,
    agree_with_the_plain,
    close,
    finite_difference,
    gradients,
    normal,
    strided,
)
from tparmpi.backend import attention, numpy_attention

SCALE = 0.6
FULL = (None, None)


def attention_case(
    band, batch, queries, keys, heads, size, value_size=None, group=1, bias=None
):
    def forward(b, q, k, v, *biases):
        return b.attention(q, k, v, SCALE, band, *biases)

    def backward(b, grad, q, k, v, *biases):
        y, saved = forward(b, q, k, v, *biases)
        known = biases or (None,)
        wanted = (True, True, True, bool(biases))
        slopes = b.attention_backward(
            q, k, v, saved, y, grad, SCALE, band, *known, wanted
        )
        return slopes[: 3 + len(biases)]

    return Case(
        lambda b, *arrays: forward(b, *arrays)[0],
        backward,
        normal(batch, queries, heads * group, size, seed=1),
        normal(batch, keys, heads, size, seed=2),
        normal(batch, keys, heads, value_size or size, seed=3),
        *([] if bias is None else [normal(*bias, seed=4)]),
    )


SMALL = {
    "full": attention_case(FULL, 2, 3, 5, 2, 4, 3),
    "causal": attention_case((None, 0), 2, 4, 4, 3, 2),
    "keys before": attention_case((None, 2), 1, 3, 5, 2, 4),
    "one query": attention_case((None, 5), 2, 1, 6, 2, 3),
    "window": attention_case((-1, 0), 1, 6, 6, 2, 3),
    "both sides": attention_case((-1, 1), 1, 6, 4, 2, 3),
    "some see nothing": attention_case((None, -2), 1, 5, 4, 2, 3),
    "none sees anything": attention_case((None, -5), 1, 5, 4, 2, 3),
    "groups": attention_case((None, 1), 2, 3, 4, 2, 2, group=3),
    "bias": attention_case(FULL, 2, 3, 4, 2, 2, bias=(2, 2, 3, 4)),
    "one bias": attention_case((None, 1), 2, 3, 4, 1, 2, group=2, bias=(1, 2, 1, 4)),
    "bias of rows": attention_case(FULL, 2, 3, 4, 1, 2, bias=(2, 1, 3, 1)),
}
LARGE = {
    "full": attention_case(FULL, 2, 150, 75, 3, 8),
    "causal": attention_case((None, 5), 12, 70, 75, 3, 16),
    "many heads": attention_case(FULL, 2, 130, 1030, 3, 4),
    "window": attention_case((-40, 0), 2, 300, 300, 2, 8),
    "window of the past": attention_case((-300, -100), 2, 300, 300, 2, 8),
    "groups": attention_case((None, 0), 2, 260, 260, 2, 8, group=4),
    "large groups": attention_case(FULL, 1, 150, 900, 2, 8, group=3),
    "bias": attention_case((-90, 0), 2, 200, 200, 2, 8, bias=(1, 2, 200, 200)),
    "ahead": attention_case((3, None), 2, 200, 150, 2, 8),
}
EMPTY = {
    "no batch": attention_case((None, 0), 0, 4, 4, 2, 3),
    "no heads": attention_case((None, 0), 2, 4, 4, 0, 3),
    "no queries": attention_case((None, 0), 2, 0, 4, 2, 3),
    "no keys": attention_case(FULL, 2, 3, 0, 2, 3),
    "no values": attention_case(FULL, 2, 3, 4, 2, 3, 0),
    "no size": attention_case(FULL, 2, 3, 4, 2, 0, 3),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_those_of_finite_differences(name, implementation):
    case, kernel_set = SMALL[name], IMPLEMENTATIONS[implementation]
    arrays = [a.copy() for a in case.arrays]
    y, slopes = gradients(kernel_set, case, arrays=arrays)
    grad = np.cos(np.arange(y.size)).reshape(y.shape)
    for array, slope in zip(arrays, slopes, strict=True):
        by_steps = finite_difference(
            lambda: case.forward(kernel_set, *arrays), array, grad
        )
        # A central difference with this step is good to about 1e-9.
        close(slope, by_steps, 1e-7)


@pytest.mark.parametrize("kept_bytes", [0, numpy_attention.KEPT_BYTES])
@pytest.mark.parametrize("tile", [64, numpy_attention.TILE])
@pytest.mark.parametrize("name", [*SMALL, *LARGE, *EMPTY])
def test_numpy_agrees_with_the_plain_kernels(name, tile, kept_bytes, monkeypatch):
    case = {**EMPTY, **SMALL, **LARGE}[name]
    monkeypatch.setattr(numpy_attention, "TILE", tile)
    monkeypatch.setattr(numpy_attention, "KEPT_BYTES", kept_bytes)
    numpy_attention._tiling.cache_clear()
    agree_with_the_plain(case, np.float64, 1e-12)
    agree_with_the_plain(case, np.float32, 2e-5)
    numpy_attention._tiling.cache_clear()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_band_and_a_bias_hide_keys(implementation):
    kernel_set = IMPLEMENTATIONS[implementation]
    q, k, v = LARGE["window"].arrays
    by_band, _ = kernel_set.attention(q, k, v, SCALE, (-40, 0))
    distance = np.arange(300) - np.arange(300)[:, None]
    seen = (distance >= -40) & (distance <= 0)
    bias = np.where(seen, 0.0, -np.inf)[None, None]
    by_bias, _ = kernel_set.attention(q, k, v, SCALE, FULL, bias)
    close(by_bias, by_band, 1e-13)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_over_parts_of_the_keys_is_joined(implementation):
    kernel_set = IMPLEMENTATIONS[implementation]
    q, k, v = (100 * a for a in LARGE["causal"].arrays)
    whole, _ = kernel_set.attention(q, k, v, SCALE, (None, 5))
    made = None
    for first, stop in ((40, 75), (0, 0), (0, 30), (30, 40)):
        part = slice(first, stop)
        band = (None, 5 - first)
        right = kernel_set.attention(q, k[:, part], v[:, part], SCALE, band)
        made = right if made is None else attention.join(np, made, right)
    close(made[0], whole, 1e-12)


@pytest.mark.parametrize("factor", [1, 300])
@pytest.mark.parametrize("band", [FULL, (None, 0)])
def test_heads_and_batch_rows_do_not_depend_on_each_other(band, factor):
    q, k, v, grad = (normal(5, 70, 6, 8, seed=s).astype(np.float32) for s in range(4))
    q[3, :, 2] *= factor
    y, saved = CPU.attention(q, k, v, 0.3, band)
    whole = (y, *CPU.attention_backward(q, k, v, saved, y, grad, 0.3, band)[:3])
    for b in (slice(0, 2), slice(2, 5)):
        for h in (slice(0, 1), slice(1, 6)):
            part = [a[b, :, h] for a in (q, k, v, grad)]
            y, saved = CPU.attention(*part[:3], 0.3, band)
            slopes = CPU.attention_backward(*part[:3], saved, y, part[3], 0.3, band)
            for got, expected in zip((y, *slopes[:3]), whole, strict=True):
                assert np.array_equal(got, expected[b, :, h])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_wanted_gradients_are_returned(implementation):
    kernel_set = IMPLEMENTATIONS[implementation]
    q, k, v, bias = SMALL["bias"].arrays
    y, saved = kernel_set.attention(q, k, v, SCALE, FULL, bias)
    given = (q, k, v, saved, y, y, SCALE, FULL, bias)
    whole = kernel_set.attention_backward(*given, (True,) * 4)
    for number in range(16):
        wanted = tuple(bool(number >> i & 1) for i in range(4))
        some = kernel_set.attention_backward(*given, wanted)
        for is_wanted, got, expected in zip(wanted, some, whole, strict=True):
            assert (got is not None) == is_wanted
            if is_wanted:
                assert np.array_equal(got, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_refuses_what_does_not_fit(implementation):
    q, k = normal(2, 4, 3, 5), normal(2, 4, 2, 5)
    with pytest.raises(ValueError, match=r"\(2, 4, 3, 5\), \(2, 4, 2, 5\)"):
        IMPLEMENTATIONS[implementation].attention(q, k, k, 1.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation):
    q = np.full((1, 2, 1, 1), 300.0, np.float32)
    v = np.array([1.0, 3.0], np.float32).reshape(1, 2, 1, 1)
    y, _ = IMPLEMENTATIONS[implementation].attention(q, q, v, 1.0)
    np.testing.assert_array_equal(y.ravel(), [2.0, 2.0])


@pytest.mark.parametrize("factor", [40, 400, -400])
def test_rows_of_large_scores_stand_beside_others(factor):
    case = attention_case((None, 0), 2, 90, 90, 3, 8)
    q, k, _ = case.arrays
    # The first key, which all see, has the smallest score of some and the largest of
    # others; every third row of queries has small ones.
    k[:, 0] = 1.0
    q[:, 1::3] = factor
    q[1, 2::3, 2] = -factor
    # Scores are rounded, and what their exponentials lose is in proportion to them.
    agree_with_the_plain(case, np.float64, 1e-14 * abs(factor))
    agree_with_the_plain(case, np.float32, 5e-6 * abs(factor))


def test_columns_of_long_keys_are_taken_of_few_heads():
    keys = 4 * numpy_attention.KEYS
    tiling = numpy_attention._tiling(1, 64, keys, 8, 1, (keys - 80, keys - 64))
    assert [part.heads for part in tiling.parts] == [slice(i, i + 1) for i in range(8)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SMALL)
def test_strided_inputs_give_the_same(name, implementation):
    case, kernel_set = SMALL[name], IMPLEMENTATIONS[implementation]
    y, slopes = gradients(kernel_set, case)
    spread = [strided(a) for a in case.arrays]
    again, slopes_again = gradients(kernel_set, case, arrays=spread)
    for got, expected in zip((again, *slopes_again), (y, *slopes), strict=True):
        close(got, expected, 1e-13)


def test_the_plain_kernels_are_those_of_the_base():
    assert PLAIN.attention.func is attention.attention
