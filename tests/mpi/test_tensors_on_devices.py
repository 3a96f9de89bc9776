"""Tensors on groups of every transport: the same numbers, no host array in between."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tparmpi as tpm
from tests import ways
from tests.cases import arithmetic, comparison, functions
from tests.ways import Way

pytestmark = pytest.mark.mpi(min_size=4)

# Other members' sums are folded in another order than NumPy's.
TOLERANCE = 1e-13


@pytest.fixture(params=ways.NAMES)
def way(request, monkeypatch) -> Iterator[Way]:
    made = Way(request.param, monkeypatch)
    yield made
    made.check()
    made.close()


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Distinct numbers of order one."""
    return np.sin(np.arange(1, np.prod(shape) + 1) * 1.7 + seed).reshape(shape)


def test_every_move_between_layouts(way):
    trio = way.group([1, 0, 2])
    if not trio.is_member:
        return
    whole = values(7, 4)
    replicated = tpm.tensor(way.put(whole), trio)
    pending = tpm.from_local(way.put(whole), trio, tpm.Partial(), shape=(7, 4))
    rows = replicated.with_sharding(tpm.Shard(0))
    columns = rows.with_sharding(tpm.Shard(1))
    for tensor in (replicated, rows, columns, rows.with_sharding(tpm.Replicate())):
        assert np.array_equal(tensor.numpy(), whole)
    total = whole + whole + whole
    for tensor in (pending, pending.with_sharding(tpm.Shard(1))):
        assert np.array_equal(tensor.numpy(), total)


def test_a_layer_and_its_gradients(way):
    """Columns, then rows, as a tensor-parallel layer has them."""
    trio = way.group([2, 0, 1])
    if not trio.is_member:
        return
    x, first, second = values(5, 3), values(3, 8, seed=1), values(8, 2, seed=2)
    place = trio.autodiff()
    w = tpm.tensor(way.put(first), place).with_sharding(tpm.Shard(1)).require_grad()
    v = tpm.tensor(way.put(second), place).with_sharding(tpm.Shard(0)).require_grad()
    with tpm.ledger() as led:
        y = (tpm.tensor(way.put(x), place) @ w).gelu() @ v
        loss = y.with_sharding(tpm.Replicate()).sum()
        loss.backward()
    assert led.count("all_reduce") == led.count() == 1
    h = x @ first
    inner = np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * h**2) * (1 - inner**2)
    active, ones = h / 2 * (1 + inner), np.ones((5, 2))
    back = ones @ second.T * ((1 + inner) / 2 + h / 2 * slope)
    for got, wanted in [
        (y, active @ second),
        (w.grad, x.T @ back),
        (v.grad, active.T @ ones),
    ]:
        assert np.allclose(got.numpy(), wanted, rtol=0, atol=TOLERANCE)


def test_indices_that_change_their_owner(way):
    """Slices, joins and paddings of a split dim, and their gradients."""
    trio = way.group([1, 2, 0])
    if not trio.is_member:
        return
    whole = values(7, 4)
    x = tpm.tensor(way.put(whole), trio.autodiff()).with_sharding(tpm.Shard(0))
    x.require_grad()
    with tpm.no_implicit_gather():
        y = tpm.concat([x[::-2], x.pad(((1, 2), (0, 0)), 1.5)])
        (y * y).sum().backward()
    padded = np.pad(whole, ((1, 2), (0, 0)), constant_values=1.5)
    assert np.array_equal(y.numpy(), np.concatenate([whole[::-2], padded]))
    gradient = 2 * whole
    gradient[::2] *= 2
    assert np.array_equal(x.grad.numpy(), gradient)


# The error function is cupyx's on a GPU, which the simulated one has not.
ELEMENTWISE = [
    case
    for case in (*arithmetic.CASES, *functions.CASES, *comparison.CASES)
    if case.reference is not None
    and case.operator != "erf"
    and (case.operator, case.name) != ("gelu", "exact")
]


def test_elementwise_operators(way):
    """Values, and gradients as on the host, of arrays that NumPy may not read."""
    pair = way.group([0, 1])
    if not pair.is_member:
        return
    host = tpm.device().autodiff()
    for case in ELEMENTWISE:
        tensors = [tpm.tensor(way.put(array), pair.autodiff()) for array in case.arrays]
        expected = [tpm.tensor(array, host) for array in case.arrays]
        for number in case.differentiable:
            tensors[number].require_grad()
            expected[number].require_grad()
        found, wanted = case.apply(*tensors), case.apply(*expected)
        np.testing.assert_allclose(
            found.numpy(), wanted.numpy(), rtol=TOLERANCE, err_msg=case.operator
        )
        if not case.differentiable:
            continue
        (found * found).sum().backward()
        (wanted * wanted).sum().backward()
        for number in case.differentiable:
            np.testing.assert_allclose(
                tensors[number].grad.numpy(),
                expected[number].grad.numpy(),
                rtol=TOLERANCE,
                atol=TOLERANCE,
                err_msg=case.operator,
            )
