"""Every operator in every layout on 1 to 4 ranks, forward and gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases import CASES, Case
from tests.comparison import can_be_had, difference, evaluate, run, the_group
from tparmpi.sharding import REPLICATE, Partial, Shard
from tparmpi.tensors import registry
from tparmpi.tensors.plan import Plan

pytestmark = pytest.mark.mpi(min_size=4)

NAMES = [
    f"{case.operator}-{case.name}" if case.name else case.operator for case in CASES
]


def test_every_operator_has_a_case():
    assert {case.operator for case in CASES} == set(registry)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_operator_on_groups(case):
    """Forward as NumPy, gradients as on one device (float64)."""
    for members in (1, 2, 3, 4):
        place = tpm.group(tpm.devices()[:members])
        if not place.is_member:
            continue
        for layouts in product(*case.layouts(1)):
            if not can_be_had(case, layouts):
                continue
            forward, backward = run(case, place, layouts)
            assert forward < 1e-12, (members, layouts)
            assert backward < 1e-10, (members, layouts)


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
        if not can_be_had(case, layouts):
            continue
        found, grads = evaluate(single, place.autodiff(), layouts)
        for value, wanted in [
            *zip(found, expected, strict=True),
            *((grads[i], gradients[i]) for i in gradients),
        ]:
            scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-12)
            worst = max(worst, difference(value, wanted) / scale)
    # Some hundred roundings of 6e-8 each, relative to the largest element.
    assert the_group(place).all_reduce(np.array(worst), "max") < 1e-5


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
        if not can_be_had(case, layouts):
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
