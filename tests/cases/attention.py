"""Attention: of whole keys, of grouped heads, with masks, and round a ring."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values


def attention(q, k, v, mask=None, *, causal=True, window=None, scale=None):
    """By the formula; positions count from the last query and key."""
    if q.ndim == 5:
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * np.einsum("bthe,bshe->bhts", q, k)
    queries, keys = scores.shape[2:]
    distance = np.arange(keys) - np.arange(queries)[:, None] - (keys - queries)
    if causal:
        scores = np.where(distance > 0, -np.inf, scores)
    if window is not None:
        scores = np.where(np.abs(distance) >= window, -np.inf, scores)
    if mask is not None and mask.dtype == bool:
        scores = np.where(mask, scores, -np.inf)
    elif mask is not None:
        scores = scores + mask
    peak = scores.max(-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bhts,bshe->bthe", weights, v)


def of_five(q, k, v, mask=None, **options):
    """The same with the groups of heads as a dim of q, mask and result."""
    if mask is not None and mask.ndim == 5:
        shape = (mask.shape[0], *q.shape[2:4], *mask.shape[3:])
        mask = np.broadcast_to(mask, shape).reshape(shape[0], -1, *shape[3:])
    y = attention(q, k, v, mask, **options)
    return y.reshape(*q.shape[:-1], v.shape[-1])


def seen(*shape: int) -> np.ndarray:
    """A mask that hides some keys, and all of them from the query 1."""
    mask = values(*shape) > -0.6
    mask[..., 1, :] = False
    return mask


def case(
    name, q, k, v, mask=None, *, reference=attention, split=(), constant=(), **options
):
    """`split` names by operand the dims that are split."""
    ring = options.pop("ring", False)
    arrays = [values(*q), values(*k, seed=1), values(*v, seed=2)]
    if mask is not None:
        arrays.append(mask)
    return Case(
        "attention",
        lambda *tensors: tpm.attention(*tensors, ring=ring, **options),
        lambda *given: reference(*given, **options),
        arrays,
        name,
        whole={
            i: set(range(a.ndim)) - set(dims)
            for i, (a, dims) in enumerate(zip(arrays, split, strict=True))
        },
        constant=constant,
    )


SQUARE = (2, 5, 3, 2)
CASES = [
    case("", SQUARE, SQUARE, SQUARE, split=[{0, 2}] * 3),
    case(
        "full",
        *((1, 3, 2, 2), (1, 4, 2, 2), (1, 4, 2, 3)),
        split=[{1}, {1}, {1, 3}],
        causal=False,
    ),
    case(
        "queries_split",
        *((2, 3, 2, 2), (2, 5, 2, 2), (2, 5, 2, 2)),
        split=[{1, 2}, {2}, {2}],
        scale=0.7,
    ),
    case(
        "window",
        *((1, 5, 2, 2), (1, 6, 2, 2), (1, 6, 2, 2)),
        split=[{1}, {2}, set()],
        window=2,
    ),
    case(
        "window_both_sides",
        *((1, 5, 1, 2), (1, 4, 1, 2), (1, 4, 1, 2)),
        split=[{1}, set(), set()],
        window=2,
        causal=False,
    ),
    case(
        "groups",
        *((1, 4, 8, 2), (1, 4, 4, 2), (1, 4, 4, 2)),
        split=[{1, 2}, {2}, {2}],
    ),
    case(
        "five_dims",
        *((1, 3, 3, 2, 2), (1, 4, 3, 2), (1, 4, 3, 2)),
        reference=of_five,
        split=[{1, 2, 3}, {2}, {2}],
    ),
    case(
        "hidden",
        *((2, 5, 2, 2), (2, 5, 2, 2), (2, 5, 2, 2), seen(2, 1, 5, 5)),
        split=[{0, 1}, set(), {2}, {0, 2}],
    ),
    case(
        "bias",
        *((1, 5, 4, 2), (1, 4, 2, 2), (1, 4, 2, 2), values(4, 1, 4, seed=3)),
        split=[{1, 2}, {2}, {3}, {0}],
        causal=False,
    ),
    case(
        "bias_of_five",
        *((2, 3, 3, 2, 2), (2, 4, 3, 2), (2, 4, 3, 2), values(1, 1, 2, 3, 4, seed=3)),
        reference=of_five,
        split=[{0, 2}, set(), set(), {2, 3}],
    ),
    case(
        "ring",
        *((2, 5, 3, 2), (2, 7, 3, 2), (2, 7, 3, 3)),
        split=[{1, 2}, {0, 1}, {3}],
        ring=True,
    ),
    case(
        "ring_full",
        *((1, 6, 1, 2), (1, 3, 1, 2), (1, 3, 1, 2)),
        split=[{1}, {1}, {1}],
        causal=False,
        ring=True,
    ),
    case(
        "ring_window_groups",
        *((1, 9, 4, 2), (1, 9, 2, 2), (1, 9, 2, 2)),
        split=[{1}, {1}, {1, 2}],
        window=3,
        ring=True,
    ),
    case(
        "ring_bias",
        *((1, 5, 2, 2), (1, 6, 2, 2), (1, 6, 2, 2), values(2, 5, 6, seed=3)),
        split=[{1}, set(), set(), {0, 1}],
        ring=True,
    ),
    case(
        "ring_hidden",
        *((2, 3, 1, 2), (2, 5, 1, 2), (2, 5, 1, 2), seen(2, 1, 3, 5)),
        split=[{0, 1}, {1}, {1}, set()],
        causal=False,
        ring=True,
    ),
]
