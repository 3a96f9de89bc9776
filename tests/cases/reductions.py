"""Reductions."""

from __future__ import annotations

from functools import partial

import numpy as np
from scipy.special import logsumexp

import tparmpi as tpm
from tests.cases.case import Case, values

X = values(5, 3, 2)
TIED = np.array([[2, 7, 2], [7, 1, 1], [7, 7, 1], [0, 3, 3], [7, 0, 5]])
TRUTH = TIED > 2
ZEROS = values(5, 3)
ZEROS[3, 0] = ZEROS[1, 1] = ZEROS[4, 1] = 0


def norm(x, ord=2, axis=None, keepdims=False):
    return np.linalg.vector_norm(x, ord=ord, axis=axis, keepdims=keepdims)


SMOOTH = {
    "max": (tpm.max, np.max),
    "min": (tpm.min, np.min),
    "prod": (tpm.prod, np.prod),
    "var": (tpm.var, np.var),
    "std": (tpm.std, np.std),
    "logsumexp": (tpm.logsumexp, logsumexp),
    "norm": (tpm.norm, norm),
}
DIMS = {
    "first": (0, False, {0: {2}}),
    "last_kept": (-1, True, {0: {0}}),
    "several": ((0, 2), False, {}),
    "all": (None, False, {0: {2}}),
}


def reduction(operator: str, name: str) -> Case:
    ours, numpys = SMOOTH[operator]
    dim, keepdims, whole = DIMS[name]
    return Case(
        operator,
        partial(ours, dim=dim, keepdims=keepdims),
        partial(numpys, axis=dim, keepdims=keepdims),
        [X],
        name,
        whole=whole,
    )


def of_integers(operator: str, ours, numpys) -> list[Case]:
    return [
        Case(operator, lambda x: ours(x, 0), lambda x: numpys(x, 0), [TIED], "first"),
        Case(
            operator,
            lambda x: ours(x, 1, keepdims=True),
            lambda x: numpys(x, 1, keepdims=True),
            [TIED],
            "last_kept",
        ),
        Case(operator, ours, numpys, [TIED], "all"),
        Case(operator, lambda x: ours(x, 1), lambda x: numpys(x, 1), [TRUTH], "truth"),
    ]


CASES = [
    Case("sum", lambda x: x.sum(1), lambda x: x.sum(1), [X]),
    Case("sum", lambda x: x.sum(), lambda x: x.sum(), [values(5, 3)], "all"),
    Case(
        "sum",
        lambda x: x.sum((0, 2), keepdims=True),
        lambda x: x.sum((0, 2), keepdims=True),
        [X],
        "keepdims",
    ),
    Case("sum", lambda x: x.mean(0), lambda x: x.mean(0), [values(5, 3)], "mean"),
    Case("sum", lambda x: x.mean(1), lambda x: x.mean(1), [TIED], "integer_mean"),
    *[reduction(operator, name) for operator in SMOOTH for name in DIMS],
    *of_integers("argmax", tpm.argmax, np.argmax),
    *of_integers("argmin", tpm.argmin, np.argmin),
    *of_integers("any", tpm.any, np.any),
    *of_integers("all", tpm.all, np.all),
    Case("max", lambda x: x.max(0), lambda x: x.max(0), [TIED], "integer"),
    Case("min", lambda x: x.min((0, 1)), lambda x: x.min((0, 1)), [TRUTH], "truth"),
    Case("prod", lambda x: x.prod(0), lambda x: x.prod(0), [ZEROS], "zeros"),
    Case("prod", lambda x: x.prod(), lambda x: x.prod(), [ZEROS[:, 0]], "one_zero"),
    Case("prod", lambda x: x.prod(0), lambda x: x.prod(0), [TIED], "integer"),
    Case(
        "var",
        lambda x: x.var(0, correction=1),
        lambda x: x.var(0, ddof=1),
        [values(5, 3)],
        "correction",
    ),
    Case(
        "norm",
        lambda x: x.norm(0, ord=1),
        lambda x: norm(x, 1, 0),
        [values(5, 3)],
        "absolute",
    ),
    Case(
        "norm",
        lambda x: x.norm((0, 1), ord=np.inf),
        lambda x: norm(x, np.inf, (0, 1)),
        [values(5, 3)],
        "largest",
    ),
    Case("cumsum", lambda x: x.cumsum(0), lambda x: x.cumsum(0), [values(5, 3)]),
    Case("cumsum", lambda x: x.cumsum(-1), lambda x: x.cumsum(-1), [X], "last"),
    Case("cumsum", lambda x: x.cumsum(0), lambda x: x.cumsum(0), [TRUTH], "truth"),
]
