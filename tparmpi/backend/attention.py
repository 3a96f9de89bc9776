"""Attention for any array module: what it computes, and one plain way to do it.

As in `kernels`, every function takes the array module ``xp`` first and is local.

Shapes: B batch, T queries, S keys, H heads of the queries, K of the keys and values,
G = H / K queries' heads for each, E and F sizes of a head. Any dim may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any

Band = tuple[int | None, int | None]
"""Query i sees the keys from ``i + band[0]`` to ``i + band[1]``, both included; None
sets no limit."""


@dataclass(frozen=True)
class Softmax:
    """The parts of attention's softmax that its backward needs.

    Attributes
    ----------
    peak : (B, K, G, T, 1)
        What was subtracted from the scores of each row: the largest of them, or 0 where
        that gives no number too large or too small; minus infinity where the row sees
        no key.
    total : (B, K, G, T, 1)
        Sum of ``exp(score - peak)``.
    weights
        ``exp(score - peak)`` in a form of the backend's own, or None where they are to
        be computed again.
    """

    peak: Array
    total: Array
    weights: Any = None


def shifted(band: Band, distance: int) -> Band:
    """Return `band` with every query `distance` keys further on."""
    low, high = band
    return (
        None if low is None else low + distance,
        None if high is None else high + distance,
    )


def check_attention_shapes(q: Array, k: Array, v: Array) -> None:
    """Raise ValueError unless q, k and v fit together."""
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3]
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and (q.shape[2] % k.shape[2] == 0 if k.shape[2] else q.shape[2] == 0)
    )
    if not fits:
        raise ValueError(
            "attention: expected q (B, T, H, E), k (B, S, K, E) and v (B, S, K, F) "
            f"with H a multiple of K, got {q.shape}, {k.shape} and {v.shape}"
        )


def attention(
    xp: Any,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    band: Band = (None, None),
    bias: Array | None = None,
) -> tuple[Array, Softmax]:
    """Return ``softmax(scale q k^T + bias) v`` for each batch row and head.

    A query that sees no key gets zeros.

    Parameters
    ----------
    q : (B, T, H, E)
    k : (B, S, K, E)
    v : (B, S, K, F)
        Read in place, heads as a dim; no transposed copy is made. Head h of q goes with
        head ``h // G`` of k and v.
    scale : float
        Multiplies the scores, usually ``E**-0.5``.
    band
        Which keys a query sees.
    bias : (B or 1, H or 1, T or 1, S or 1)
        Or (B, K, G, T, S), any of them 1. Added to the scores; minus infinity hides a
        key.

    Returns
    -------
    y : (B, T, H, F)
    saved
        What `attention_backward` of the same backend needs.

    Raises
    ------
    ValueError
        If the shapes do not fit.
    """
    check_attention_shapes(q, k, v)
    y = xp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    if 0 in (k.shape[1], *q.shape[:3]):
        shape = (*q.shape[:1], *head_groups(q, k), q.shape[1], 1)
        return y, Softmax(xp.full(shape, -np.inf, q.dtype), xp.zeros(shape, q.dtype))
    scores = _scores(xp, q, k, scale, band, bias)
    peak = scores.max(axis=-1, keepdims=True)
    weights = xp.exp(scores - finite_peak(xp, peak))
    total = weights.sum(axis=-1, keepdims=True)
    product = xp.matmul(weights * inverse(xp, total), by_head(v, k))
    by_head(y, k)[...] = product
    return y, Softmax(peak, total)


def attention_backward(
    xp: Any,
    q: Array,
    k: Array,
    v: Array,
    saved: Softmax,
    y: Array,
    grad: Array,
    scale: float,
    band: Band = (None, None),
    bias: Array | None = None,
    wanted: tuple[bool, bool, bool, bool] = (True, True, True, False),
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """Return the gradients of `attention` for q, k, v and bias; None where not wanted.

    With weights P and their gradient ``dP = grad v^T``: ``dS = P (dP - sum(grad y))``,
    ``dq = scale dS k``, ``dk = scale dS^T q``, ``dv = P^T grad``. The row sum over y in
    place of P dP is from Dao et al., "FlashAttention" (2022): so `k` and `v` may be a
    part of the keys, if `saved` and `y` are those of the whole.
    """
    if 0 in (k.shape[1], *q.shape[:3]):
        dq, dk, dv, dbias = (
            xp.zeros(x.shape, q.dtype) if w and x is not None else None
            for x, w in zip((q, k, v, bias), wanted, strict=True)
        )
        return dq, dk, dv, dbias
    q_h, grad_h, y_h = (by_head(x, k) for x in (q, grad, y))
    k_h, v_h = by_head(k, k), by_head(v, k)
    weights = xp.exp(_scores(xp, q, k, scale, band, bias) - finite_peak(xp, saved.peak))
    weights *= inverse(xp, saved.total)
    dot = (grad_h * y_h).sum(axis=-1, keepdims=True)
    slope = weights * (xp.matmul(grad_h, v_h.swapaxes(3, 4)) - dot)
    dq = dk = dv = dbias = None
    if wanted[0]:
        dq = xp.empty(q.shape, q.dtype)
        by_head(dq, k)[...] = xp.matmul(slope * scale, k_h)
    if wanted[1]:
        dk = xp.matmul(slope.swapaxes(3, 4), q_h * scale).sum(axis=2)
        dk = dk.transpose(0, 2, 1, 3)
    if wanted[2]:
        dv = xp.matmul(weights.swapaxes(3, 4), grad_h).sum(axis=2)
        dv = dv.transpose(0, 2, 1, 3)
    if wanted[3] and bias is not None:
        dbias = sum_to(slope, grouped_bias(bias, k)).reshape(bias.shape)
    return dq, dk, dv, dbias


def join(
    xp: Any, left: tuple[Array, Softmax], right: tuple[Array, Softmax]
) -> tuple[Array, Softmax]:
    """Return attention over two sets of keys from that over each, which it uses up.

    The running maximum and sum of Milakov and Gimelshein, "Online normalizer
    calculation for softmax" (2018).
    """
    (y, a), (other, b) = left, right
    peak = xp.maximum(a.peak, b.peak)
    safe = finite_peak(xp, peak)
    left_total = a.total * xp.exp(a.peak - safe)
    right_total = b.total * xp.exp(b.peak - safe)
    total = left_total + right_total
    share = inverse(xp, total)
    y *= _by_position(left_total * share)
    other *= _by_position(right_total * share)
    y += other
    return y, Softmax(peak, total)


def _by_position(x: Array) -> Array:
    """View (B, K, G, T, 1) as (B, T, H, 1)."""
    batch, keys_heads, group, queries, _ = x.shape
    return x.reshape(batch, keys_heads * group, queries, 1).transpose(0, 2, 1, 3)


def head_groups(q: Array, k: Array) -> tuple[int, int]:
    """Return K, and the number G of heads of `q` for each."""
    return k.shape[2], q.shape[2] // k.shape[2] if k.shape[2] else 1


def by_head(x: Array, k: Array) -> Array:
    """View (B, T, H, E) as (B, K, G, T, E), with the K of (B, S, K, E)."""
    shape = (*x.shape[:2], *head_groups(x, k), x.shape[3])
    return x.reshape(shape).transpose(0, 2, 3, 1, 4)


def grouped_bias(bias: Array, k: Array) -> Array:
    """View (B or 1, H or 1, T or 1, S or 1) as (B, K, G, T, S), likewise with ones.

    One that has the five dims is returned as it is.
    """
    if bias.ndim == 5:
        return bias
    heads = (1, 1) if bias.shape[1] == 1 else (k.shape[2], bias.shape[1] // k.shape[2])
    return bias.reshape(bias.shape[0], *heads, *bias.shape[2:])


def sum_to(x: Array, like: Array) -> Array:
    """Sum `x` over the dims that `like` has in size 1, keeping them."""
    axes = tuple(i for i, size in enumerate(like.shape) if size == 1)
    return x.sum(axis=axes, keepdims=True) if axes else x


def finite_peak(xp: Any, peak: Array) -> Array:
    """Return `peak` with 0 for minus infinity, so that a difference is a number."""
    return xp.where(peak == -np.inf, peak.dtype.type(0), peak)


def inverse(xp: Any, total: Array) -> Array:
    """Return ``1 / total``, 0 where no key was seen."""
    none = total == 0
    return xp.where(none, total, 1 / xp.where(none, total.dtype.type(1), total))


def _scores(
    xp: Any, q: Array, k: Array, scale: float, band: Band, bias: Array | None
) -> Array:
    scores = xp.matmul(by_head(q, k), by_head(k, k).swapaxes(3, 4)) * scale
    queries, keys = scores.shape[3:]
    distance = xp.arange(keys) - xp.arange(queries)[:, None]
    low, high = band
    hidden = scores.dtype.type(-np.inf)
    if high is not None:
        scores = xp.where(distance > high, hidden, scores)
    if low is not None:
        scores = xp.where(distance < low, hidden, scores)
    if bias is not None:
        scores += grouped_bias(bias, k)
    return scores
