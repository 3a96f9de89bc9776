"""Attention on NumPy: tiles of scores that stay in the cache, hidden parts skipped.

A tile is some rows of queries for some heads of some batch rows, over the keys from the
first to the last that any of these queries sees. Heads stay a dim: BLAS reads q, k and
v through strides.

Shapes as in `attention`; R queries of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from . import attention as plain
from .attention import Band, Softmax
from .numpy_kernels import row_max, row_sum

Array = np.ndarray

# Scores of a tile, in elements: 1 MiB in float32; measured with powers of two from
# 2**15 to 2**19. Smaller ones fit a nearer cache, but there are more to go through.
TILE = 1 << 18
# Up to this size the weights are kept for the backward; beyond it they are computed
# again, which takes less time than it takes memory.
KEPT_BYTES = 1 << 23


@dataclass(frozen=True)
class _Tile:
    """Where a tile's queries (B, K, G, T), keys (B, K, G, S) and scores are."""

    queries: tuple[slice, slice, slice, slice]
    keys: tuple[slice, slice, slice, slice]
    is_first_of_heads: bool

    @property
    def scores(self) -> tuple[slice, ...]:
        return (*self.queries, self.keys[3])

    @property
    def is_blank(self) -> bool:
        return self.keys[3].start == self.keys[3].stop


@dataclass(frozen=True)
class _Tiling:
    """The tiles of a call.

    Attributes
    ----------
    is_covered
        Whether the first tile of each set of heads has all the keys.
    has_blind
        Whether the band leaves some query without a key.
    """

    tiles: tuple[_Tile, ...]
    is_covered: bool
    has_blind: bool


@lru_cache(maxsize=64)
def _tiling(
    batch: int, queries: int, keys: int, heads: int, group: int, band: Band
) -> _Tiling:
    """Return the tiles of a call; for each set of heads, the last queries first.

    Causal ones see all the keys, so that in the backward the first tile can write the
    keys' gradients and only the others must add to them.
    """
    low, high = band
    rows = min(_rows_at_once(queries, band), queries)
    width = keys if low is None or high is None else min(keys, rows + high - low)
    per_head = max(rows * width, 1)
    tiles = []
    for b in _spans(batch, max(TILE // (per_head * heads * group), 1)):
        for h in _spans(heads, max(min(TILE // (per_head * group), heads), 1)):
            for g in _spans(group, max(min(TILE // per_head, group), 1)):
                for end in range(queries, 0, -rows):
                    first = max(end - rows, 0)
                    seen = _seen(first, end, keys, band)
                    is_first = end == queries and g.start == 0
                    where = (b, h, g, slice(first, end))
                    tiles.append(_Tile(where, (b, h, slice(None), seen), is_first))
    is_covered = bool(tiles) and tiles[0].keys[3] == slice(0, keys)
    has_blind = (high is not None and high < 0) or (
        low is not None and queries - 1 + low >= keys
    )
    return _Tiling(tuple(tiles), is_covered, has_blind)


def _rows_at_once(queries: int, band: Band) -> int:
    # Fewer rows skip more of the hidden half, more rows make better matmuls.
    if band == (None, None):
        return 128
    return min(max(queries // 8, min(queries // 4, 64), 32), 128)


def _seen(first: int, end: int, keys: int, band: Band) -> slice:
    """The keys that any of the queries from `first` to `end` sees."""
    low, high = band
    start = 0 if low is None else min(max(first + low, 0), keys)
    stop = keys if high is None else min(max(end + high, 0), keys)
    return slice(start, max(start, stop))


def kept_bytes(
    batch: int, queries: int, keys: int, heads: int, itemsize: int, band: Band
) -> int:
    """Return the bytes of weights that `attention` keeps for its backward. Local."""
    if batch * heads * queries * keys * itemsize > KEPT_BYTES:
        return 0
    tiles = _tiling(batch, queries, keys, heads, 1, band).tiles
    sizes = (prod(part.stop - part.start for part in tile.scores) for tile in tiles)
    return itemsize * sum(sizes)


def _spans(length: int, size: int) -> Iterator[slice]:
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


@lru_cache(maxsize=64)
def _triangle(rows: int, dtype: np.dtype[Any]) -> Array:
    return np.triu(np.full((rows, rows), -np.inf, dtype), 1)


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    band: Band = (None, None),
    bias: Array | None = None,
) -> tuple[Array, Softmax]:
    """See `attention.attention`."""
    plain.check_attention_shapes(q, k, v)
    if q.size == 0 or v.size == 0:
        return plain.attention(np, q, k, v, scale, band, bias)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    groups = plain.head_groups(q, k)
    y = np.empty((batch, queries, heads, v.shape[3]), q.dtype)
    peak = np.empty((batch, *groups, queries, 1), q.dtype)
    total = np.empty_like(peak)
    is_kept = batch * heads * queries * keys * q.itemsize <= KEPT_BYTES
    kept: list[Array] | None = [] if is_kept else None
    q_h, k_h, v_h, y_h = (_by_head(a, k) for a in (q, k, v, y))
    bias_h = None if bias is None else plain.grouped_bias(bias, k)
    tiling = _tiling(batch, queries, keys, *groups, band)
    has_blind = tiling.has_blind or bias is not None
    for tile in tiling.tiles:
        if tile.is_blank:
            y_h[tile.queries], peak[tile.queries], total[tile.queries] = 0, -np.inf, 0
            if kept is not None:
                kept.append(total[:0])
            continue
        scores = _scores(q_h[tile.queries] * scale, k_h, tile, band, bias_h)
        score_rows = scores.reshape(-1, scores.shape[-1])
        top = row_max(score_rows)
        shape = (*scores.shape[:4], 1)
        peak[tile.queries] = top.reshape(shape)
        score_rows -= (plain.finite_peak(np, top) if has_blind else top)[:, None]
        np.exp(scores, out=scores)
        sums = row_sum(score_rows).reshape(shape)
        total[tile.queries] = sums
        out = y_h[tile.queries]
        np.matmul(scores, v_h[tile.keys], out=out)
        out *= plain.inverse(np, sums) if has_blind else 1 / sums
        if kept is not None:
            kept.append(scores)
    return y, Softmax(peak, total, kept)


def attention_backward(
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
    """See `attention.attention_backward`.

    The weights are used as ``exp(score - peak)``; dividing the rows of ``grad`` by
    their sums instead gives the same products.
    """
    if q.size == 0 or v.size == 0:
        return plain.attention_backward(
            np, q, k, v, saved, y, grad, scale, band, bias, wanted
        )
    groups = plain.head_groups(q, k)
    tiling = _tiling(q.shape[0], q.shape[1], k.shape[1], *groups, band)
    blank = np.empty if tiling.is_covered else np.zeros
    dq = np.empty(q.shape, q.dtype) if wanted[0] else None
    dk = blank(k.shape, k.dtype) if wanted[1] else None
    dv = blank(v.shape, v.dtype) if wanted[2] else None
    bias_h = None if bias is None else plain.grouped_bias(bias, k)
    dbias = dbias_h = None
    if bias is not None and wanted[3]:
        dbias = np.zeros(bias.shape, bias.dtype)
        dbias_h = plain.grouped_bias(dbias, k)
    q_h, k_h, v_h, y_h, grad_h = (_by_head(a, k) for a in (q, k, v, y, grad))
    inverse = plain.inverse(np, saved.total)
    for number, tile in enumerate(tiling.tiles):
        if tile.is_blank:
            if dq is not None:
                _by_head(dq, k)[tile.queries] = 0
            continue
        is_first = tiling.is_covered and tile.is_first_of_heads
        query = q_h[tile.queries] * scale
        if saved.weights is not None:
            weights = saved.weights[number]
        else:
            weights = _scores(query, k_h, tile, band, bias_h)
            weights -= plain.finite_peak(np, saved.peak[tile.queries])
            np.exp(weights, out=weights)
        upstream = grad_h[tile.queries] * inverse[tile.queries]
        if dv is not None:
            _put(dv, tile, weights, upstream, is_first)
        if dq is None and dk is None and dbias is None:
            continue
        slope = np.matmul(upstream, v_h[tile.keys].swapaxes(3, 4))
        slope -= np.vecdot(upstream, y_h[tile.queries])[..., None]
        slope *= weights
        if dbias_h is not None:
            dbias_h[_of_bias(dbias_h, tile)] += plain.sum_to(slope, dbias_h)
        if dq is not None:
            out = _by_head(dq, k)[tile.queries]
            np.matmul(slope, k_h[tile.keys], out=out)
            out *= scale
        if dk is not None:
            _put(dk, tile, slope, query, is_first)
    return dq, dk, dv, dbias


def _put(target: Array, tile: _Tile, a: Array, b: Array, is_first: bool) -> None:
    """Write the keys' sum of ``a^T b`` to its place, or add it to what is there."""
    batch, heads, _, keys = tile.keys
    out = target.transpose(0, 2, 1, 3)[batch, heads, keys]
    a = a.reshape(*a.shape[:2], -1, a.shape[4]).swapaxes(2, 3)
    b = b.reshape(*b.shape[:2], -1, b.shape[4])
    if is_first:
        np.matmul(a, b, out=out)
    else:
        out += np.matmul(a, b)


def _by_head(x: Array, k: Array) -> Array:
    """View (B, T, H, E) as (B, K, G, T, E), rows as BLAS can read them."""
    if x.strides[-1] != x.itemsize:
        x = np.ascontiguousarray(x)
    return plain.by_head(x, k)


def _of_bias(bias_h: Array, tile: _Tile) -> tuple[slice, ...]:
    return tuple(
        slice(None) if size == 1 else part
        for size, part in zip(bias_h.shape, tile.scores, strict=True)
    )


def _scores(
    query: Array, k_h: Array, tile: _Tile, band: Band, bias_h: Array | None
) -> Array:
    """Return the masked scores of a tile: (B, K, G, R, S), C-contiguous."""
    scores = np.matmul(query, k_h[tile.keys].swapaxes(3, 4))
    low, high = band
    rows, keys = tile.queries[3], tile.keys[3]
    count = rows.stop - rows.start
    if high is not None:
        _hide(scores, rows.start + high, keys, _triangle(count, scores.dtype))
    if low is not None:
        _hide(scores, rows.start + low, keys, _triangle(count, scores.dtype).T)
    if bias_h is not None:
        scores += bias_h[_of_bias(bias_h, tile)]
    return scores


def _hide(scores: Array, origin: int, keys: slice, triangle: Array) -> None:
    """Add `triangle`, whose first column stands at the key `origin`, to `scores`."""
    first = max(origin, keys.start)
    stop = min(origin + len(triangle), keys.stop)
    if first < stop:
        part = triangle[:, first - origin : stop - origin]
        scores[..., first - keys.start : stop - keys.start] += part
