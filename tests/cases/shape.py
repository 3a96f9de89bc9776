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
        "reshape",
        lambda x: x.reshape((3, 5)),
        lambda x: x.reshape(3, 5),
        [values(5, 3)],
        "moved",
    ),
    Case(
        "reshape",
        lambda x: x.reshape((5, 2)),
        lambda x: x.reshape(5, 2),
        [values(1, 10)],
        "from_one",
    ),
    Case(
        "transpose",
        lambda x: x.swap(0, -1),
        lambda x: x.swapaxes(0, -1),
        [values(5, 2, 3)],
        "swap",
        whole={0: {1}},
    ),
    Case(
        "expand",
        lambda x: x.expand((2, -1, 4, 3)),
        lambda x: np.broadcast_to(x, (2, 5, 4, 3)),
        [values(5, 1, 3)],
    ),
    Case(
        "getitem",
        lambda x: x.expand_dims((0, 2)),
        lambda x: np.expand_dims(x, (0, 2)),
        [values(5, 3)],
        "expand_dims",
    ),
    Case(
        "getitem",
        lambda x: x.squeeze(1),
        lambda x: x.squeeze(1),
        [values(5, 1, 3)],
        "squeeze",
    ),
    Case(
        "split",
        lambda x: x.split((2, 0, 3), 0),
        lambda x: (x[:2], x[2:2], x[2:]),
        [values(5, 3)],
    ),
    Case(
        "split",
        lambda x: (lambda a, b, c: a * 2 + c.sum(1, keepdims=True) - b)(
            *x.split((2, 2, 1), 1)
        ),
        lambda x: x[:, :2] * 2 + x[:, 4:] - x[:, 2:4],
        [values(3, 5)],
        "mixed",
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
    Case(
        "concat",
        lambda x, y, z: tpm.concat((x, y, z, x), 0),
        lambda x, y, z: np.concatenate((x, y, z, x), 0),
        [values(5), values(1, seed=1), values(0, seed=2)],
        "many",
    ),
    Case(
        "concat",
        lambda x, y: tpm.concat((x, y)),
        lambda x, y: np.concatenate((x, y)),
        [values(5, 2), np.arange(6).reshape(3, 2)],
        "of_kinds",
    ),
    Case(
        "concat",
        lambda x, y: tpm.stack((x, y), -1),
        lambda x, y: np.stack((x, y), -1),
        [values(5, 2), values(5, 2, seed=1)],
        "stack",
    ),
]
