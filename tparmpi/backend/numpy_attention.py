"""Attention on NumPy: tiles of scores that stay in the cache, hidden parts skipped.

A tile is some rows of queries for some heads of some batch rows, over the keys from the
first to the last that any of these queries sees. Heads stay a dim: BLAS reads q, k and
v through strides. Only k, and v for the backward, are also laid out in columns, scaled,
for some heads at a time: of small products BLAS makes those without a transposed
operand up to twice as fast.

Shapes as in `attention`; R queries of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from . import attention as plain
from .attention import Band, Softmax
from .numpy_kernels import row_max, row_sum

Array = np.ndarray

# Scores of a tile, in elements: 512 KiB in float32; measured with powers of two from
# 2**15 to 2**18. Smaller ones fit a nearer cache, but there are more to go through.
TILE = 1 << 17
# Keys of the heads of a tile together, at most: their columns take the rest of a cache,
# and must not take much more where a window leaves tiles small.
KEYS = 1 << 15
# Up to this size the weights are kept for the backward; beyond it they are computed
# again, which takes less time than it takes memory.
KEPT_BYTES = 1 << 23
# A row of scores is shifted only if the sum of its exponentials, or the inverse of it,
# would be larger. Further out, products with values and gradients could overflow, or
# weights that count could vanish.
MODERATE = 2.0**50


@dataclass(frozen=True)
class _Tile:
    """Where a tile's queries (B, K, G, T), keys (B, K, G, S) and scores are."""

    queries: tuple[slice, slice, slice, slice]
    keys: tuple[slice, slice, slice, slice]

    @property
    def scores(self) -> tuple[slice, ...]:
        return (*self.queries, self.keys[3])

    @property
    def is_blank(self) -> bool:
        return self.keys[3].start == self.keys[3].stop


@dataclass(frozen=True)
class _Part:
    """Some heads of the keys of some batch rows, with the tiles that see them."""

    batch: slice
    heads: slice
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True)
class _Tiling:
    """The tiles of a call.

    Attributes
    ----------
    is_covered
        Whether the first tile of each part has all the keys.
    has_blind
        Whether the band leaves some query without a key.
    """

    parts: tuple[_Part, ...]
    is_covered: bool
    has_blind: bool


@lru_cache(maxsize=64)
def _tiling(
    batch: int, queries: int, keys: int, heads: int, group: int, band: Band
) -> _Tiling:
    """Return the tiles of a call; in each part the last queries first.

    Causal ones see all the keys, so that in the backward the first tile can write the
    keys' gradients and only the others must add to them.
    """
    low, high = band
    rows = min(_rows_at_once(queries, band), queries)
    width = keys if low is None or high is None else min(keys, rows + high - low)
    per_head = max(rows * width, keys * TILE // KEYS, 1)
    parts = []
    for b in _spans(batch, max(TILE // (per_head * heads * group), 1)):
        for h in _spans(heads, max(min(TILE // (per_head * group), heads), 1)):
            tiles = []
            for g in _spans(group, max(min(TILE // per_head, group), 1)):
                for end in range(queries, 0, -rows):
                    first = max(end - rows, 0)
                    seen = _seen(first, end, keys, band)
                    where = (b, h, g, slice(first, end))
                    tiles.append(_Tile(where, (b, h, slice(None), seen)))
            parts.append(_Part(b, h, tuple(tiles)))
    is_covered = bool(parts) and parts[0].tiles[0].keys[3] == slice(0, keys)
    has_blind = (high is not None and high < 0) or (
        low is not None and queries - 1 + low >= keys
    )
    return _Tiling(tuple(parts), is_covered, has_blind)


def _rows_at_once(queries: int, band: Band) -> int:
    # Fewer rows skip more of what is hidden, more rows make better matmuls.
    low, high = band
    if low is None and high is None:
        return 128
    length = queries // 16 if low is None or high is None else (high - low) // 4
    return min(max(length, 32), 128)


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
    parts = _tiling(batch, queries, keys, heads, 1, band).parts
    return itemsize * sum(
        prod(span.stop - span.start for span in tile.scores)
        for part in parts
        for tile in part.tiles
    )


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
    q_h, v_h, y_h = (_by_head(a, k) for a in (q, v, y))
    bias_h = None if bias is None else plain.grouped_bias(bias, k)
    tiling = _tiling(batch, queries, keys, *groups, band)
    has_blind = tiling.has_blind or bias is not None
    for part in tiling.parts:
        k_columns = _columns(k, part, scale)
        for tile in part.tiles:
            if tile.is_blank:
                y_h[tile.queries], peak[tile.queries] = 0, -np.inf
                total[tile.queries] = 0
                continue
            make = partial(_scores, q_h, k_columns, tile, band, bias_h)
            weights, top, sums = _weights(make, has_blind)
            peak[tile.queries], total[tile.queries] = top, sums
            out = y_h[tile.queries]
            np.matmul(weights, v_h[tile.keys], out=out)
            out *= plain.inverse(np, sums) if has_blind else 1 / sums
            if kept is not None:
                kept.append(weights)
    return y, Softmax(peak, total, kept)


def _weights(
    make: Callable[[], Array], has_blind: bool
) -> tuple[Array, Array | int, Array]:
    """Return ``exp(scores - peak)`` of a tile, the peaks, and the sums of its rows.

    A peak is 0 where the sum is moderate so: nothing needs to be subtracted then.

    Parameters
    ----------
    make
        Returns the scores, in an array of its own.
    has_blind
        Whether some query may see no key.
    """
    scores = make()
    shape = (*scores.shape[:4], 1)
    if has_blind:
        top = row_max(_rows(scores))
        shift = plain.finite_peak(np, top)
    else:
        sums = _exp(scores)
        is_moderate = (sums > 1 / MODERATE) & (sums < MODERATE)
        if is_moderate.all():
            return scores, 0, sums.reshape(shape)
        scores = make()
        shift = top = np.where(is_moderate, 0, row_max(_rows(scores)))
    rows = _rows(scores)
    rows -= shift[:, None]
    return scores, top.reshape(shape), _exp(scores).reshape(shape)


def _exp(scores: Array) -> Array:
    """Write the exponentials of scores over them; return the sum of each row."""
    with np.errstate(over="ignore"):
        np.exp(scores, out=scores)
        return row_sum(_rows(scores))


def _rows(scores: Array) -> Array:
    return scores.reshape(-1, scores.shape[-1])


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
    dq, dk, dv = (
        np.empty(x.shape, x.dtype) if want else None
        for x, want in zip((q, k, v), wanted, strict=False)
    )
    bias_h = None if bias is None else plain.grouped_bias(bias, k)
    dbias = dbias_h = None
    if bias is not None and wanted[3]:
        dbias = np.zeros(bias.shape, bias.dtype)
        dbias_h = plain.grouped_bias(dbias, k)
    q_h, k_h, y_h, grad_h = (_by_head(a, k) for a in (q, k, y, grad))
    dq_h = None if dq is None else plain.by_head(dq, k)
    inverse = plain.inverse(np, saved.total)
    shift = plain.finite_peak(np, saved.peak) if saved.peak.any() else None
    is_kept = saved.weights is not None
    kept = iter(saved.weights or ())
    # Of a bias too the slope is wanted, which is not scaled.
    slope_scale = scale if bias is None else 1.0
    for part in tiling.parts:
        k_columns = None if is_kept else _columns(k, part, scale)
        # The last row subtracts what the last column of `upstream` will have.
        v_columns = _columns(v, part, slope_scale, -slope_scale)
        dk_sum = None if dk is None else _KeySum(dk, part, tiling.is_covered)
        dv_sum = None if dv is None else _KeySum(dv, part, tiling.is_covered)
        for tile in part.tiles:
            if tile.is_blank:
                if dq_h is not None:
                    dq_h[tile.queries] = 0
                continue
            if k_columns is None:
                weights = next(kept)
            else:
                weights = _scores(q_h, k_columns, tile, band, bias_h)
                if shift is not None:
                    weights -= shift[tile.queries]
                np.exp(weights, out=weights)
            query, out = q_h[tile.queries], y_h[tile.queries]
            upstream = np.empty((*out.shape[:4], out.shape[4] + 1), out.dtype)
            np.multiply(
                grad_h[tile.queries], inverse[tile.queries], out=upstream[..., :-1]
            )
            if dv_sum is not None:
                dv_sum.add(tile, weights, upstream[..., :-1])
            if dq_h is None and dk_sum is None and dbias_h is None:
                continue
            np.vecdot(upstream[..., :-1], out, out=upstream[..., -1])
            slope = np.matmul(upstream, v_columns[..., tile.keys[3]])
            slope *= weights
            if dbias_h is not None:
                dbias_h[_of_bias(dbias_h, tile)] += plain.sum_to(slope, dbias_h)
            if bias is not None:
                slope *= scale
            if dq_h is not None:
                np.matmul(slope, k_h[tile.keys], out=dq_h[tile.queries])
            if dk_sum is not None:
                dk_sum.add(tile, slope, query)
        for summed in (dk_sum, dv_sum):
            if summed is not None:
                summed.finish()
    return dq, dk, dv, dbias


class _KeySum:
    """A part of a gradient of keys or values, summed up in one run of memory.

    Parameters
    ----------
    target : (B, S, K, E)
        Where the sum is written in the end.
    is_covered
        Whether what is added first has all the keys.
    """

    def __init__(self, target: Array, part: _Part, is_covered: bool) -> None:
        self.target = target[part.batch, :, part.heads].transpose(0, 2, 1, 3)
        self.sum = (np.empty if is_covered else np.zeros)(
            self.target.shape, target.dtype
        )
        self.is_empty = is_covered

    def add(self, tile: _Tile, a: Array, b: Array) -> None:
        """Add ``a^T b`` at the keys of a tile."""
        a = a.reshape(*a.shape[:2], -1, a.shape[4]).swapaxes(2, 3)
        b = b.reshape(*b.shape[:2], -1, b.shape[4])
        if self.is_empty:
            np.matmul(a, b, out=self.sum)
            self.is_empty = False
        else:
            self.sum[:, :, tile.keys[3]] += np.matmul(a, b)

    def finish(self) -> None:
        """Write the sum to its place."""
        self.target[...] = self.sum


def _columns(x: Array, part: _Part, scale: float, last: float | None = None) -> Array:
    """Return ``scale x`` of a part, of x (B, S, K, E), as (B, K, 1, E, S), contiguous.

    With `last`, as (B, K, 1, E + 1, S), where the last row is filled with it.
    """
    x = x[part.batch, :, part.heads]
    batch, keys, heads, size = x.shape
    # Columns of a matrix whose rows are a power of two apart meet in few cache lines.
    padded = np.empty((batch, keys, heads * size + 16), x.dtype)
    rows = padded[..., : heads * size].reshape(x.shape)
    np.multiply(x, scale, out=rows)
    extra = 0 if last is None else 1
    columns = np.empty((batch, heads, 1, size + extra, keys), x.dtype)
    columns[:, :, 0, :size] = rows.transpose(0, 2, 3, 1)
    if last is not None:
        columns[:, :, 0, size] = last
    return columns


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
    q_h: Array, k_columns: Array, tile: _Tile, band: Band, bias_h: Array | None
) -> Array:
    """Return the masked scores of a tile: (B, K, G, R, S), C-contiguous.

    `k_columns` are those of its part, scaled.
    """
    rows, keys = tile.queries[3], tile.keys[3]
    scores = np.matmul(q_h[tile.queries], k_columns[..., keys])
    low, high = band
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
