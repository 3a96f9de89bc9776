"""Comparisons, logic and choices."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values

INTEGERS = [np.arange(15).reshape(5, 3) * 7 % 4, np.array([[1], [0], [2], [3], [1]])]
BOOLS = [np.arange(15).reshape(5, 3) * 7 % 4 > 1, np.array([True, False, True])]
PAIR = [values(5, 3), values(3, seed=1)]


def holes(where, x):
    """NaN and infinities in the place of some integers."""
    return where(x == 2, np.nan, where(x == 3, -np.inf, x))


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}

CASES = [
    *[
        Case(name, getattr(tpm, name), function, INTEGERS)
        for name, function in COMPARISONS.items()
    ],
    Case("gt", lambda x: x > 0.5, lambda x: x > 0.5, PAIR[:1], constant=(0,)),
    Case("bitwise_and", lambda a, b: a & b, lambda a, b: a & b, BOOLS, "bools"),
    Case("bitwise_not", lambda x: ~x, np.invert, INTEGERS[:1]),
    Case("bitwise_not", lambda x: ~x, np.invert, BOOLS[:1], "bools"),
    Case("logical_not", tpm.logical_not, np.logical_not, INTEGERS[:1]),
    *[
        Case(
            name,
            lambda x, name=name: getattr(holes(tpm.where, x), name)(),
            lambda x, name=name: getattr(np, name)(holes(np.where, x)),
            INTEGERS[:1],
        )
        for name in ("isfinite", "isinf", "isnan")
    ],
    Case("maximum", tpm.maximum, np.maximum, PAIR),
    Case("maximum", tpm.maximum, np.maximum, INTEGERS, "integers"),
    Case("minimum", tpm.minimum, np.minimum, PAIR),
    Case(
        "where",
        tpm.where,
        np.where,
        [BOOLS[0][:, :1], values(5, 3), values(3, seed=1)],
        whole={1: {1}, 2: {0}},
    ),
    Case(
        "where",
        lambda x, y: tpm.where(x > y, x * y, 2.0),
        lambda x, y: np.where(x > y, x * y, 2.0),
        PAIR,
        "number",
    ),
    Case(
        "clip",
        lambda x: x.clip(-0.5, 0.7),
        lambda x: np.clip(x, -0.5, 0.7),
        [values(5, 3)],
    ),
    Case("clip", lambda x: x.clip(0), lambda x: np.clip(x, 0, None), PAIR[:1], "below"),
]
