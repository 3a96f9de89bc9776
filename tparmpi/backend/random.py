"""Random numbers as a function of a key and a place in an array.

Element i, in C order, of an array belongs to word i of the Philox4x64-10 stream of the
array's key (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Any
block of the array can be drawn alone, by any process, and is equal to that part of the
whole. A block is given by the array's ``shape`` and its own ``start`` and ``extent``,
one number per dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .base import Backend

Array = Any
Key = tuple[int, int]

SLAB_WORDS = 1 << 18
# Starting a stream somewhere costs about as much as drawing this many words.
JUMP_WORDS = 4096


def block(
    backend: Backend,
    key: Key,
    shape: Sequence[int],
    start: Sequence[int],
    extent: Sequence[int],
) -> Array:
    """Return the words of a block, as uint64 of shape ``extent``.

    Parameters
    ----------
    key : tuple of two int
        Each below 2**64.
    shape, start, extent : sequence of int
        The whole array's shape, and the block's first index and size in each dim.

    Raises
    ------
    ValueError
        If the block does not lie inside the array.
    """
    return _fill(backend, key, shape, start, extent, np.uint64, lambda words: words)


def uniform(
    backend: Backend,
    key: Key,
    shape: Sequence[int],
    start: Sequence[int],
    extent: Sequence[int],
    dtype: Any,
) -> Array:
    """Return numbers uniform over (0, 1), drawn in float64 and cast to ``dtype``.

    In float64 neither 0 nor 1 occurs; the cast may round up to 1. See `block`.
    """
    return _fill(backend, key, shape, start, extent, dtype, _unit)


def normal(
    backend: Backend,
    key: Key,
    shape: Sequence[int],
    start: Sequence[int],
    extent: Sequence[int],
    dtype: Any,
) -> Array:
    """Return standard normal numbers by inverse transform of `uniform`'s.

    Each takes exactly one word, so that a place in the array has a place in the stream.
    See `block`.
    """

    def quantile(words: Array) -> Array:
        return backend._normal_quantile(_unit(words))

    return _fill(backend, key, shape, start, extent, dtype, quantile)


def keep(
    backend: Backend,
    key: Key,
    shape: Sequence[int],
    start: Sequence[int],
    extent: Sequence[int],
    p: float,
) -> Array:
    """Return a bool mask that is False with probability ``p``, to 2**-32.

    Only integers are compared, so masks are equal on every kind of device. See `block`.

    Raises
    ------
    ValueError
        If ``p`` is not in [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"random_keep: p must be in [0, 1], got {p}")
    threshold = np.uint64(round(p * 2**32))

    def high_half_reaches(words: Array) -> Array:
        return (words >> np.uint64(32)) >= threshold

    return _fill(backend, key, shape, start, extent, np.bool_, high_half_reaches)


def _unit(words: Array) -> Array:
    # 52 bits and a half: exact in float64. With 53 the sum is rounded and can reach 1,
    # whose normal quantile is infinite.
    numbers = (words >> np.uint64(12)).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers


def _fill(
    backend: Backend,
    key: Key,
    shape: Sequence[int],
    start: Sequence[int],
    extent: Sequence[int],
    dtype: Any,
    convert: Callable[[Array], Array],
) -> Array:
    _check_block(shape, start, extent)
    out = backend.empty(tuple(extent), dtype)
    flat = out.reshape(-1)
    position = 0
    for words in _pieces(backend, key, 0, tuple(shape), tuple(start), tuple(extent)):
        flat[position : position + words.size] = convert(words)
        position += words.size
    return out


def _check_block(
    shape: Sequence[int], start: Sequence[int], extent: Sequence[int]
) -> None:
    inside = len(shape) == len(start) == len(extent) and all(
        min(s, e, n - s - e) >= 0 for n, s, e in zip(shape, start, extent, strict=True)
    )
    if not inside:
        raise ValueError(
            f"random block: start {tuple(start)} with extent {tuple(extent)} is not "
            f"inside an array of shape {tuple(shape)}"
        )


def _pieces(
    backend: Backend,
    key: Key,
    base: int,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    extent: tuple[int, ...],
) -> Iterator[Array]:
    """Yield a block's words in C order, flat, about `SLAB_WORDS` at a time.

    ``base`` is the word of the first element of the array of ``shape``.
    """
    if 0 in extent:
        return
    if not shape:
        yield backend.random_words(key, base, 1)
        return
    row_words = prod(shape[1:])
    if shape[1:] == extent[1:]:
        first, end = (
            base + start[0] * row_words,
            base + (start[0] + extent[0]) * row_words,
        )
        for slab in range(first, end, SLAB_WORDS):
            yield backend.random_words(key, slab, min(SLAB_WORDS, end - slab))
        return
    wasted = row_words - prod(extent[1:])
    if wasted > JUMP_WORDS or row_words > SLAB_WORDS:
        for row in range(start[0], start[0] + extent[0]):
            inner = base + row * row_words
            yield from _pieces(backend, key, inner, shape[1:], start[1:], extent[1:])
        return
    inner_block = zip(start[1:], extent[1:], strict=True)
    inside = (slice(None), *(slice(s, s + e) for s, e in inner_block))
    slab_rows = max(SLAB_WORDS // row_words, 1)
    for row in range(start[0], start[0] + extent[0], slab_rows):
        rows = min(slab_rows, start[0] + extent[0] - row)
        words = backend.random_words(key, base + row * row_words, rows * row_words)
        yield words.reshape(rows, *shape[1:])[inside].reshape(-1)
