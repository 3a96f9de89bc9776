"""Reductions on one device: NumPy's types and special values; refusals."""

from __future__ import annotations

import warnings
from math import inf, nan

import ml_dtypes
import numpy as np
import pytest
from scipy import special

import tparmpi as tpm
from tparmpi.errors import ShapeError, UsageError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def vector_norm(x, axis=None, keepdims=False):
    return np.linalg.vector_norm(x, axis=axis, keepdims=keepdims)


def logsumexp(x, axis=None, keepdims=False):
    if np.size(x):
        return special.logsumexp(x, axis=axis, keepdims=keepdims)
    return np.log(np.sum(x, axis=axis, keepdims=keepdims))  # SciPy refuses some


NUMPYS = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "var": np.var,
    "std": np.std,
    "norm": vector_norm,
    "logsumexp": logsumexp,
    "argmax": np.argmax,
    "argmin": np.argmin,
    "any": np.any,
    "all": np.all,
    "cumsum": np.cumsum,
}
KEEPS_DIMS = sorted(set(NUMPYS) - {"cumsum"})
WITH_EMPTY = ["all", "any", "logsumexp", "norm", "prod", "sum"]
REFUSE_EMPTY = ["argmax", "argmin", "max", "mean", "min", "std", "var"]
REFUSE_COMPLEX = sorted({*REFUSE_EMPTY, "logsumexp", "norm"} - {"mean"})
ROUNDED = {"mean", "var", "std", "norm", "logsumexp"}


def tensor(array):
    return tpm.tensor(np.asarray(array), tpm.device())


def check(name: str, array: np.ndarray, *args, **keywords) -> None:
    """The same dtype, shape and values as NumPy's, to rounding."""
    found = getattr(tensor(array), name)(*args, **keywords).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "dim" in keywords:
            keywords["axis"] = keywords.pop("dim")
        expected = np.asarray(NUMPYS[name](array, *args, **keywords))
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    if found.dtype.kind == "f":
        # One device adds in NumPy's order; a division may be a multiplication.
        np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(found.dtype).eps)
    else:
        np.testing.assert_array_equal(found, expected)


def gradient(array, function) -> np.ndarray:
    x = tpm.tensor(np.asarray(array), tpm.device().autodiff()).require_grad()
    function(x).backward()
    return x.grad.numpy()


@pytest.mark.parametrize("name", NUMPYS)
@pytest.mark.parametrize("kind", ["?", "i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_dtypes_are_numpys(name, kind):
    if name in ROUNDED and kind[0] in "?iu":
        expected = np.float64
    else:
        expected = NUMPYS[name](np.ones((3, 2), kind), 0).dtype
    array = np.array([[3, 0], [1, 1], [2, 3]], kind)
    found = getattr(tensor(array), name)(0).numpy()
    assert found.dtype == expected
    if kind[0] in "fiu?" and name not in ROUNDED:
        np.testing.assert_array_equal(found, NUMPYS[name](array, 0))


def test_narrow_integers_are_summed_in_the_widest():
    array = np.full((300, 2), 200, np.uint8)
    for name in ("sum", "cumsum", "mean"):
        check(name, array, 0)
    check("prod", np.full((5, 2), 100, np.int8), 0)
    check("mean", np.full(3, 2**62), 0)


@pytest.mark.parametrize("name", KEEPS_DIMS)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (1,), (3, 1), (0, 3), (1, 0, 2)], ids=str)
def test_shapes_are_numpys(name, keepdims, shape):
    array = np.cos(np.arange(float(np.prod(shape)))).reshape(shape)
    for dim, size in enumerate(shape):
        if size:
            check(name, array, dim=dim, keepdims=keepdims)
            check(name, array, dim=dim - len(shape), keepdims=keepdims)
    if array.size:
        check(name, array, dim=None, keepdims=keepdims)


@pytest.mark.parametrize("name", KEEPS_DIMS)
def test_without_dims(name):
    check(name, np.array(2.5), dim=None)
    if name not in ("argmax", "argmin"):
        found = getattr(tensor([2.5, 3.5]), name)(()).numpy()
        assert found.shape == (2,)


@pytest.mark.parametrize("name", WITH_EMPTY)
def test_nothing_has_a_value(name):
    check(name, np.zeros((0, 3)), dim=0)
    check(name, np.zeros((0, 3)), dim=None)
    check(name, np.zeros((2, 0, 3)), dim=(0, 1), keepdims=True)
    assert getattr(tensor(np.zeros((0, 0))), name)(0).shape == (0,)


def test_nothing_summed_on_the_way():
    check("cumsum", np.zeros((0, 3)), 0)
    check("cumsum", np.zeros((0, 3)), 1)
    assert tensor(np.zeros((2, 0))).norm(1, ord=inf).numpy().tolist() == [0, 0]


@pytest.mark.parametrize("name", REFUSE_EMPTY)
def test_nothing_to_choose_from_is_refused(name):
    with pytest.raises(ShapeError, match=rf"^{name}: a tensor of shape \(0, 3\) has"):
        getattr(tensor(np.zeros((0, 3))), name)(0)
    with pytest.raises(ShapeError, match="skip the call"):
        getattr(tensor(np.zeros((0, 3))), name)()


SPECIAL = [
    [1, nan, 3],
    [nan, nan, nan],
    [inf, 1, nan],
    [inf, 1000, -1e308],
    [inf, inf, 1],
    [-inf, -inf, -inf],
    [-inf, 0, 5],
    [inf, -inf, 1],
    [0, -0.0, 0],
    [1000, 1001, -1000],
]


@pytest.mark.parametrize(
    "name",
    [
        *("argmax", "argmin", "max", "min", "any", "all"),
        *("sum", "cumsum", "prod", "logsumexp", "norm"),
    ],
)
@pytest.mark.parametrize("row", SPECIAL, ids=str)
def test_special_values(name, row):
    for kind in ("f8", "f4"):
        with np.errstate(all="ignore"):
            array = np.array([row, [1, 2, 3]], kind)
            check(name, array, 1)


@pytest.mark.parametrize("name", ["argmax", "argmin", "max", "min"])
@pytest.mark.parametrize("kind", [np.float16, BFLOAT16], ids=str)
def test_special_halves(name, kind):
    array = np.array(SPECIAL[:8]).clip(-500, 500).astype(kind)
    found = getattr(tensor(array), name)(1).numpy()
    expected = NUMPYS[name](array.astype(float), 1)
    np.testing.assert_array_equal(found.astype(float), expected)
    assert found.dtype == (np.int64 if name.startswith("arg") else kind)


@pytest.mark.parametrize("kind", [np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", sorted(set(NUMPYS) - {"argmax", "argmin"}))
def test_halves_are_accumulated_in_float32_and_rounded_once(name, kind):
    array = (1 + np.cos(np.arange(4000.0)) / 16).reshape(2000, 2).astype(kind)
    found = getattr(tensor(array), name)(0)
    wide = getattr(tensor(array.astype(np.float32)), name)(0).numpy()
    assert found.dtype == (bool if name in ("any", "all") else kind)
    np.testing.assert_array_equal(found.numpy(), wide.astype(found.dtype))


@pytest.mark.parametrize("kind", [np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "name", ["max", "prod", "var", "std", "norm", "logsumexp", "cumsum"]
)
def test_gradients_of_halves_are_rounded_once(name, kind):
    array = (1 + np.cos(np.arange(40.0)) / 16).reshape(20, 2).astype(kind)
    found = gradient(array, lambda x: getattr(x, name)(0))
    wide = gradient(array.astype(np.float32), lambda x: getattr(x, name)(0))
    assert found.dtype == kind
    np.testing.assert_array_equal(found, wide.astype(kind))


def test_variance_far_from_zero():
    """Not as a difference of squares, of which nothing would be left."""
    array = 1e8 + np.arange(10.0)
    np.testing.assert_allclose(tensor(array).var().item(), 8.25, rtol=1e-12)
    np.testing.assert_allclose(
        tensor(array).std(correction=1).item(), np.sqrt(82.5 / 9), rtol=1e-12
    )


@pytest.mark.parametrize("scale", [1e-300, 1e-162, 1, 1e154, 1e307])
def test_norms_do_not_overflow(scale):
    array = np.array([[3.0, 5.0], [4.0, 12.0]]) * scale
    np.testing.assert_allclose(
        tensor(array).norm(0).numpy(), np.array([5, 13]) * scale, rtol=1e-15
    )
    np.testing.assert_allclose(
        gradient(array, lambda x: x.norm(0)),
        [[3 / 5, 5 / 13], [4 / 5, 12 / 13]],
        rtol=1e-15,
    )


def test_norms_are_exact_where_numpys_are():
    assert tensor([3.0, 4.0]).norm().item() == 5
    assert tensor([5.0, 12.0]).norm().item() == 13
    assert tensor([8, 15]).norm().item() == 17
    smallest = np.nextafter(0, 1)
    assert tensor([3 * smallest, 4 * smallest]).norm().item() == 5 * smallest


def test_ties_share_the_gradient():
    array = np.array([[2.0, 7, 1], [7, 7, 1], [0, 7, 1]])
    np.testing.assert_array_equal(
        gradient(array, lambda x: x.max(0)),
        [[0, 1 / 3, 1 / 3], [1, 1 / 3, 1 / 3], [0, 1 / 3, 1 / 3]],
    )
    np.testing.assert_array_equal(gradient(array, lambda x: x.max()), (array == 7) / 4)
    np.testing.assert_array_equal(
        gradient(-array, lambda x: x.norm(ord=inf)), (array == 7) / -4
    )
    found = gradient([1.0, nan, nan], lambda x: x.min())
    np.testing.assert_array_equal(found, [0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([2, 3, 4], [12, 8, 6]),
        ([2, 0, 4], [0, 8, 0]),
        ([0, 3, 0], [0, 0, 0]),
        ([0, 0, 0], [0, 0, 0]),
        ([5], [1]),
        ([1e-200, 1e-200, 1e300], [1e100, 1e100, 0]),
    ],
)
def test_gradient_of_a_product_is_that_of_the_others(row, expected):
    found = gradient(np.array(row, float), lambda x: x.prod())
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_gradients_where_there_is_no_slope():
    zeros = np.zeros(3)
    for ord in (1, 2, inf):
        found = gradient(zeros, lambda x, ord=ord: x.norm(ord=ord))
        np.testing.assert_array_equal(found, zeros)
    np.testing.assert_array_equal(gradient(zeros + 4, lambda x: x.std()), zeros)
    found = gradient(np.full(3, -inf), lambda x: x.logsumexp())
    np.testing.assert_array_equal(found, zeros)
    found = gradient(np.array([-inf, 2.0]), lambda x: x.logsumexp())
    np.testing.assert_array_equal(found, [0, 1])


def test_whole_results_carry_no_history():
    x = tpm.tensor(np.eye(3), tpm.device().autodiff()).require_grad()
    for result in (x.argmax(0), x.argmin(), x.any(0), x.all()):
        assert not result.requires_grad


@pytest.mark.parametrize("name", REFUSE_COMPLEX)
def test_complex_numbers_are_refused_where_they_have_no_order(name):
    with pytest.raises(UsageError, match=f"^{name}: is defined for real numbers"):
        getattr(tensor([1j, 2]), name)()


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "any", "all"])
def test_complex_numbers_are_reduced_where_they_may_be(name):
    array = np.array([[1j, 2], [1, 1 - 1j]])
    found = getattr(tensor(array), name)(0).numpy()
    np.testing.assert_allclose(found, NUMPYS[name](array, 0), rtol=1e-15)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda x: x.max(2), ShapeError, r"max: a tensor of shape \(2, 3\) has no dim"),
        (lambda x: x.var((0, -2)), ShapeError, "var: a dim stands twice"),
        (lambda x: x.prod("rows"), UsageError, "prod: a dim is given by its number"),
        (lambda x: x.cumsum(None), UsageError, "cumsum: a dim is given by its number"),
        (lambda x: x.argmax((0, 1)), UsageError, "argmax: takes one dim, or None"),
        (lambda x: x.norm(ord=3), UsageError, "norm: ord must be 1, 2 or math.inf"),
        (
            lambda x: x.var(0, correction=2),
            ShapeError,
            "var: more than 2 elements are needed",
        ),
        (lambda x: x.std(0, correction=2.5), ShapeError, "give correction=0"),
    ],
)
def test_refusals(call, kind, words):
    with pytest.raises(kind, match=words):
        call(tensor(np.ones((2, 3))))
