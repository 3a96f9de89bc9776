"""Elementwise operators on one device: dtypes, special values, kinks, refusals."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from scipy import special

import tparmpi as tpm
from tests.cases.comparison import COMPARISONS
from tparmpi.backend import dtypes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *map(np.dtype, "?bhilBHILefdFD"),
    BFLOAT16,
]
TWO = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "floor_divide": np.floor_divide,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    **COMPARISONS,
}
ONE = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "bitwise_not": np.invert,
    "logical_not": np.logical_not,
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
}
NUMBERS = [True, 3, 2.5, 1 + 2j, np.int8(3), np.float32(2.5), np.float64(2.5)]


def on_device(array, dtype=None):
    return tpm.tensor(np.asarray(array, dtype), tpm.device())


def tracked(array):
    return tpm.tensor(np.asarray(array, float), tpm.device().autodiff()).require_grad()


def result(function, *operands):
    """What NumPy gives, or None where it has no such function of these dtypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*operands)
        except TypeError:
            return None


def tanh_gelu(x):
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("name", TWO)
def test_two_operands_have_numpys_dtypes_and_values(name):
    ours, theirs = getattr(tpm, name), TWO[name]
    for first in DTYPES:
        for second in DTYPES:
            a, b = np.array([3, 1, 2], first), np.array([2, 1, 1], second)
            if BFLOAT16 in (first, second) and first != second:
                joint = dtypes.promote(first, second)
                expected = result(theirs, a.astype(joint), b.astype(joint))
            else:
                expected = result(theirs, a, b)
            if expected is None:
                with pytest.raises(tpm.UsageError, match=name):
                    ours(on_device(a), on_device(b))
                continue
            found = ours(on_device(a), on_device(b))
            assert found.dtype == found.local.dtype == expected.dtype, (first, second)
            np.testing.assert_array_equal(found.local, expected, str((first, second)))


@pytest.mark.parametrize("name", ONE)
def test_one_operand_has_numpys_dtypes_and_values(name):
    for dtype in DTYPES:
        x = np.array([3, 1, 2], dtype)
        expected = result(ONE[name], x)
        if expected is None:
            with pytest.raises(tpm.UsageError, match=name):
                getattr(tpm, name)(on_device(x))
            continue
        found = getattr(on_device(x), name)()
        assert found.dtype == found.local.dtype == expected.dtype, dtype
        np.testing.assert_array_equal(found.local, expected, str(dtype))


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus", "erf", "gelu", "relu"])
def test_functions_that_numpy_lacks(name):
    reference = {
        "sigmoid": special.expit,
        "silu": lambda x: x * special.expit(x),
        "softplus": lambda x: np.logaddexp(0, x),
        "erf": special.erf,
        "gelu": lambda x: (
            x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
        ),
        "relu": lambda x: np.maximum(x, 0),
    }[name]
    x = np.array([-3, -0.5, 0, 0.5, 3])
    for dtype in DTYPES:
        if dtype.kind == "c":
            with pytest.raises(tpm.UsageError, match=f"{name}: takes real numbers"):
                getattr(tpm, name)(on_device(x, dtype))
            continue
        if dtype.kind in "bu":
            continue
        array = x.astype(dtype)
        kept = dtype if name == "relu" else np.sqrt(np.ones(1, dtype)).dtype
        found = getattr(tpm, name)(on_device(array))
        assert found.dtype == found.local.dtype == kept
        exact = kept.kind == "i" or kept == np.float64
        eps = 1e-15 if exact else float(ml_dtypes.finfo(kept).eps)
        expected = reference(array.astype(float))
        np.testing.assert_allclose(
            found.local.astype(float), expected, rtol=4 * eps, atol=eps
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_weak_and_scalars_strong(dtype):
    x = np.array([3, 1, 2], dtype)
    stand_in = x.astype(np.float16) if dtype == BFLOAT16 else x
    for number in NUMBERS:
        for apply in (
            lambda x, n: x + n,
            lambda x, n: n + x,
            lambda x, n: x * n,
            lambda x, n: n * x,
            lambda x, n: x / n,
            lambda x, n: n / x,
            lambda x, n: x**n,
            lambda x, n: n**x,
            lambda x, n: x > n,
            lambda x, n: n == x,
        ):
            expected = result(apply, stand_in, number)
            found = apply(on_device(x), number)
            if dtype == BFLOAT16 and expected.dtype == np.float16:
                assert found.dtype == BFLOAT16
            else:
                assert found.dtype == expected.dtype, number
            eps = 2**-7 if found.dtype == BFLOAT16 else 2**-10
            np.testing.assert_allclose(
                np.asarray(found.local, complex),
                np.asarray(expected, complex),
                rtol=2 * eps if found.dtype.itemsize == 2 else 1e-6,
            )


def test_quotients_are_numpys_to_the_last_bit():
    x = np.sin(np.arange(1, 200.0))
    for number in (3, 7.0, 0.1, -49):
        np.testing.assert_array_equal((on_device(x) / number).local, x / number)
        np.testing.assert_array_equal((number / on_device(x)).local, number / x)


def test_comparisons_with_numbers_out_of_range():
    x = on_device([0, 255], np.uint8)
    assert (x < 300).local.all() and (x > -1).local.all()
    assert not (x == 256).local.any() and (x != 10**400).local.all()
    big = on_device([2**63 - 1], np.int64)
    assert (big < 2**63).local.all() and not (big >= 2**64).local.any()


EXTREMES = np.array([-np.inf, -1e4, -90, -1, -0.0, 0.0, 1, 90, 1e4, np.inf, np.nan])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_overflows(dtype):
    """No warning, and the limits, for arguments of any size; warnings are errors."""
    x = EXTREMES.astype(dtype)
    rtol = 1e-6 if dtype == np.float32 else 1e-14
    logarithm = np.where(x > 90, x, np.log1p(np.exp(np.minimum(x, np.float64(90)))))
    with np.errstate(all="raise", under="ignore"):
        found = on_device(x).sigmoid().local
        np.testing.assert_allclose(found, special.expit(x), rtol, 1e-37)
        found = on_device(x).softplus().local
        np.testing.assert_allclose(found, logarithm, rtol, 1e-37)
        finite = x[1:-2]
        found = on_device(finite).silu().local
        np.testing.assert_allclose(found, finite * special.expit(finite), rtol, 1e-37)
        found = on_device(finite).gelu(approximate="none").local
        np.testing.assert_allclose(found, finite * special.ndtr(finite), rtol, 1e-37)


@pytest.mark.parametrize(
    "apply",
    [
        tpm.sigmoid,
        tpm.silu,
        tpm.softplus,
        tpm.tanh,
        tpm.erf,
        tpm.gelu,
        lambda x: x.gelu(approximate="none"),
        tpm.relu,
    ],
)
def test_gradients_of_large_arguments_are_finite(apply):
    for dtype in (np.float32, np.float64):
        array = np.array([-1e4, -90, -20, 20, 90, 1e4], dtype)
        x = tpm.tensor(array, tpm.device().autodiff()).require_grad()
        with np.errstate(all="raise", under="ignore"):
            apply(x).sum().backward()
        assert x.grad.dtype == dtype
        limits = x.grad.local
        assert np.isfinite(limits).all()
        # Left of all transitions the functions are flat or lines, right of them too.
        np.testing.assert_allclose(limits[[1, 4]], limits[[0, 5]], atol=1e-6)


def test_roots_and_logarithms_at_their_ends():
    x = np.array([0.0, 1.0, np.inf])
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(on_device(x).rsqrt().local, [np.inf, 1, 0])
        np.testing.assert_array_equal(on_device(x).log().local, [-np.inf, 0, np.inf])
    np.testing.assert_array_equal(on_device(x).sqrt().local, [0, 1, np.inf])
    y = tracked(x)
    with np.errstate(divide="ignore"):
        y.sqrt().sum().backward()
    np.testing.assert_array_equal(y.grad.local, [np.inf, 0.5, 0])


def test_nan_wins_in_maximum_minimum_and_clip():
    a, b = np.array([np.nan, 1.0, 2.0]), np.array([0.0, np.nan, 1.0])
    for ours, theirs in ((tpm.maximum, np.maximum), (tpm.minimum, np.minimum)):
        np.testing.assert_array_equal(
            ours(on_device(a), on_device(b)).local, theirs(a, b)
        )
    np.testing.assert_array_equal(on_device(a).clip(0, 1.5).local, np.clip(a, 0, 1.5))


def gradient(apply, *arrays):
    tensors = [tracked(array) for array in arrays]
    apply(*tensors).sum().backward()
    return [tensor.grad.local for tensor in tensors]


def test_gradients_at_kinks():
    at = np.array([-1.0, 0.0, 1.0])
    (found,) = gradient(abs, at)
    np.testing.assert_array_equal(found, [-1, 0, 1])
    (found,) = gradient(tpm.relu, at)
    np.testing.assert_array_equal(found, [0, 0, 1])
    (found,) = gradient(lambda x: x.clip(-1, 0), at)
    np.testing.assert_array_equal(found, [1, 1, 0])
    (found,) = gradient(lambda x: tpm.maximum(x, 0), at)
    np.testing.assert_array_equal(found, [0, 0.5, 1])
    left, right = gradient(tpm.minimum, at, np.zeros(3))
    np.testing.assert_array_equal(left, [1, 0.5, 0])
    np.testing.assert_array_equal(right, [0, 0.5, 1])


def test_gradients_of_powers_at_zero():
    zeros = np.zeros(3)
    left, right = gradient(lambda a, b: a**b, zeros, np.array([0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(left, [0, 1, 0])
    np.testing.assert_array_equal(right, [0, 0, 0])
    for exponent, slope in ((0, 0), (1, 1), (2, 0), (3, 0)):
        (found,) = gradient(lambda x, exponent=exponent: x**exponent, zeros)
        np.testing.assert_array_equal(found, [slope] * 3)
    (found,) = gradient(lambda x: 0**x, np.array([0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(found, [0, 0, 0])


def test_a_masked_value_passes_no_nan_to_its_gradient():
    x = tracked([-1.0, 4.0])
    with np.errstate(invalid="ignore"):
        y = tpm.where(x > 0, tpm.where(x > 0, x, 1.0).sqrt(), 0.0)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.local, [0, 0.25])


def test_results_without_gradient_are_not_recorded():
    x = tracked([1.0, 2.0])
    for made in (x > 1, x == x, x.isnan(), ~(x > 1), tpm.logical_not(x)):
        assert made.node is None and not made.requires_grad
    tpm.where(x > 1, x, -x).sum().backward()
    np.testing.assert_array_equal(x.grad.local, [-1, 1])


def test_gradients_of_halves_are_rounded_once():
    x = np.linspace(-3, 3, 31)
    device = tpm.device().autodiff()
    for name in ("sigmoid", "silu", "softplus", "tanh", "gelu", "exp", "erf", "sin"):
        wide = tracked(x)
        getattr(wide, name)().sum().backward()
        for dtype in (np.float16, BFLOAT16):
            narrow = tpm.tensor(x.astype(dtype), device).require_grad()
            getattr(narrow, name)().sum().backward()
            assert narrow.grad.dtype == dtype
            exact = tracked(x.astype(dtype).astype(float))
            getattr(exact, name)().sum().backward()
            eps = float(ml_dtypes.finfo(dtype).eps)
            np.testing.assert_allclose(
                narrow.grad.local.astype(float), exact.grad.local, 3 * eps, 3 * eps
            )


def test_where_takes_numbers_and_keeps_dtypes():
    condition = np.array([True, False])
    small = np.array([1, 2], np.float32)
    for a, b in ((small, 2.5), (0, small), (1, 2), (1, 2.5), (small, np.float64(2))):
        expected = np.where(condition, a, b)
        a, b = (on_device(v) if v is small else v for v in (a, b))
        found = tpm.where(on_device(condition), a, b)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.local, expected)


def test_clip_has_numpys_dtypes():
    ints, small = np.arange(5, dtype=np.int8), np.arange(5, dtype=np.float32)
    for array, bounds in (
        (ints, (1, 3)),
        (ints, (1.5, None)),
        (ints, (None, 3)),
        (small, (1, 3.5)),
        (small, (4, 1)),
        (small, (np.float64(1), None)),
        (small > 1, (0, 1)),
    ):
        expected = np.clip(array, *bounds)
        found = on_device(array).clip(*bounds)
        assert found.dtype == expected.dtype, bounds
        np.testing.assert_array_equal(found.local, expected)
    x = on_device(small)
    assert x.clip() is x


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_no_dims_and_no_elements(shape):
    x = np.full(shape, 2.0)
    for found, expected in [
        (on_device(x) + on_device(x), x + x),
        (on_device(x) / 3, x / 3),
        (on_device(x) ** on_device(x), x**x),
        (on_device(x).sigmoid(), special.expit(x)),
        (on_device(x).gelu(approximate="none"), x * special.ndtr(x)),
        (tpm.where(on_device(x) > 1, on_device(x), 0), np.where(x > 1, x, 0)),
        (tpm.maximum(on_device(x), 3), np.maximum(x, 3)),
        (on_device(x).clip(None, 1), np.clip(x, None, 1)),
        (on_device(x) <= 2, x <= 2),
    ]:
        assert found.shape == np.shape(expected)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-15)
    y = tracked(x)
    (y.silu() * tpm.maximum(y, 1) / y ** tpm.minimum(y, 1.5)).sum().backward()
    assert y.grad.shape == shape


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.cast("int64") ** -1, "integers have no power -1"),
        (lambda x: x.cast("int64") ** (x.cast("int64") - 5), "integers have no power"),
        (lambda x: (x > 1) - (x > 2), r"sub: it has no meaning for bools; use a \^ b"),
        (lambda x: -(x > 1), "neg: it has no meaning for bools; use ~x"),
        (lambda x: x & x, r"compare first, for example \(a > 0\) & \(b > 0\)"),
        (lambda x: ~x, "logical_not"),
        (lambda x: tpm.where(x, x, 0), "where: the condition must be bool"),
        (lambda x: x.clip(x), "clip: a bound is a tensor; use tpm.maximum"),
        (lambda x: x.cast("int8").clip(0, 300), "300 does not fit into int8"),
        (lambda x: x.cast("int8") * 300, "300 does not fit into int8"),
        (lambda x: x.cast("uint8") + -1, "-1 does not fit into uint8"),
        (lambda x: x.gelu(approximate="erf"), "approximate must be 'tanh' or 'none'"),
        (lambda x: (x * 1j) // 2, "complex numbers have no floor"),
        (lambda x: (x * 1j).clip(0), "clip: takes real numbers"),
        (lambda x: (x * 1j).sigmoid(), "sigmoid: takes real numbers"),
    ],
)
def test_what_is_refused_says_why(call, words):
    with pytest.raises(tpm.UsageError, match=words):
        call(on_device([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + "1",
        lambda x: None * x,
        lambda x: x == None,  # noqa: E711
        lambda x: x == np.ones(3),
        lambda x: x / [1, 2, 3],
        lambda x: x ** np.ones(3),
        lambda x: tpm.maximum(x, np.zeros(3)),
        lambda x: tpm.where(x > 1, x, np.zeros(3)),
        lambda x: tpm.where(np.ones(3, bool), x, x),
        lambda x: tpm.add(1, 2),
        lambda x: tpm.pow(1, 2),
        lambda x: x.clip("a"),
    ],
)
def test_what_is_no_tensor_is_named(call):
    with pytest.raises(TypeError, match="not a tensor"):
        call(on_device([1.0, 2.0, 3.0]))
