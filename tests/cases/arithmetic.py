"""Elementwise operators."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values
from tparmpi.tensors import registry


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


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
        "dropout",
        lambda x: x.dropout(0.5, "s"),
        None,
        [values(5, 3)],
    ),
]
