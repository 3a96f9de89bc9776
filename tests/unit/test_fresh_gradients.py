"""Gradients that operators give away: nothing else holds them, no one copies them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases import CASES
from tparmpi.tensors import registry

FRESH = [record for record in registry.values() if record.fresh]


def arrays_in(saved):
    if isinstance(saved, tuple):
        return [array for item in saved for array in arrays_in(item)]
    return [saved] if isinstance(saved, np.ndarray) else []


def watch(monkeypatch, record, seen):
    backward = record.backward

    def watched(plan, saved, grad, wanted):
        made = backward(plan, saved, grad, wanted)
        seen.append((made, [grad, *arrays_in(saved)]))
        return made

    monkeypatch.setattr(record, "backward", watched)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("record", FRESH, ids=lambda record: record.name)
def test_nothing_else_holds_a_fresh_gradient(monkeypatch, record, dtype):
    seen: list = []
    watch(monkeypatch, record, seen)
    device = tpm.device().autodiff()
    for case in CASES:
        if case.operator != record.name:
            continue
        arrays = [
            array.astype(dtype) if array.dtype.kind == "f" else array
            for array in case.arrays
        ]
        tensors = [tpm.tensor(array, device) for array in arrays]
        for number in case.differentiable:
            tensors[number].require_grad()
        y = case.apply(*tensors)
        y.backward(tpm.tensor(np.ones(y.shape, y.dtype), device.inner()))
    assert seen
    for made, others in seen:
        gradients = [g for g in made if g is not None and np.ndim(g)]
        assert all(g.flags.writeable for g in gradients)
        pairs = [
            *combinations(gradients, 2),
            *((g, other) for g in gradients for other in others),
        ]
        assert not any(np.shares_memory(*pair) for pair in pairs)


def test_a_fresh_gradient_is_not_copied(monkeypatch):
    seen: list = []
    watch(monkeypatch, registry["linear"], seen)
    device = tpm.device().autodiff()
    x = tpm.tensor(np.ones((2, 3, 4)), device)
    weight, bias = (
        tpm.tensor(np.ones(shape), device).require_grad() for shape in ((4, 5), (5,))
    )
    tpm.linear(x, weight, bias).sum().backward()
    ((_, of_weight, of_bias), _), *_ = seen
    assert np.shares_memory(weight.grad.array, of_weight)
    assert np.shares_memory(bias.grad.array, of_bias)
    tpm.linear(x, weight, bias).sum().backward()
    assert np.shares_memory(weight.grad.array, of_weight)
    np.testing.assert_array_equal(weight.grad.numpy(), np.full((4, 5), 12.0))


@pytest.mark.parametrize(
    ("rule", "shapes"),
    [
        ("btd,df->btf", [(2, 3, 4), (4, 5)]),
        ("btd,dhe->bthe", [(2, 3, 4), (4, 2, 5)]),
        ("bthe,hed->btd", [(2, 3, 2, 5), (2, 5, 4)]),
        ("btd,vd->btv", [(2, 3, 4), (6, 4)]),
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
    ],
)
def test_gradients_of_products_lie_in_memory_as_the_operands_do(rule, shapes):
    device = tpm.device().autodiff()
    a, b = (
        tpm.tensor(np.sin(np.arange(np.prod(shape))).reshape(shape), device)
        for shape in shapes
    )
    tpm.einsum(rule, a.require_grad(), b.require_grad()).sum().backward()
    assert a.grad.array.flags.c_contiguous
    assert b.grad.array.flags.c_contiguous
