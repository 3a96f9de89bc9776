"""Every operator in every layout on 1 to 4 ranks, forward and gradient."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases import CASES, Case
from tparmpi.sharding import REPLICATE, Partial, Shard
from tparmpi.tensors import registry
from tparmpi.tensors.plan import Plan
from tparmpi.testing import laid_out, numerical_gradient

pytestmark = pytest.mark.mpi(min_size=4)

NAMES = [
    f"{case.operator}-{case.name}" if case.name else case.operator for case in CASES
]


def test_every_operator_has_a_case():
    assert {case.operator for case in CASES} == set(registry)


def run(case: Case, place, layouts) -> tuple[float, float]:
    """Largest differences of the values and of any gradient, agreed by all members."""
    expected, gradients = reference(case)
    found, grads = evaluate(case, place.autodiff(), layouts)
    errors = [0.0, 0.0]
    for value, wanted in zip(found, expected, strict=True):
        assert value.shape == wanted.shape
        assert value.dtype == wanted.dtype
        errors[0] = max(errors[0], difference(value, wanted))
    assert set(grads) == set(gradients)
    for i, grad in grads.items():
        assert grad.shape == case.arrays[i].shape
        scale = np.abs(gradients[i]).max(initial=1e-12)
        errors[1] = max(errors[1], difference(grad, gradients[i]) / scale)
    if place.size > 1:
        group = tpm_group(place)
        errors = list(group.all_reduce(np.array(errors), "max"))
    return errors[0], errors[1]


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


def tpm_group(place):
    return MEMBERS.setdefault(place, tpm.group(place.devices))


MEMBERS: dict = {}


def cotangent(shape) -> np.ndarray:
    return np.cos(np.arange(int(np.prod(shape)))).reshape(shape) + 0.5


REFERENCES: dict = {}


def reference(case: Case):
    """Values by NumPy, and gradients on one device, checked by finite differences."""
    if id(case) not in REFERENCES:
        device = tpm.device()
        found, gradients = evaluate(case, device.autodiff())
        values = found
        if case.reference is not None:
            values = [np.asarray(v) for v in as_tuple(case.reference(*case.arrays))]

        def apply(*tensors):
            with tpm.random.scope(seed=1):
                return weighted(as_tuple(case.apply(*tensors)), device)

        for i, gradient in gradients.items():
            expected = numerical_gradient(apply, case.arrays, i, device, step=1e-3)
            scale = np.abs(expected).max(initial=1e-12)
            assert difference(gradient, expected) < 1e-6 * scale, case.operator
        REFERENCES[id(case)] = values, gradients
    return REFERENCES[id(case)]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_operator_on_groups(case):
    """Forward as NumPy, gradients as on one device (float64)."""
    for members in (1, 2, 3, 4):
        place = tpm.group(tpm.devices()[:members])
        if not place.is_member:
            continue
        for layouts in product(*case.layouts(1)):
            if operand_cannot_be_had(case, layouts):
                continue
            forward, backward = run(case, place, layouts)
            assert forward < 1e-12, (members, layouts)
            assert backward < 1e-10, (members, layouts)


def operand_cannot_be_had(case: Case, layouts) -> bool:
    """A weighted id is no id: pending sums of integers are not made."""
    return any(
        isinstance(p, Partial) and array.dtype.kind != "f"
        for array, layout in zip(case.arrays, layouts, strict=True)
        for p in layout
    )


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_operator_in_float32_on_three(case):
    """The same in single precision, against double on one device."""
    double = cast_floats(cast_floats(case, np.float32), np.float64)
    single = cast_floats(case, np.float32)
    expected, gradients = evaluate(double, tpm.device().autodiff())
    place = tpm.group(tpm.devices()[:3])
    if not place.is_member:
        return
    worst = 0.0
    for layouts in product(*case.layouts(1)):
        if operand_cannot_be_had(case, layouts):
            continue
        found, grads = evaluate(single, place.autodiff(), layouts)
        for value, wanted in [
            *zip(found, expected, strict=True),
            *((grads[i], gradients[i]) for i in gradients),
        ]:
            scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-12)
            worst = max(worst, difference(value, wanted) / scale)
    # Some hundred roundings of 6e-8 each, relative to the largest element.
    assert tpm_group(place).all_reduce(np.array(worst), "max") < 1e-5


def cast_floats(case: Case, dtype) -> Case:
    arrays = [a.astype(dtype) if a.dtype.kind == "f" else a for a in case.arrays]
    return replace(case, arrays=arrays)


MESH_LAYOUTS = 64
"""Combinations of layouts on two axes up to which a case runs in all of them."""


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_operator_on_a_mesh(case):
    """All layouts on two axes, or so many of them that each operand has each."""
    mesh = tpm.mesh(dp=2, tp=2)
    choices = case.layouts(2)
    if prod(map(len, choices)) <= MESH_LAYOUTS:
        rounds = list(product(*choices))
    else:
        rounds = [
            tuple(c[(turn * (3 * i + 1) + i) % len(c)] for i, c in enumerate(choices))
            for turn in range(max(map(len, choices)))
        ]
    for layouts in rounds:
        if operand_cannot_be_had(case, layouts):
            continue
        forward, backward = run(case, mesh, layouts)
        assert forward < 1e-12, layouts
        assert backward < 1e-10, layouts


def test_a_partial_gradient_called_replicate_is_found(monkeypatch):
    case = CASES[NAMES.index("linear")]
    place = tpm.group(tpm.devices())
    layouts = [(REPLICATE,), (Shard(1),), (Shard(0),)]
    assert max(run(case, place, layouts)) < 1e-6
    original = Plan.gradient_layout

    def wrong(self, operand, pending):
        return tuple(
            REPLICATE if isinstance(p, Partial) else p
            for p in original(self, operand, pending)
        )

    monkeypatch.setattr(Plan, "gradient_layout", wrong)
    assert run(case, place, layouts)[1] > 1e-3


def test_a_bias_added_on_every_member_is_found(monkeypatch):
    case = CASES[NAMES.index("linear")]
    place = tpm.group(tpm.devices())
    layouts = [(Shard(2),), (Shard(0),), (REPLICATE,)]
    assert max(run(case, place, layouts)) < 1e-6
    monkeypatch.setattr(Plan, "leads", lambda self, operand: True)
    assert run(case, place, layouts)[0] > 1e-3
