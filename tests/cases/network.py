"""Operators of networks."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def layer_norm(x, gain, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * gain + bias


def cross_entropy(logits, targets):
    return -np.log(np.take_along_axis(softmax(logits, -1), targets[..., None], -1))[
        ..., 0
    ]


IDS = np.array([[3, 0, 6], [6, 2, 5]])
CASES = [
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
        "embedding", tpm.embedding, lambda table, ids: table[ids], [values(7, 3), IDS]
    ),
    Case("cross_entropy", tpm.cross_entropy, cross_entropy, [values(2, 3, 7), IDS]),
]
