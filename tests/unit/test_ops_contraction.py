"""Einsum strings, and products on one device compared with NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.backend import dtypes
from tparmpi.ops import subscripts


def tensor(*shape, seed=0, dtype=float):
    array = np.random.default_rng(seed).normal(size=shape)
    return tpm.tensor(array.astype(dtypes.dtype(dtype)), tpm.device())


@pytest.mark.parametrize(
    ("rule", "shapes"),
    [
        ("ij,jk", [(2, 3), (3, 4)]),
        ("kj,ji", [(2, 3), (3, 4)]),
        ("ba", [(2, 3)]),
        (" i j , j -> i ", [(2, 3), (3,)]),
        ("...", [(2, 3)]),
        ("...,...", [(2, 3), (3,)]),
        ("...,...->...", [(2, 1, 3), (4, 1)]),
        ("i...,...i->...", [(2, 3, 4), (1, 4, 2)]),
        ("a...b,b...->a...", [(2, 3, 4, 5), (5, 4)]),
        ("...ij->...ji", [(2, 3, 4, 5)]),
        ("...ii->...i", [(2, 4, 4)]),
        ("...ii", [(2, 4, 4)]),
        ("ii,jj->ij", [(3, 3), (2, 2)]),
        ("ijij->ji", [(2, 3, 2, 3)]),
        ("aaaa->a", [(2, 2, 2, 2)]),
        ("ab,ab,ab->ab", [(2, 3)] * 3),
        ("ab,bc,cd,de", [(2, 3), (3, 4), (4, 5), (5, 2)]),
        (",ij->ij", [(), (2, 3)]),
        (",", [(), ()]),
        ("i->", [(0,)]),
        ("ij,jk", [(2, 0), (0, 3)]),
        ("ij,jk", [(0, 2), (2, 3)]),
        ("ij,jk", [(1, 1), (1, 1)]),
        ("Zb,Za->ab", [(2, 3), (2, 4)]),
    ],
)
def test_einsum_is_that_of_numpy(rule, shapes):
    place = tpm.device().autodiff()
    tensors = [
        tpm.tensor(tensor(*shape, seed=i).numpy(), place).require_grad()
        for i, shape in enumerate(shapes)
    ]
    expected = np.einsum(rule, *(t.numpy() for t in tensors))
    result = tpm.einsum(rule, *tensors)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-13)
    assert result.shape == expected.shape
    result.sum().backward()
    assert [t.grad.shape for t in tensors] == shapes


@pytest.mark.parametrize(
    ("rule", "shapes", "message"),
    [
        ("ij", [(2,)], "operand 0 has 1 dims, but 'ij'"),
        ("ij,jk", [(2, 3)], "has 2 operands, but 1"),
        ("i1->i", [(2,)], "must be letters"),
        ("i..j", [(2, 3)], "must be letters"),
        ("......->...", [(2, 3)], "must be letters"),
        ("i->j", [(2,)], "'j' in the output only"),
        ("ii->ii", [(2, 2)], "'i' twice in the output"),
        ("ii", [(2, 3)], "two dims of one operand, of sizes 2 and 3"),
        ("...i,...i", [(2, 3), (4, 3)], "cannot be broadcast"),
        ("...i->i", [(2, 3)], r"has '\.\.\.' in an operand but not in the output"),
        ("i...", [()], "operand 0 has 0 dims"),
        ("ij,jk", [(2, 3), (4, 5)], "but 3 is needed"),
    ],
)
def test_einsum_refuses(rule, shapes, message):
    with pytest.raises(tpm.ShapeError, match=message):
        tpm.einsum(rule, *(tensor(*shape) for shape in shapes))


def test_strings_become_explicit():
    rule, diagonals = subscripts.explicit("...ii,ij", ((4, 3, 3), (3, 2)))
    assert (rule, diagonals) == ("ai,ij->aj", (((1, 2),), ()))
    rule, _ = subscripts.explicit("...a,...b->...ab", ((1, 2, 3), (4, 1, 5)))
    assert rule == "eca,dfb->dcab"


def test_products_refuse_what_is_no_tensor():
    with pytest.raises(tpm.UsageError, match="outer: operand 1 is a ndarray"):
        tpm.outer(tensor(2), np.ones(2))
    with pytest.raises(tpm.UsageError, match="einsum: operand 0 is a list"):
        tpm.einsum("ii", [1])
    with pytest.raises(tpm.ShapeError, match="outer: two vectors are needed"):
        tpm.outer(tensor(2, 2), tensor(2))
    with pytest.raises(tpm.ShapeError, match="two dims of equal size"):
        tensor(2, 3).diagonal()
    with pytest.raises(tpm.ShapeError, match="has no dim 2"):
        tensor(2, 2).diagonal(0, 2)
    with pytest.raises(tpm.ShapeError, match="two dims of equal size"):
        tensor(2, 2).diagonal(1, -1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_halves_are_accumulated_in_float32(dtype):
    """4096 ones: a running sum in float16 stops at 2048, in bfloat16 at 256."""
    ones = tpm.tensor(np.ones((2, 4096), dtypes.dtype(dtype)), tpm.device())
    for result in (
        ones @ ones.transpose((1, 0)),
        tpm.einsum("ab,cb->ac", ones, ones),
        tpm.einsum("ab,cb,cb->ac", ones, ones, ones),
        tpm.einsum("ab->a", ones),
        tpm.einsum("ab,c->ac", ones, ones[0, :3]),
        tpm.einsum("c,ba->ac", ones[0, :3], ones.transpose((1, 0))),
    ):
        assert result.dtype == ones.dtype
        assert (result.numpy().astype(float) == 4096).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("rule", "shape"), [("bti,io->bto", (2, 2048, 1)), ("ti,io->ot", (4096, 1))]
)
def test_the_gradient_of_a_bias_of_halves_is_accumulated_in_float32(rule, shape, dtype):
    place = tpm.device().autodiff()
    x, weight, bias = (
        tpm.tensor(np.ones(size, dtypes.dtype(dtype)), place)
        for size in (shape, (1, 3), (3,))
    )
    y = tpm.linear(x, weight, bias.require_grad(), rule)
    y.backward(tpm.tensor(np.ones(y.shape, y.dtype), place.inner()))
    assert bias.grad.dtype == bias.dtype
    assert (bias.grad.numpy().astype(float) == 4096).all()


def test_a_dim_of_one_operand_alone_is_summed_in_the_dtype():
    x = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    result = tpm.einsum("ab,c->ac", *(tpm.tensor(a, tpm.device()) for a in (x, x[0])))
    np.testing.assert_array_equal(result.numpy(), np.einsum("ab,c->ac", x, x[0]))
    assert result.dtype == np.int8


def test_special_values_pass_through_products():
    a = np.array([[np.inf, 1.0], [np.nan, 0.0]])
    b = np.array([1.0, 2.0])
    found = (tpm.tensor(a, tpm.device()) @ tpm.tensor(b, tpm.device())).numpy()
    np.testing.assert_array_equal(found, a @ b)
    found = tpm.outer(*(tpm.tensor(x, tpm.device()) for x in (a[0], b))).numpy()
    np.testing.assert_array_equal(found, np.outer(a[0], b))
