"""Operators of networks."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values
from tests.cases.functions import gelu


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


def smoothed(logits, targets, part=0.0, ignored=None):
    logp = np.log(softmax(logits, -1))
    safe = np.where(targets == ignored, 0, targets)
    chosen = np.take_along_axis(logp, safe[..., None], -1)[..., 0]
    loss = -(1 - part) * chosen - part * logp.mean(-1)
    return np.where(targets == ignored, 0.0, loss)


def layer_norm_of(x):
    return layer_norm(x, 1.0, 0.0)


def rms_norm(x, gain=1.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain


def group_norm(x, groups, gain=1.0, bias=0.0):
    rows = x.reshape(x.shape[0], groups, -1)
    rows = layer_norm_of(rows).reshape(x.shape)
    ones = (1,) * (x.ndim - 2)
    gain, bias = (np.reshape(p, (-1, *ones)) for p in (gain, bias))
    return rows * gain + bias


def rotary(x, positions=None, offset=0, base=10000.0):
    """By complex numbers: features i and i + E/2 are one."""
    half = x.shape[-1] // 2
    where = np.arange(x.shape[1]) if positions is None else positions
    angles = (where + offset)[..., None] * base ** (-np.arange(half) / half)
    angles = angles.reshape(-1, x.shape[1], *[1] * (x.ndim - 3), half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate((turned.real, turned.imag), -1)


def interleaved(x, **options):
    y = rotary(np.concatenate((x[..., 0::2], x[..., 1::2]), -1), **options)
    half = x.shape[-1] // 2
    return np.stack((y[..., :half], y[..., half:]), -1).reshape(x.shape)


def silu(x):
    return x / (1 + np.exp(-x))


def bce(x, y):
    p = 1 / (1 + np.exp(-x))
    return -y * np.log(p) - (1 - y) * np.log(1 - p)


def with_count(loss, *given):
    return loss(*given).sum(), np.array(float(loss(*given).size))


IDS = np.array([[3, 0, 6], [6, 2, 5]])
SOME_IDS = np.array([[3, -1, 6], [-1, -1, 5]])
POSITIONS = np.array([[0, 3, 1, 2, 7], [5, 5, 6, 9, 0]])
CASES = [
    Case("softmax", lambda x: x.softmax(1), lambda x: softmax(x, 1), [values(3, 5)]),
    Case(
        "softmax",
        lambda x: x.softmax(0),
        lambda x: softmax(x, 0),
        [values(3, 2)],
        "few",
    ),
    *(
        Case(
            "log_softmax",
            lambda x, dim=dim: x.log_softmax(dim),
            lambda x, dim=dim: np.log(softmax(x, dim)),
            [values(3, 5)],
            name,
        )
        for dim, name in ((1, ""), (-2, "first"))
    ),
    Case(
        "layer_norm",
        tpm.layer_norm,
        layer_norm,
        [values(2, 3, 5), values(5, seed=1), values(5, seed=2)],
    ),
    Case("layer_norm", tpm.layer_norm, layer_norm_of, [values(3, 5)], "bare"),
    Case(
        "rms_norm", tpm.rms_norm, rms_norm, [values(2, 3, 5), values(5, seed=1)], "gain"
    ),
    Case("rms_norm", tpm.rms_norm, rms_norm, [values(2, 3)]),
    Case(
        "group_norm",
        lambda x, g, b: tpm.group_norm(x, 4, g, b),
        lambda x, g, b: group_norm(x, 4, g, b),
        [values(2, 8, 3), values(8, seed=1), values(8, seed=2)],
    ),
    Case(
        "group_norm",
        lambda x: tpm.group_norm(x, 3),
        lambda x: group_norm(x, 3),
        [values(2, 3, 3, 5)],
        "of_single_channels",
    ),
    Case(
        "group_norm",
        lambda x, g: tpm.group_norm(x, 1, g),
        lambda x, g: group_norm(x, 1, g),
        [values(3, 4), values(4, seed=1)],
        "of_all",
    ),
    Case(
        "embedding", tpm.embedding, lambda table, ids: table[ids], [values(7, 3), IDS]
    ),
    Case("cross_entropy", tpm.cross_entropy, cross_entropy, [values(2, 3, 7), IDS]),
    Case(
        "cross_entropy",
        lambda x, ids: tpm.cross_entropy(x, ids, label_smoothing=0.2, ignore_index=-1),
        lambda x, ids: smoothed(x, ids, 0.2, -1),
        [values(2, 3, 7), SOME_IDS],
        "smoothed",
    ),
    Case(
        "counted",
        lambda x, ids: tpm.cross_entropy_sum(x, ids, ignore_index=-1),
        lambda x, ids: (smoothed(x, ids, 0.0, -1).sum(), np.array(3.0)),
        [values(2, 3, 7), SOME_IDS],
    ),
    Case(
        "cross_entropy",
        tpm.cross_entropy_sum,
        lambda *given: with_count(cross_entropy, *given),
        [values(2, 3, 7), IDS],
        "sum",
    ),
    Case(
        "mse", tpm.mse, lambda x, y: (x - y) ** 2, [values(5, 3), values(5, 3, seed=1)]
    ),
    Case(
        "mse",
        tpm.mse_sum,
        lambda *given: with_count(lambda x, y: (x - y) ** 2, *given),
        [values(5, 3), values(5, 3, seed=1)],
        "sum",
    ),
    Case("bce", tpm.bce, bce, [values(5, 3), values(5, 3, seed=1)]),
    Case(
        "bce",
        tpm.bce_sum,
        lambda *given: with_count(bce, *given),
        [values(5, 3), values(5, 3, seed=1)],
        "sum",
    ),
    Case(
        "swiglu",
        tpm.swiglu,
        lambda x, y: silu(x) * y,
        [values(5, 3), values(5, 3, seed=1)],
    ),
    Case(
        "geglu",
        tpm.geglu,
        lambda x, y: gelu(x) * y,
        [values(5, 3), values(5, 3, seed=1)],
    ),
    Case("rotary", tpm.rotary, rotary, [values(2, 5, 3, 4)]),
    Case(
        "rotary",
        lambda x, p: tpm.rotary(x, p, base=50.0),
        lambda x, p: rotary(x, p, base=50.0),
        [values(2, 5, 3, 4), POSITIONS],
        "positions",
    ),
    Case(
        "rotary",
        lambda x, p: tpm.rotary(x, p, interleaved=True, offset=2),
        lambda x, p: interleaved(x, positions=p, offset=2),
        [values(2, 5, 4), POSITIONS[0]],
        "interleaved",
    ),
]
