"""Attention on NumPy: tiles of scores that stay in the cache, masked parts skipped.

A tile is some rows of queries for some heads of some batch rows, over all the keys that
the last of these queries sees. Heads stay a dim: BLAS reads q, k and v through strides.

Shapes as in `kernels`; R queries of a tile, K keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from . import kernels
from .numpy_kernels import row_max, row_sum

Array = np.ndarray

# Scores of a tile, in elements; in float32 half of a 1 MiB cache.
TILE = 1 << 17
# Up to this size the weights are kept for the backward; beyond it they are computed
# again, which takes less time than it takes memory.
KEPT_BYTES = 1 << 23


@dataclass(frozen=True)
class Saved:
    """What the backward needs: the softmax's parts, and the weights of small calls.

    Attributes
    ----------
    peak, inverse_total : (B, H, T, 1)
        Each row's largest score, and one over the sum of ``exp(score - peak)``.
    weights : list of arrays or None
        ``exp(score - peak)`` of each tile.
    """

    peak: Array
    inverse_total: Array
    weights: list[Array] | None


@dataclass(frozen=True)
class _Tile:
    where: tuple[slice, slice, slice]
    heads: tuple[slice, slice]
    keys: int
    is_first_of_heads: bool


@lru_cache(maxsize=64)
def _tiles(
    batch: int, queries: int, keys: int, heads: int, causal: bool
) -> tuple[_Tile, ...]:
    """Return the tiles of a call; for each set of heads, the last queries first.

    These see all the keys, so that in the backward the first tile can write the keys'
    gradients and only the others must add to them.
    """
    rows = min(_rows_at_once(queries, causal), queries)
    heads_at_once = max(min(TILE // (rows * keys), heads), 1)
    batch_at_once = max(TILE // (rows * keys * heads), 1)
    tiles = []
    for b in _spans(batch, batch_at_once):
        for h in _spans(heads, heads_at_once):
            for end in range(queries, 0, -rows):
                visible = end + keys - queries if causal else keys
                where = (b, h, slice(max(end - rows, 0), end))
                tiles.append(_Tile(where, (b, h), visible, end == queries))
    return tuple(tiles)


def _rows_at_once(queries: int, causal: bool) -> int:
    # Fewer rows skip more of the masked half, more rows make better matmuls.
    return min(max(queries // 4, 32), 128) if causal else 128


def _spans(length: int, size: int) -> Iterator[slice]:
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


@lru_cache(maxsize=64)
def _triangle(rows: int, dtype: np.dtype[Any]) -> Array:
    return np.triu(np.full((rows, rows), -np.inf, dtype), 1)


def attention(
    q: Array, k: Array, v: Array, scale: float, causal: bool
) -> tuple[Array, Any]:
    """See `kernels.attention`."""
    kernels.check_attention_shapes(q, k, v, causal)
    if q.size == 0 or v.size == 0:
        return kernels.attention(np, q, k, v, scale, causal)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    y = np.empty((batch, queries, heads, v.shape[3]), q.dtype)
    peak = np.empty((batch, heads, queries, 1), q.dtype)
    inverse_total = np.empty_like(peak)
    is_kept = batch * heads * queries * keys * q.itemsize <= KEPT_BYTES
    kept: list[Array] | None = [] if is_kept else None
    q_h, k_h, v_h, y_h = (_by_head(a) for a in (q, k, v, y))
    for tile in _tiles(batch, queries, keys, heads, causal):
        scores = _scores(q_h[tile.where] * scale, k_h[tile.heads], tile.keys, causal)
        score_rows = scores.reshape(-1, tile.keys)
        top = row_max(score_rows)
        peak[tile.where] = top.reshape(*scores.shape[:3], 1)
        score_rows -= top[:, None]
        np.exp(scores, out=scores)
        inverse = inverse_total[tile.where]
        np.divide(1.0, row_sum(score_rows).reshape(inverse.shape), out=inverse)
        out = y_h[tile.where]
        np.matmul(scores, v_h[tile.heads][:, :, : tile.keys], out=out)
        out *= inverse
        if kept is not None:
            kept.append(scores)
    return y, Saved(peak, inverse_total, kept)


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    saved: Any,
    y: Array,
    grad: Array,
    scale: float,
    causal: bool,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Array | None, Array | None, Array | None]:
    """See `kernels.attention_backward`.

    The weights are used as ``exp(score - peak)``; dividing the rows of ``grad`` by
    their sums instead gives the same products.
    """
    if q.size == 0 or v.size == 0:
        return kernels.attention_backward(
            np, q, k, v, saved, y, grad, scale, causal, wanted
        )
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    dq, dk, dv = (
        np.empty(a.shape, a.dtype) if w else None
        for a, w in zip((q, k, v), wanted, strict=True)
    )
    q_h, k_h, v_h, y_h, grad_h = (_by_head(a) for a in (q, k, v, y, grad))
    for number, tile in enumerate(_tiles(batch, queries, keys, heads, causal)):
        visible = (*tile.heads, slice(tile.keys))
        query = q_h[tile.where] * scale
        if saved.weights is not None:
            weights = saved.weights[number]
        else:
            weights = _scores(query, k_h[tile.heads], tile.keys, causal)
            weights -= saved.peak[tile.where]
            np.exp(weights, out=weights)
        upstream = grad_h[tile.where] * saved.inverse_total[tile.where]
        if dv is not None:
            _put(dv, visible, weights.swapaxes(2, 3), upstream, tile.is_first_of_heads)
        if dq is None and dk is None:
            continue
        slope = np.matmul(upstream, v_h[visible].swapaxes(2, 3))
        slope -= np.vecdot(upstream, y_h[tile.where])[..., None]
        slope *= weights
        if dq is not None:
            out = _by_head(dq)[tile.where]
            np.matmul(slope, k_h[visible], out=out)
            out *= scale
        if dk is not None:
            _put(dk, visible, slope.swapaxes(2, 3), query, tile.is_first_of_heads)
    return dq, dk, dv


def _put(
    target: Array, where: tuple[slice, ...], a: Array, b: Array, is_first: bool
) -> None:
    """Write the product of a and b to the place, or add it to what is there."""
    out = target.transpose(0, 2, 1, 3)[where]
    if is_first:
        np.matmul(a, b, out=out)
    else:
        out += np.matmul(a, b)


def _by_head(x: Array) -> Array:
    """View (B, T, H, E) as (B, H, T, E), rows as BLAS can read them."""
    if x.strides[-1] != x.itemsize:
        x = np.ascontiguousarray(x)
    return x.transpose(0, 2, 1, 3)


def _scores(query: Array, k_h: Array, keys: int, causal: bool) -> Array:
    """Return the masked scores of a tile: (B, H, R, K), C-contiguous."""
    scores = np.matmul(query, k_h[:, :, :keys].swapaxes(2, 3))
    if causal:
        rows = query.shape[2]
        scores[..., keys - rows :] += _triangle(rows, scores.dtype)
    return scores
