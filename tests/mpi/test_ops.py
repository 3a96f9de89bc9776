"""Every operator in every layout on 1 to 4 ranks, forward and gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.sharding import REPLICATE, Partial, Shard
from tparmpi.tensors import registry
from tparmpi.tensors.plan import Plan
from tparmpi.testing import all_layouts, laid_out, numerical_gradient

pytestmark = pytest.mark.mpi(min_size=4)

SPLIT_AXES = pytest.mark.parametrize("members", [1, 2, 3, 4])


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Distinct numbers of order one, so that no permuted result can pass."""
    count = int(np.prod(shape))
    return np.sin(np.arange(1, count + 1) * 1.7 + seed).reshape(shape) + 0.1 * seed


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def attention(q, k, v, causal=True):
    scores = np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    return np.einsum("bhts,bshe->bthe", softmax(scores, -1), v)


def layer_norm(x, gain, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * gain + bias


def cross_entropy(logits, targets):
    return -np.log(np.take_along_axis(softmax(logits, -1), targets[..., None], -1))[
        ..., 0
    ]


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@dataclass
class Case:
    """One operator with operands and the NumPy function it must equal."""

    operator: str
    apply: Callable
    reference: Callable
    arrays: list[np.ndarray]
    name: str = ""
    whole: dict[int, set[int]] = field(default_factory=dict)
    """Dims by operand that are left unsplit, to keep the number of layouts small."""

    def layouts(self, axes: int) -> list[list]:
        return [
            [
                layout
                for layout in all_layouts(a.ndim, axes, partial=a.dtype.kind == "f")
                if not any(
                    isinstance(p, Shard) and p.dim in self.whole.get(number, ())
                    for p in layout
                )
            ]
            for number, a in enumerate(self.arrays)
        ]


IDS = np.array([[3, 0, 6], [6, 2, 5]])
CASES = [
    Case("add", tpm.add, np.add, [values(5, 3), values(3, seed=1)]),
    Case("add", tpm.add, np.add, [values(5, 1), values(2, 1, 3, seed=1)], "broadcast"),
    Case("sub", tpm.sub, np.subtract, [values(5, 3), values(5, 1, seed=1)]),
    Case("mul", tpm.mul, np.multiply, [values(5, 3), values(3, seed=1)]),
    Case("scale", lambda x: x * 2.5, lambda x: x * 2.5, [values(5, 3)]),
    Case("gelu", tpm.gelu, gelu, [values(5, 3)]),
    Case(
        "cast",
        lambda x: registry["cast"](x, dtype=np.dtype(float)),
        lambda x: x,
        [values(5, 3)],
    ),
    Case(
        "einsum",
        lambda x, w: tpm.einsum("btd,dhe->bthe", x, w),
        lambda x, w: np.einsum("btd,dhe->bthe", x, w),
        [values(2, 3, 5), values(5, 3, 2, seed=1)],
    ),
    Case(
        "einsum",
        lambda x, w: tpm.einsum("bthe,hed->btd", x, w),
        lambda x, w: np.einsum("bthe,hed->btd", x, w),
        [values(2, 2, 3, 2), values(3, 2, 5, seed=1)],
        "heads",
    ),
    Case(
        "einsum",
        lambda x, y: tpm.einsum("abc,cad->dba", x, y),
        lambda x, y: np.einsum("abc,cad->dba", x, y),
        [values(2, 3, 4), values(4, 2, 5, seed=1)],
        "permuted",
    ),
    Case(
        "einsum",
        lambda x, y, z: tpm.einsum("ab,bc,c->a", x, y, z),
        lambda x, y, z: np.einsum("ab,bc,c->a", x, y, z),
        [values(3, 4), values(4, 2, seed=1), values(2, seed=2)],
        "three",
    ),
    Case(
        "einsum",
        lambda x: tpm.einsum("ab->b", x),
        lambda x: np.einsum("ab->b", x),
        [values(3, 4)],
        "one",
    ),
    Case(
        "einsum",
        lambda x, y: tpm.einsum("ab,cd->ac", x, y),
        lambda x, y: np.einsum("ab,cd->ac", x, y),
        [values(3, 4), values(2, 5, seed=1)],
        "lone",
    ),
    Case("einsum", tpm.matmul, np.matmul, [values(5, 4), values(4, 3)], "matmul"),
    Case("einsum", tpm.matmul, np.matmul, [values(4), values(4, 3)], "vector"),
    Case(
        "einsum",
        tpm.matmul,
        np.matmul,
        [values(1, 5, 4), values(3, 4, 2)],
        "batch",
        whole={0: {0}},
    ),
    Case(
        "linear",
        lambda x, w, b: tpm.linear(x, w, b, "btd,df->btf"),
        lambda x, w, b: x @ w + b,
        [values(2, 3, 5), values(5, 4, seed=1), values(4, seed=2)],
    ),
    Case(
        "linear",
        lambda x, w, b: tpm.linear(x, w, b, "btd,dhe->bthe"),
        lambda x, w, b: np.einsum("btd,dhe->bthe", x, w) + b,
        [values(1, 2, 5), values(5, 3, 2, seed=1), values(3, 2, seed=2)],
        "heads",
        whole={0: {0}, 1: {2}, 2: {1}},
    ),
    Case("sum", lambda x: x.sum(1), lambda x: x.sum(1), [values(5, 3, 2)]),
    Case("sum", lambda x: x.sum(), lambda x: x.sum(), [values(5, 3)], "all"),
    Case(
        "sum",
        lambda x: x.sum((0, 2), keepdims=True),
        lambda x: x.sum((0, 2), keepdims=True),
        [values(5, 3, 2)],
        "keepdims",
    ),
    Case("sum", lambda x: x.mean(0), lambda x: x.mean(0), [values(5, 3)], "mean"),
    Case(
        "reshape",
        lambda x: x.reshape((2, 4, 3)),
        lambda x: x.reshape(2, 4, 3),
        [values(8, 3)],
    ),
    Case(
        "reshape",
        lambda x: x.reshape((2, -1)),
        lambda x: x.reshape(2, -1),
        [values(2, 4, 3)],
        "merge",
    ),
    Case(
        "reshape",
        lambda x: x.reshape((4, 5)),
        lambda x: x.reshape(4, 5),
        [values(2, 5, 2)],
        "mixed",
    ),
    Case(
        "transpose",
        lambda x: x.transpose((2, 0, 1)),
        lambda x: x.transpose(2, 0, 1),
        [values(5, 3, 2)],
    ),
    Case(
        "split",
        lambda x: (lambda a, b, c: a * 2 + c.sum(1, keepdims=True) - b)(
            *x.split((2, 2, 1), 1)
        ),
        lambda x: x[:, :2] * 2 + x[:, 4:] - x[:, 2:4],
        [values(3, 5)],
    ),
    Case(
        "split",
        lambda x: x.split((2, 3), 1)[1],
        lambda x: x[:, 2:],
        [values(3, 5)],
        "one_used",
    ),
    Case(
        "concat",
        lambda x, y: tpm.concat((x, y), 1),
        lambda x, y: np.concatenate((x, y), 1),
        [values(3, 2), values(3, 4, seed=1)],
    ),
    Case("softmax", lambda x: x.softmax(1), lambda x: softmax(x, 1), [values(3, 5)]),
    Case(
        "softmax",
        lambda x: x.softmax(0),
        lambda x: softmax(x, 0),
        [values(3, 2)],
        "few",
    ),
    Case(
        "layer_norm",
        tpm.layer_norm,
        layer_norm,
        [values(2, 3, 5), values(5, seed=1), values(5, seed=2)],
    ),
    Case(
        "attention",
        tpm.attention,
        attention,
        [values(2, 4, 3, 2), values(2, 4, 3, 2, seed=1), values(2, 4, 3, 2, seed=2)],
        whole={0: {1, 3}, 1: {1, 3}, 2: {1, 3}},
    ),
    Case(
        "attention",
        lambda q, k, v: tpm.attention(q, k, v, causal=False),
        lambda q, k, v: attention(q, k, v, False),
        [values(1, 2, 3, 2), values(1, 4, 3, 2, seed=1), values(1, 4, 3, 2, seed=2)],
        "full",
        whole={0: {0, 1, 3}, 1: {0, 1, 3}, 2: {0, 1, 3}},
    ),
    Case(
        "embedding", tpm.embedding, lambda table, ids: table[ids], [values(7, 3), IDS]
    ),
    Case("cross_entropy", tpm.cross_entropy, cross_entropy, [values(2, 3, 7), IDS]),
    Case(
        "dropout",
        lambda x: x.dropout(0.5, "s"),
        None,
        [values(5, 3)],
    ),
]
NAMES = [
    f"{case.operator}-{case.name}" if case.name else case.operator for case in CASES
]


def test_every_operator_has_a_case():
    assert {case.operator for case in CASES} == set(registry)


def run(case: Case, place, layouts) -> tuple[float, float]:
    """Largest differences of the value and of any gradient, agreed by all members."""
    expected, gradients = reference(case)
    autodiff = place.autodiff()
    tensors = [
        laid_out(array, autodiff, layout)
        for array, layout in zip(case.arrays, layouts, strict=True)
    ]
    floating = [i for i, array in enumerate(case.arrays) if array.dtype.kind == "f"]
    for i in floating:
        tensors[i].require_grad()
    with warnings.catch_warnings(), tpm.random.scope(seed=1):
        warnings.simplefilter("ignore", tpm.ImplicitGatherWarning)
        result = case.apply(*tensors)
        weights = tpm.tensor(cotangent(result.shape), autodiff)
        (result * weights).sum().backward()
    errors = [np.abs(result.numpy() - expected).max(initial=0.0), 0.0]
    for i in floating:
        grad = tensors[i].grad
        assert grad is not None and grad.shape == case.arrays[i].shape
        error = np.abs(grad.numpy() - gradients[i]).max(initial=0.0)
        errors[1] = max(errors[1], error / np.abs(gradients[i]).max())
    if place.size > 1:
        group = tpm_group(place)
        errors = list(group.all_reduce(np.array(errors), "max"))
    return errors[0], errors[1]


def tpm_group(place):
    return MEMBERS.setdefault(place, tpm.group(place.devices))


MEMBERS: dict = {}


def cotangent(shape) -> np.ndarray:
    return np.cos(np.arange(int(np.prod(shape)))).reshape(shape) + 0.5


REFERENCES: dict = {}


def reference(case: Case):
    """Value by NumPy and gradients by finite differences, computed once per rank."""
    if id(case) not in REFERENCES:
        device = tpm.device()

        def weighted(*tensors):
            with tpm.random.scope(seed=1):
                result = case.apply(*tensors)
            return result * tpm.tensor(cotangent(result.shape), device)

        if case.reference is None:
            with tpm.random.scope(seed=1):
                value = case.apply(
                    *[tpm.tensor(a, device) for a in case.arrays]
                ).numpy()
        else:
            value = case.reference(*case.arrays)
        gradients = {
            i: numerical_gradient(weighted, case.arrays, i, device, step=1e-3)
            for i, array in enumerate(case.arrays)
            if array.dtype.kind == "f"
        }
        REFERENCES[id(case)] = value, gradients
    return REFERENCES[id(case)]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_operator_on_groups(case):
    """Forward to 1e-13 of NumPy, gradients to 1e-6 of finite differences (float64)."""
    for members in (1, 2, 3, 4):
        place = tpm.group(tpm.devices()[:members])
        if not place.is_member:
            continue
        for layouts in product(*case.layouts(1)):
            if operand_cannot_be_had(case, layouts):
                continue
            forward, backward = run(case, place, layouts)
            assert forward < 1e-12, (members, layouts)
            assert backward < 1e-6, (members, layouts)


def operand_cannot_be_had(case: Case, layouts) -> bool:
    """A weighted id is no id: pending sums of integers are not made."""
    return any(
        isinstance(p, Partial) and array.dtype.kind != "f"
        for array, layout in zip(case.arrays, layouts, strict=True)
        for p in layout
    )


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_operator_on_a_mesh(case):
    """A sample of the layouts on two axes: each operand's, with the others' rotated."""
    mesh = tpm.mesh(dp=2, tp=2)
    choices = case.layouts(2)
    rounds = max(map(len, choices))
    for turn in range(rounds):
        layouts = [c[(turn * (3 * i + 1) + i) % len(c)] for i, c in enumerate(choices)]
        forward, backward = run(case, mesh, layouts)
        assert forward < 1e-12, layouts
        assert backward < 1e-6, layouts


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
