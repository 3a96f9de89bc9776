"""Operators of networks on one device: large values, narrow dtypes, refusals."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases import network as formulas
from tparmpi.backend import dtypes

PLACE = tpm.device()


def array(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def tensor(values, dtype=None, *, grad=False):
    values = np.asarray(values)
    if dtype is not None:
        values = values.astype(dtypes.dtype(dtype))
    return tpm.tensor(values, PLACE.autodiff() if grad else PLACE)


def wide(x):
    return x.numpy().astype(float)


TOLERANCES = [("float32", 2e-6), ("float16", 4e-3), ("bfloat16", 3e-2)]
BY_NAME = {
    "softmax": (tpm.softmax, lambda x: formulas.softmax(x, -1), 1),
    "log_softmax": (
        tpm.log_softmax,
        lambda x: np.log(formulas.softmax(x, -1)),
        1,
    ),
    "layer_norm": (tpm.layer_norm, formulas.layer_norm_of, 1),
    "rms_norm": (tpm.rms_norm, formulas.rms_norm, 1),
    "group_norm": (
        lambda x: tpm.group_norm(x, 4),
        lambda x: formulas.group_norm(x, 4),
        1,
    ),
    "swiglu": (tpm.swiglu, lambda x, y: formulas.silu(x) * y, 2),
    "geglu": (tpm.geglu, lambda x, y: formulas.gelu(x) * y, 2),
    "mse": (tpm.mse, lambda x, y: (x - y) ** 2, 2),
    "bce": (tpm.bce, formulas.bce, 2),
}


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("name", BY_NAME)
def test_narrow_dtypes(name, dtype, tolerance):
    """Computed in float32 and rounded once: half a unit in the last place of the
    result, relative to the largest, and the operands' rounding not counted.
    """
    apply, formula, count = BY_NAME[name]
    operands = [
        tensor(array(6, 64, seed=i), dtype, grad=True).require_grad()
        for i in range(count)
    ]
    result = apply(*operands)
    assert result.dtype == dtypes.dtype(dtype)
    expected = formula(*map(wide, operands))
    scale = max(np.abs(expected).max(), 1)
    np.testing.assert_allclose(wide(result), expected, rtol=0, atol=tolerance * scale)
    result.sum().backward()
    for operand in operands:
        assert operand.grad.dtype == operand.dtype
        assert np.isfinite(wide(operand.grad)).all()


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_losses_of_narrow_logits(dtype, tolerance):
    logits = tensor(3 * array(5, 7, 40), dtype, grad=True).require_grad()
    targets = np.arange(35).reshape(5, 7) % 40
    loss = tpm.cross_entropy(logits, tensor(targets), label_smoothing=0.1)
    assert loss.dtype == logits.dtype
    expected = formulas.smoothed(wide(logits), targets, 0.1)
    np.testing.assert_allclose(wide(loss), expected, rtol=2 * tolerance, atol=tolerance)
    total, weight = tpm.cross_entropy_sum(logits, tensor(targets))
    assert total.dtype == dtypes.accumulation_dtype(logits.dtype)
    assert (weight.dtype, weight.item()) == (np.float64, 35.0)
    total.backward()
    assert logits.grad.dtype == logits.dtype


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_large_values_do_not_overflow(dtype):
    x = np.array([[1e4, -1e4, 0.0, 9984.0]])
    given = tensor(x, dtype)
    exact = wide(given)
    np.testing.assert_allclose(
        wide(given.softmax()), formulas.softmax(exact, -1), atol=1e-7
    )
    log_softmax = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    np.testing.assert_allclose(
        wide(given.log_softmax()), log_softmax, rtol=5e-3, atol=1e-7
    )
    for target in range(4):
        loss = tpm.cross_entropy(given, tensor([target]))
        np.testing.assert_allclose(
            wide(loss), -log_softmax[:, target], rtol=5e-3, atol=1e-7
        )
    ones = tensor(np.ones_like(x), dtype)
    for target in (ones, ones * 0.0):
        assert np.isfinite(wide(tpm.bce(given, target))).all()
    for unit in (tpm.swiglu, tpm.geglu):
        expected = np.maximum(exact, 0)
        np.testing.assert_allclose(wide(unit(given, ones)), expected, atol=1e-6)
    for norm in (tpm.layer_norm, tpm.rms_norm, lambda x: tpm.group_norm(x, 2)):
        assert np.isfinite(wide(norm(given))).all()


def test_gradients_at_large_values_are_finite():
    x = tensor([[1e4, -1e4, 0.0, 300.0]], "float32", grad=True).require_grad()
    y = x.softmax() + x.log_softmax() + tpm.swiglu(x, x) + tpm.bce(x, x)
    loss = y.sum() + tpm.cross_entropy(x, tensor([1]), label_smoothing=0.5).sum()
    loss.backward()
    assert np.isfinite(x.grad.numpy()).all()


def test_the_loss_of_a_sure_prediction_has_no_rounding_error():
    """The difference to the peak is exact in float32, where the logsumexp is not."""
    logits = tensor([[10000.0, 9990.0, 0.0]], "float32")
    loss = tpm.cross_entropy(logits, tensor([0])).item()
    assert loss == pytest.approx(np.log1p(np.exp(-10.0)), rel=1e-3)


def test_ignored_positions_have_no_loss_and_no_gradient():
    values = array(4, 5)
    values[1] = np.nan
    values[2] = np.inf
    logits = tensor(values, grad=True).require_grad()
    targets = np.array([3, -100, -100, 0])
    with np.errstate(invalid="ignore"):
        loss = tpm.cross_entropy(logits, tensor(targets), ignore_index=-100)
        expected = formulas.smoothed(values[[0, 3]], targets[[0, 3]])
        np.testing.assert_allclose(loss.numpy()[[0, 3]], expected, rtol=1e-14)
        assert not loss.numpy()[[1, 2]].any()
        loss.sum().backward()
    assert not logits.grad.numpy()[[1, 2]].any()
    assert logits.grad.numpy()[[0, 3]].all()


def test_only_ignored_positions_and_none():
    logits = tensor(array(2, 3, 4), grad=True).require_grad()
    targets = tensor(np.full((2, 3), 2))
    total, weight = tpm.cross_entropy_sum(logits, targets, ignore_index=2)
    assert (total.item(), weight.item()) == (0.0, 0.0)
    total.backward()
    assert not logits.grad.numpy().any()
    empty = tensor(np.ones((0, 4))), tensor(np.ones(0, int))
    for ignored in (None, 2):
        total, weight = tpm.cross_entropy_sum(*empty, ignore_index=ignored)
        assert (total.item(), weight.item()) == (0.0, 0.0)
    for sums in (tpm.mse_sum, tpm.bce_sum):
        total, weight = sums(empty[0], empty[0])
        assert (total.item(), weight.item()) == (0.0, 0.0)


def test_one_position_without_dims():
    for ignored in (None, 1, 2):
        loss = tpm.cross_entropy(
            tensor(array(4)), tensor(np.array(2)), ignore_index=ignored
        )
        expected = formulas.smoothed(array(4), np.array(2), 0.0, ignored)
        np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_dims(shape):
    for apply in (
        tpm.softmax,
        tpm.log_softmax,
        tpm.layer_norm,
        tpm.rms_norm,
        lambda x: tpm.group_norm(x, 1),
        lambda x: tpm.swiglu(x, x),
        lambda x: tpm.geglu(x, x),
        lambda x: tpm.rotary(tpm.reshape(x, (*shape, 1)).expand((*shape, 2))),
    ):
        x = tensor(np.ones(shape), grad=True).require_grad()
        y = apply(x)
        assert y.shape[:2] == shape
        y.sum().backward()
        assert x.grad.shape == shape


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_narrow_tables_sum_their_gradients_in_float32(dtype):
    table = tensor(np.ones((5, 3)), dtype, grad=True).require_grad()
    rows = tpm.embedding(table, tensor(np.arange(3072) // 1024))
    assert rows.dtype == table.dtype
    rows.sum().backward()
    assert table.grad.dtype == table.dtype
    expected = np.repeat([1024.0, 1024, 1024, 0, 0], 3).reshape(5, 3)
    np.testing.assert_array_equal(wide(table.grad), expected)


def test_minus_infinity_has_no_part():
    x = np.array([[1.0, -np.inf, 2.0]])
    expected = np.array([[1 / (1 + np.e), 0, np.e / (1 + np.e)]])
    np.testing.assert_allclose(tensor(x).softmax().numpy(), expected, rtol=1e-14)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(
            tensor(x).log_softmax().numpy(), np.log(expected), rtol=1e-14
        )


def test_rotary_continues_from_an_offset():
    x = tensor(array(2, 6, 3, 8))
    whole = tpm.rotary(x).numpy()
    rest = tpm.rotary(tensor(x.numpy()[:, 4:]), offset=4).numpy()
    np.testing.assert_array_equal(rest, whole[:, 4:])
    by_positions = tpm.rotary(x, tensor(np.arange(6))).numpy()
    np.testing.assert_array_equal(by_positions, whole)
    norms = np.linalg.norm(whole, axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(x.numpy(), axis=-1), rtol=1e-13)


def test_rotary_turns_late_positions_exactly():
    """A float32 angle of position 10^6 would be wrong by 0.03."""
    x = tensor(np.ones((1, 1, 4)), "float32")
    found = tpm.rotary(x, offset=1_000_000).numpy()
    expected = formulas.rotary(np.ones((1, 1, 4)), offset=1_000_000)
    np.testing.assert_allclose(found, expected, atol=1e-6)


REFUSED = [
    (tpm.ShapeError, "softmax: .* has no dim 2", lambda x: x.softmax(2)),
    (tpm.ShapeError, "log_softmax: .* has no dim -3", lambda x: x.log_softmax(-3)),
    (
        tpm.UsageError,
        "layer_norm: a bias without a gain",
        lambda x: tpm.layer_norm(x, None, x),
    ),
    (tpm.ShapeError, "group_norm: .* multiple of 3 groups", lambda x: x.group_norm(3)),
    (tpm.ShapeError, "group_norm: .* multiple of 0 groups", lambda x: x.group_norm(0)),
    (
        tpm.ShapeError,
        r"swiglu: 'gate' and 'up' .* \(3, 4\) and \(4,\)",
        lambda x: tpm.swiglu(x, tensor(np.ones(4))),
    ),
    (
        tpm.ShapeError,
        "mse: 'prediction' and 'target' must have one shape",
        lambda x: tpm.mse(x, tensor(np.ones((3, 1)))),
    ),
    (
        tpm.ShapeError,
        "bce: 'logits' and 'target' must have one shape",
        lambda x: tpm.bce_sum(x, tensor(np.ones((3, 1)))),
    ),
    (
        tpm.UsageError,
        "label_smoothing must be .* below 1, it is 1",
        lambda x: tpm.cross_entropy(x, tensor([0, 1, 2]), label_smoothing=1.0),
    ),
    (
        tpm.UsageError,
        "the id 4 is outside the vocabulary of 4",
        lambda x: tpm.cross_entropy(x, tensor([0, 4, -1]), ignore_index=-1),
    ),
    (
        tpm.UsageError,
        "the id -1 is outside",
        lambda x: tpm.cross_entropy(x, tensor([0, 3, -1]), ignore_index=-2),
    ),
    (tpm.ShapeError, r"rotary: x must be \(B, T, ..., E\)", tpm.rotary),
    (
        tpm.ShapeError,
        "E even",
        lambda x: tpm.rotary(tensor(np.ones((2, 3, 5)))),
    ),
    (
        tpm.ShapeError,
        r"rotary: positions must be \(T,\) or \(B, T\)",
        lambda x: tpm.rotary(tensor(np.ones((2, 3, 4))), tensor([1, 2])),
    ),
    (
        tpm.UsageError,
        "rotary: positions must be integers, they are float64",
        lambda x: tpm.rotary(tensor(np.ones((2, 3, 4))), x),
    ),
    (
        tpm.UsageError,
        "rotary: base must be positive",
        lambda x: tpm.rotary(tensor(np.ones((2, 3, 4))), base=0),
    ),
]


@pytest.mark.parametrize(("error", "message", "apply"), REFUSED)
def test_what_does_not_fit_is_refused(error, message, apply):
    with pytest.raises(error, match=message):
        apply(tensor(np.ones((3, 4))))
