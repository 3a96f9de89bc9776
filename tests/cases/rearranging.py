"""Operators that put indices in other places."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values


def in_order(x, dim, descending=False):
    order = np.argsort(-x if descending else x, dim, kind="stable")
    return np.take_along_axis(x, order, dim), order


def first(k, x, dim, largest=True):
    return tuple(np.take(part, range(k), dim) for part in in_order(x, dim, largest))


TIES = np.array([[2.0, 1.0, 2.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])

CASES = [
    Case(
        "pad",
        lambda x: x.pad(((1, 2), (0, 0))),
        lambda x: np.pad(x, ((1, 2), (0, 0))),
        [values(5, 3)],
    ),
    Case(
        "pad",
        lambda x: x.pad((2, (0, 1)), 7.0),
        lambda x: np.pad(x, ((2, 2), (0, 1)), constant_values=7.0),
        [values(3, 5)],
        "value",
    ),
    Case("roll", lambda x: x.roll(3), lambda x: np.roll(x, 3, 0), [values(5, 3)]),
    Case(
        "roll",
        lambda x: x.roll((-1, 7), (0, 1)),
        lambda x: np.roll(x, (-1, 7), (0, 1)),
        [values(5, 3)],
        "both",
    ),
    Case(
        "repeat",
        lambda x: x.repeat(3, 0),
        lambda x: np.repeat(x, 3, 0),
        [values(5, 2)],
    ),
    Case(
        "repeat",
        lambda x: x.repeat(0, 1),
        lambda x: np.repeat(x, 0, 1),
        [values(2, 3)],
        "never",
    ),
    Case("sort", lambda x: x.sort(0), lambda x: in_order(x, 0), [values(5, 3)]),
    Case(
        "sort",
        lambda x: x.sort(-1, descending=True),
        lambda x: in_order(x, 1, True),
        [TIES],
        "ties",
        constant=(0,),
    ),
    Case("topk", lambda x: x.topk(2, 0), lambda x: first(2, x, 0), [values(5, 3)]),
    Case(
        "topk",
        lambda x: tpm.topk(x, 3, 1, largest=False),
        lambda x: first(3, x, 1, False),
        [TIES],
        "ties",
        constant=(0,),
    ),
]
