"""Smooth functions of one operand."""

from __future__ import annotations

import numpy as np
from scipy import special

import tparmpi as tpm
from tests.cases.case import Case, values


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


X = 2 * values(5, 3)
POSITIVE = values(5, 3) + 1.5

CASES = [
    Case("sqrt", tpm.sqrt, np.sqrt, [POSITIVE]),
    Case("rsqrt", tpm.rsqrt, lambda x: 1 / np.sqrt(x), [POSITIVE]),
    Case("exp", tpm.exp, np.exp, [X]),
    Case("log", tpm.log, np.log, [POSITIVE]),
    Case("sin", tpm.sin, np.sin, [X]),
    Case("cos", tpm.cos, np.cos, [X]),
    Case("tanh", tpm.tanh, np.tanh, [X]),
    Case("sigmoid", tpm.sigmoid, special.expit, [X]),
    Case("erf", tpm.erf, special.erf, [X]),
    Case("relu", tpm.relu, lambda x: np.maximum(x, 0), [X]),
    Case("gelu", tpm.gelu, gelu, [X]),
    Case(
        "gelu",
        lambda x: x.gelu(approximate="none"),
        lambda x: x * special.ndtr(x),
        [X],
        "exact",
    ),
    Case("silu", tpm.silu, lambda x: x * special.expit(x), [X]),
    Case("softplus", tpm.softplus, lambda x: np.log1p(np.exp(x)), [X]),
]
