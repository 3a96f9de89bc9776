"""Elementwise arithmetic, casts and dropout."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values
from tparmpi.tensors import registry

PAIR = [values(5, 3), values(3, seed=1) + 1.5]
FAR_FROM_STEPS = [
    np.arange(1, 16).reshape(5, 3) * 0.7 - 5.13,
    np.array([1.1, 1.7, -2.3]),
]
WHOLE_NUMBERS = [np.arange(-7, 8).reshape(5, 3), np.array([2, -3, 4])]

CASES = [
    Case("add", tpm.add, np.add, [values(5, 3), values(3, seed=1)]),
    Case("add", tpm.add, np.add, [values(5, 1), values(2, 1, 3, seed=1)], "broadcast"),
    Case("add", lambda x: 2 + x, lambda x: 2 + x, [values(5, 3)], "number"),
    Case("sub", tpm.sub, np.subtract, [values(5, 3), values(5, 1, seed=1)]),
    Case("sub", lambda x: 1 - x, lambda x: 1 - x, [values(5, 3)], "number"),
    Case("mul", tpm.mul, np.multiply, [values(5, 3), values(3, seed=1)]),
    Case("scale", lambda x: x * 2.5, lambda x: x * 2.5, [values(5, 3)]),
    Case("div", lambda a, b: a / b, np.divide, PAIR),
    Case("div", tpm.div, np.divide, [values(2, 1, 3), PAIR[0][:, :1] + 2], "broadcast"),
    Case("div", lambda x: 3 / x, lambda x: 3 / x, [values(5, 3) + 2], "number"),
    Case("divide", lambda x: x / 3, lambda x: x / 3, [values(5, 3)]),
    Case("floor_divide", lambda a, b: a // b, np.floor_divide, FAR_FROM_STEPS),
    Case("floor_divide", tpm.floor_divide, np.floor_divide, WHOLE_NUMBERS, "integers"),
    Case("pow", lambda a, b: a**b, np.power, [values(5, 1) + 1.5, values(3, seed=1)]),
    Case("pow", lambda x: 2**x, lambda x: 2**x, [values(5, 3)], "of_a_number"),
    Case("power", lambda x: x**3, lambda x: x**3, [values(5, 3)]),
    Case("power", lambda x: x**2, lambda x: x**2, [values(5, 3)], "square"),
    Case("power", lambda x: x**0.5, np.sqrt, [values(5, 3) + 2], "root"),
    Case("power", lambda x: x**-1, lambda x: 1 / x, [values(5, 3) + 2], "inverse"),
    Case("power", lambda x: x**0, lambda x: x**0, [values(5, 3)], "one"),
    Case("power", lambda x: x**-1.5, lambda x: x**-1.5, [values(5, 3) + 2], "real"),
    Case("neg", lambda x: -x, np.negative, [values(5, 3)]),
    Case("abs", abs, np.abs, [values(5, 3)]),
    Case(
        "cast",
        lambda x: registry["cast"](x, dtype=np.dtype(float)),
        lambda x: x,
        [values(5, 3)],
    ),
    Case("copy", lambda x: x.copy(), lambda x: x, [values(5, 3)]),
    Case(
        "dropout",
        lambda x: x.dropout(0.5, "s"),
        None,
        [values(5, 3)],
    ),
]
