"""Operators that move elements."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values

CASES = [
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
]
