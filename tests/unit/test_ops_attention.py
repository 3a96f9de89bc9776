"""Attention on one device: refusals, hidden rows, narrow dtypes, large scores."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases.attention import attention
from tparmpi.backend import dtypes


def tensor(*shape, seed=0, dtype=float):
    array = np.random.default_rng(seed).normal(size=shape)
    return tpm.tensor(array.astype(dtypes.dtype(dtype)), tpm.device())


def test_what_does_not_fit_is_refused():
    q, k = tensor(2, 4, 6, 3), tensor(2, 5, 3, 3)
    with pytest.raises(tpm.ShapeError, match=r"q must be \(B, T, H, E\) or"):
        tpm.attention(tensor(4, 6, 3), k, k)
    with pytest.raises(tpm.ShapeError, match=r"q has 6 heads.* and k has 4"):
        tpm.attention(q, tensor(2, 5, 4, 3), tensor(2, 5, 4, 3))
    with pytest.raises(tpm.ShapeError, match=r"q has 2 heads.* and k has 3"):
        tpm.attention(tensor(2, 4, 2, 3, 3), k, k)
    with pytest.raises(tpm.ShapeError, match=r"5 queries over 4 keys.*causal=False"):
        tpm.attention(tensor(2, 5, 6, 3), q, q)
    with pytest.raises(tpm.ShapeError, match="dim 3 of operand 1"):
        tpm.attention(q, tensor(2, 5, 3, 4), k)
    with pytest.raises(tpm.ShapeError, match=r"\(3, 4, 5\), cannot be broadcast"):
        tpm.attention(q, k, k, tensor(3, 4, 5))
    with pytest.raises(tpm.UsageError, match="window of 0 hides every key"):
        tpm.attention(q, k, k, window=0)
    with pytest.raises(tpm.UsageError, match="mask is int64; give a bool one"):
        tpm.attention(q, k, k, tensor(4, 5, dtype="int64"))
    with pytest.raises(TypeError, match="operand 3 is a ndarray"):
        tpm.attention(q, k, k, np.ones((4, 5), bool))


def test_a_query_that_sees_no_key_gets_zeros():
    q, k = tensor(1, 3, 2, 4), tensor(1, 3, 2, 4, seed=1)
    mask = np.array([[True, False, True], [False] * 3, [True] * 3])
    y = tpm.attention(q, k, k, tpm.tensor(mask, tpm.device()), causal=False)
    assert np.array_equal(y.numpy()[:, 1], np.zeros((1, 2, 4)))
    expected = attention(q.numpy(), k.numpy(), k.numpy(), mask, causal=False)
    np.testing.assert_allclose(y.numpy(), expected, atol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
def test_narrow_dtypes(dtype, tolerance):
    """Rounded once: half a unit in the last place of values below 4."""
    q, k, v = (tensor(2, 9, 4, 8, seed=i, dtype=dtype) for i in range(3))
    y = tpm.attention(q, k, v)
    assert y.dtype == dtypes.dtype(dtype)
    expected = attention(*(x.numpy().astype(float) for x in (q, k, v)))
    np.testing.assert_allclose(y.numpy().astype(float), expected, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_large_scores_do_not_overflow(dtype):
    q, v = (tensor(1, 4, 1, 2, seed=i, dtype=dtype) for i in range(2))
    big = (q * 1e4).cast(dtype)
    y = tpm.attention(big, big, v).numpy().astype(float)
    wide = (x.numpy().astype(float) for x in (big, big, v))
    np.testing.assert_allclose(y, attention(*wide), atol=1e-2)


@pytest.mark.parametrize(
    "shapes",
    [
        [(0, 3, 2, 4), (0, 3, 2, 4)],
        [(2, 0, 2, 4), (2, 3, 2, 4)],
        [(2, 3, 0, 4), (2, 3, 0, 4)],
        [(2, 3, 2, 0), (2, 3, 2, 0)],
        [(2, 0, 2, 4), (2, 0, 2, 4)],
    ],
)
def test_empty_dims(shapes):
    place = tpm.device().autodiff()
    q, k = (tpm.tensor(np.ones(s), place).require_grad() for s in shapes)
    y = tpm.attention(q, k, k)
    assert y.shape == shapes[0]
    y.sum().backward()
    assert (q.grad.shape, k.grad.shape) == tuple(shapes)


def test_operands_of_two_dtypes():
    q, k = tensor(1, 3, 2, 4, dtype="float32"), tensor(1, 3, 2, 4)
    q = tpm.tensor(q.numpy(), tpm.device().autodiff()).require_grad()
    y = tpm.attention(q, k, k)
    assert y.dtype == np.float64
    y.sum().backward()
    assert q.grad.dtype == np.float32
