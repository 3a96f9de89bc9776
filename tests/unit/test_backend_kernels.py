"""Kernels: gradients by finite differences, and the NumPy versions against the plain.

Each kernel is described once, as a case: its inputs, a forward from those that have
gradients to one output, and a backward. All checks run over all cases.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tparmpi import backend
from tparmpi.backend import attention, kernels, numpy_kernels, numpy_updates

CPU = backend.get("cpu")
PLAIN = SimpleNamespace(
    **{
        name: partial(function, np)
        for name, function in (vars(kernels) | vars(attention)).items()
        if callable(function) and not name.startswith("_")
    }
)
IMPLEMENTATIONS = {"numpy": CPU, "plain": PLAIN}


class Case:
    """One kernel with its inputs. ``arrays`` are those that have gradients."""

    def __init__(self, forward, backward, *arrays):
        self.forward, self.backward, self.arrays = forward, backward, arrays


def normal(*shape, seed=0):
    return np.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def gelu_case(*shape):
    return Case(
        lambda b, x: b.gelu(x),
        lambda b, grad, x: (b.gelu_backward(x, grad),),
        normal(*shape),
    )


def layer_norm_case(*shape):
    def backward(b, grad, x, gain, bias):
        _, mean, rstd = b.layer_norm(x, gain, bias, 1e-5)
        return b.layer_norm_backward(x, mean, rstd, gain, grad)

    width = shape[-1]
    return Case(
        lambda b, x, gain, bias: b.layer_norm(x, gain, bias, 1e-5)[0],
        backward,
        2.0 + normal(*shape),
        1.0 + normal(width, seed=1),
        normal(width, seed=2),
    )


def softmax_case(axis, *shape):
    return Case(
        lambda b, x: b.softmax(x, axis),
        lambda b, grad, x: (b.softmax_backward(b.softmax(x, axis), grad, axis),),
        4.0 * normal(*shape),
    )


def embedding_case(rows, width, first, *shape, id_type=np.int64):
    ids = np.random.default_rng(5).integers(0, 9, size=shape).astype(id_type)
    return Case(
        lambda b, table: b.embedding(table, ids, first),
        lambda b, grad, table: (b.embedding_backward(grad, ids, first, rows),),
        normal(rows, width),
    )


def cross_entropy_case(first, columns, *shape):
    targets = np.random.default_rng(6).integers(0, 12, size=shape)

    def stats(b, logits):
        maximum = np.maximum(b.xent_local_max(logits), -50.0)
        maximum = maximum.astype(logits.dtype, copy=False)
        return maximum, *b.xent_local_stats(logits, targets, first, maximum)

    def forward(b, logits):
        maximum, sumexp, target_logit = stats(b, logits)
        return np.log(sumexp + 1e-20) + maximum - target_logit

    def backward(b, grad, logits):
        maximum, sumexp, _ = stats(b, logits)
        logsumexp = np.log(sumexp + 1e-20) + maximum
        return (b.xent_backward(logits, targets, first, logsumexp, grad),)

    return Case(forward, backward, 3.0 * normal(*shape, columns))


SMALL = {
    "gelu": gelu_case(2, 3, 5),
    "gelu 0-d": gelu_case(),
    "layer_norm": layer_norm_case(2, 3, 5),
    "layer_norm row": layer_norm_case(4),
    "softmax last": softmax_case(-1, 2, 3, 5),
    "softmax last by number": softmax_case(2, 2, 3, 5),
    "softmax middle": softmax_case(1, 2, 3, 5),
    "embedding": embedding_case(9, 3, 0, 4, 5),
    "embedding part": embedding_case(4, 3, 2, 4, 5),
    "embedding bytes": embedding_case(5, 2, 4, 7, id_type=np.uint8),
    "cross-entropy": cross_entropy_case(0, 12, 2, 3),
    "cross-entropy part": cross_entropy_case(3, 4, 5),
}

LARGE = {
    "gelu": gelu_case(3, 70_001),
    "layer_norm": layer_norm_case(5, 67, 390),
    "softmax": softmax_case(-1, 9, 40, 257),
    "embedding": embedding_case(9, 130, 0, 30, 41),
    "embedding part": embedding_case(5, 130, 2, 30, 41),
    "cross-entropy": cross_entropy_case(0, 3000, 5, 23),
    "cross-entropy part": cross_entropy_case(4, 1001, 5, 31),
}

EMPTY = {
    "gelu": gelu_case(2, 0, 5),
    "layer_norm no rows": layer_norm_case(0, 5),
    "layer_norm no width": layer_norm_case(2, 0),
    "softmax no rows": softmax_case(-1, 0, 4),
    "softmax no width": softmax_case(-1, 3, 0),
    "softmax middle": softmax_case(1, 2, 3, 0),
    "embedding no rows": embedding_case(0, 3, 2, 4, 5),
    "embedding no ids": embedding_case(4, 3, 2, 0),
    "embedding no width": embedding_case(4, 0, 2, 5),
    "cross-entropy no columns": cross_entropy_case(12, 0, 2, 3),
    "cross-entropy no rows": cross_entropy_case(0, 12, 0),
}


def gradients(implementation, case, dtype=np.float64, arrays=None):
    """Return the output and the gradients for position-dependent upstream values."""
    arrays = [a.astype(dtype) for a in case.arrays] if arrays is None else arrays
    y = case.forward(implementation, *arrays)
    grad = np.cos(np.arange(y.size)).reshape(y.shape).astype(dtype)
    return y, case.backward(implementation, grad, *arrays)


def finite_difference(function, array, grad, step=1e-6):
    slope = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + step
        above = function()
        array[index] = kept - step
        below = function()
        array[index] = kept
        slope[index] = ((above - below) * grad).sum() / (2.0 * step)
    return slope


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    scale = max(np.abs(expected).max(initial=0.0), 1.0)
    np.testing.assert_allclose(got, expected, rtol=0.0, atol=tolerance * scale)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(numpy_kernels, "BLOCK", 16)
    monkeypatch.setattr(numpy_updates, "DOT_BLOCK", 16)


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


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", SMALL)
def test_small_blocks_agree_with_the_plain_kernels(name):
    agree_with_the_plain(SMALL[name], np.float64, 1e-13)


ROUNDING = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)]
)


@ROUNDING
@pytest.mark.parametrize("name", LARGE)
def test_large_arrays_agree_with_the_plain_kernels(name, dtype, tolerance):
    agree_with_the_plain(LARGE[name], dtype, tolerance)


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_arrays(name, implementation):
    case = EMPTY[name]
    for dtype in (np.float32, np.float64):
        y, slopes = gradients(IMPLEMENTATIONS[implementation], case, dtype)
        assert y.dtype == dtype
        for array, slope in zip(case.arrays, slopes, strict=True):
            assert (slope.shape, slope.dtype) == (array.shape, dtype)
            assert np.isfinite(slope).all()


def agree_with_the_plain(case, dtype, tolerance):
    y, slopes = gradients(CPU, case, dtype)
    expected_y, expected_slopes = gradients(PLAIN, case)
    for got, expected in zip((y, *slopes), (expected_y, *expected_slopes), strict=True):
        assert got.dtype == dtype
        close(got, expected, tolerance)


def strided(array):
    """Return an equal array that no dim of is contiguous."""
    if array.ndim == 0:
        return array
    spread = np.zeros([2 * n for n in array.shape[::-1]], array.dtype).T
    view = spread[tuple(slice(None, None, 2) for _ in array.shape)]
    view[...] = array
    return view


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SMALL)
def test_strided_inputs_give_the_same_and_are_left_alone(name, implementation):
    case, kernel_set = SMALL[name], IMPLEMENTATIONS[implementation]
    y, slopes = gradients(kernel_set, case)
    arrays = [strided(a) for a in case.arrays]
    for a in arrays:
        a.flags.writeable = False
    got = case.forward(kernel_set, *arrays)
    close(got, y, 1e-13)
    grad = strided(np.cos(np.arange(y.size)).reshape(y.shape))
    grad = grad.copy() if grad.ndim == 0 else grad
    grad.flags.writeable = False
    got_slopes = case.backward(kernel_set, grad, *arrays)
    for slope, expected in zip(got_slopes, slopes, strict=True):
        close(slope, expected, 1e-13)
    for a in (got, *got_slopes):
        assert not any(np.shares_memory(a, b) for b in (*arrays, grad))


@pytest.mark.parametrize("name", LARGE)
def test_every_call_gives_the_same_bits(name):
    y, slopes = gradients(CPU, LARGE[name], np.float32)
    again, slopes_again = gradients(CPU, LARGE[name], np.float32)
    for a, b in zip((y, *slopes), (again, *slopes_again), strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_row_does_not_depend_on_the_other_rows():
    x = normal(300, 390).astype(np.float32)
    gain, bias = np.ones(390, np.float32), np.zeros(390, np.float32)
    rows = {
        "gelu": CPU.gelu,
        "layer_norm": lambda a: CPU.layer_norm(a, gain, bias, 1e-5)[0],
        "softmax": CPU.softmax,
    }
    for row_kernel in rows.values():
        whole = row_kernel(x)
        parts = [row_kernel(part) for part in np.array_split(x, 7)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_wanted_gradients_are_returned(implementation):
    kernel_set = IMPLEMENTATIONS[implementation]
    x, gain, bias = layer_norm_case(4, 6).arrays
    _, mean, rstd = kernel_set.layer_norm(x, gain, bias, 1e-5)
    all_norm = kernel_set.layer_norm_backward(x, mean, rstd, gain, x)
    for number in range(8):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        some_norm = kernel_set.layer_norm_backward(x, mean, rstd, gain, x, wanted)
        for is_wanted, got, expected in zip(wanted, some_norm, all_norm, strict=True):
            assert (got is not None) == is_wanted
            if is_wanted:
                assert np.array_equal(got, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation):
    kernel_set = IMPLEMENTATIONS[implementation]
    x = np.array([[1e4, -1e4, 1e4]], np.float32)
    np.testing.assert_array_equal(kernel_set.softmax(x), [[0.5, 0.0, 0.5]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("members", [1, 2, 3, 4, 15])
def test_a_split_vocabulary_gives_the_whole_loss(implementation, members):
    kernel_set = IMPLEMENTATIONS[implementation]
    logits = 5.0 * normal(4, 3, 13)
    targets = np.arange(12).reshape(4, 3)
    grad = normal(4, 3)
    ends = np.cumsum([13 // members + (i < 13 % members) for i in range(members)])
    parts = np.split(logits, ends[:-1], axis=-1)
    firsts = [0, *ends[:-1].tolist()]
    maximum = np.maximum.reduce([kernel_set.xent_local_max(p) for p in parts])
    stats = [
        kernel_set.xent_local_stats(p, targets, f, maximum)
        for p, f in zip(parts, firsts, strict=True)
    ]
    sumexp, target_logit = (sum(s) for s in zip(*stats, strict=True))
    logsumexp = np.log(sumexp) + maximum
    expected = np.log(np.exp(logits).sum(-1))
    expected -= np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    close(logsumexp - target_logit, expected, 1e-13)
    slopes = [
        kernel_set.xent_backward(p, targets, f, logsumexp, grad)
        for p, f in zip(parts, firsts, strict=True)
    ]
    one_hot = np.arange(13) == targets[..., None]
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    close(np.concatenate(slopes, -1), (probability - one_hot) * grad[..., None], 1e-13)


def adamw_by_elements(param, grad, m, v, lr, beta1, beta2, eps, decay, step, scale):
    g = scale * grad
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g**2
    unbiased_m, unbiased_v = m / (1.0 - beta1**step), v / (1.0 - beta2**step)
    param = param - lr * (unbiased_m / (np.sqrt(unbiased_v) + eps) + decay * param)
    return param, m, v


UPDATE_SHAPES = [(), (0, 3), (37,), (5, 7, 3)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", [np.ascontiguousarray, strided])
@pytest.mark.parametrize("shape", UPDATE_SHAPES, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adamw(implementation, shape, decay, layout):
    if shape == ():
        layout = np.copy
    param, m, v = (layout(normal(*shape, seed=s)) for s in range(3))
    v[...] = v * v
    expected = (param.copy(), m.copy(), v.copy())
    for step in (1, 2, 3):
        grad = strided(normal(*shape, seed=step))
        expected = adamw_by_elements(
            expected[0], grad, *expected[1:], 0.01, 0.9, 0.95, 1e-8, decay, step, 0.7
        )
        IMPLEMENTATIONS[implementation].adamw(
            param,
            grad,
            m,
            v,
            lr=0.01,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=decay,
            step=step,
            scale=0.7,
        )
    for got, want in zip((param, m, v), expected, strict=True):
        close(got, want, 1e-14)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", [np.ascontiguousarray, strided])
@pytest.mark.parametrize("shape", UPDATE_SHAPES, ids=str)
@pytest.mark.parametrize("has_momentum", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sgd(implementation, shape, has_momentum, layout):
    if shape == ():
        layout = np.copy
    param = layout(normal(*shape))
    buffer = layout(np.zeros(shape)) if has_momentum else None
    expected, velocity = param.copy(), np.zeros(shape)
    for step in range(3):
        grad = normal(*shape, seed=step + 1)
        update = 0.5 * grad + 0.1 * expected
        velocity = 0.9 * velocity + update if has_momentum else update
        expected = expected - 0.01 * velocity
        IMPLEMENTATIONS[implementation].sgd(
            param, grad, buffer, lr=0.01, momentum=0.9, weight_decay=0.1, scale=0.5
        )
    close(param, expected, 1e-14)
    if buffer is not None:
        close(buffer, velocity, 1e-14)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", UPDATE_SHAPES, ids=str)
def test_sum_of_squares(implementation, shape):
    x = strided(normal(*shape)).astype(np.float32)
    got = IMPLEMENTATIONS[implementation].sum_of_squares(x)
    assert isinstance(got, float)
    assert got == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-14)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sum_of_squares_does_not_saturate_in_float32(implementation):
    x = np.ones(1 << 15, np.float32)
    x[0] = 2.0**13
    expected = 2.0**26 + x.size - 1
    assert IMPLEMENTATIONS[implementation].sum_of_squares(x) == expected


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(implementation, bad):
    all_finite = IMPLEMENTATIONS[implementation].all_finite
    x = normal(5, 11)
    assert all_finite(x) is True
    assert all_finite(x[:0]) is True
    for index in ((0, 0), (4, 10)):
        spoiled = x.copy()
        spoiled[index] = bad
        assert all_finite(spoiled) is False
        assert all_finite(spoiled.T) is False
