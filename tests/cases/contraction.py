"""Products."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values

CASES = [
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
    *(
        Case(
            "einsum",
            lambda *x, rule=rule: tpm.einsum(rule, *x),
            lambda *x, rule=rule: np.einsum(rule, *x),
            [values(*shape, seed=i) for i, shape in enumerate(shapes)],
            rule,
        )
        for rule, shapes in (
            ("ba,bc", [(3, 2), (3, 4)]),
            ("...ij, ...jk", [(2, 3, 2), (1, 2, 5)]),
            ("i... -> ...", [(3, 5)]),
            ("ii", [(5, 5)]),
            ("iji,jk->ik", [(3, 2, 3), (2, 4)]),
            ("iii->i", [(3, 3, 3)]),
            ("ij,ij->", [(3, 5), (3, 5)]),
            ("a,b,c->cab", [(2,), (3,), (5,)]),
        )
    ),
    Case("einsum", tpm.outer, np.outer, [values(5), values(3, seed=1)], "outer"),
    Case("diagonal", tpm.diagonal, np.diagonal, [values(5, 5, 2)]),
    Case(
        "diagonal",
        lambda x: x.diagonal(2, -2),
        lambda x: np.diagonal(x, 0, 2, 1),
        [values(2, 3, 3)],
        "last",
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
]
