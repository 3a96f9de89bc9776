"""Comparing operators in some layout with NumPy, and their gradients with others."""

from __future__ import annotations

import warnings

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case
from tparmpi.sharding import Partial
from tparmpi.testing import laid_out, numerical_gradient


def run(case: Case, place, layouts) -> tuple[float, float]:
    """Largest differences of the values and of any gradient, agreed by all members."""
    return errors(case, place, layouts, *reference(case))


def errors(case: Case, place, layouts, expected, gradients) -> tuple[float, float]:
    """The same, against values and gradients that are given."""
    found, grads = evaluate(case, place.autodiff(), layouts)
    worst = [0.0, 0.0]
    for value, wanted in zip(found, expected, strict=True):
        assert value.shape == wanted.shape
        assert value.dtype == wanted.dtype
        worst[0] = max(worst[0], difference(value, wanted))
    assert set(grads) == set(gradients)
    for i, grad in grads.items():
        assert grad.shape == case.arrays[i].shape
        scale = np.abs(gradients[i]).max(initial=1e-12)
        worst[1] = max(worst[1], difference(grad, gradients[i]) / scale)
    if place.size > 1:
        worst = list(the_group(place).all_reduce(np.array(worst), "max"))
    return worst[0], worst[1]


def difference(found, expected) -> float:
    """Largest difference, 0 where both are not a number or the same infinity."""
    if found.dtype.kind not in "fc":
        return float((found != expected).any())
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        return float(np.where(same, 0.0, np.abs(found - expected)).max(initial=0.0))


def evaluate(case: Case, place, layouts=None):
    """Values by our operator, and the gradients of their weighted sum."""
    tensors = [
        laid_out(array, place, layouts[number] if layouts else None)
        for number, array in enumerate(case.arrays)
    ]
    for i in case.differentiable:
        tensors[i].require_grad()
    with warnings.catch_warnings(), tpm.random.scope(seed=1):
        warnings.simplefilter("ignore", tpm.ImplicitGatherWarning)
        results = as_tuple(case.apply(*tensors))
        if case.differentiable:
            weighted(results, place).backward()
    grads = {}
    for i in case.differentiable:
        grad = tensors[i].grad
        assert grad is not None
        grads[i] = grad.numpy()
    return [result.numpy() for result in results], grads


def as_tuple(results) -> tuple:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def weighted(results, place):
    """One number that every floating element of the results has its own part in."""
    terms = [
        (result * tpm.tensor(cotangent(result.shape), place)).sum()
        for result in results
        if result.dtype.kind == "f"
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def the_group(place):
    return MEMBERS.setdefault(place, tpm.group(place.devices))


MEMBERS: dict = {}


def cotangent(shape) -> np.ndarray:
    return np.cos(np.arange(int(np.prod(shape)))).reshape(shape) + 0.5


REFERENCES: dict = {}


def reference(case: Case):
    """Values by NumPy, and gradients on one device, checked by finite differences."""
    if id(case) not in REFERENCES:
        device = tpm.device()
        values, gradients = unchecked_reference(case)

        def apply(*tensors):
            with tpm.random.scope(seed=1):
                return weighted(as_tuple(case.apply(*tensors)), device)

        for i, gradient in gradients.items():
            expected = numerical_gradient(apply, case.arrays, i, device, step=1e-3)
            scale = np.abs(expected).max(initial=1e-12)
            assert difference(gradient, expected) < 1e-6 * scale, case.operator
        REFERENCES[id(case)] = values, gradients
    return REFERENCES[id(case)]


def unchecked_reference(case: Case):
    """Values by NumPy, and gradients on one device."""
    values, gradients = evaluate(case, tpm.device().autodiff())
    if case.reference is not None:
        values = [np.asarray(v) for v in as_tuple(case.reference(*case.arrays))]
    return values, gradients


def can_be_had(case: Case, layouts) -> bool:
    """A weighted id is no id: pending sums of integers are not made."""
    return not any(
        isinstance(p, Partial) and array.dtype.kind != "f"
        for array, layout in zip(case.arrays, layouts, strict=True)
        for p in layout
    )
