"""Faster NumPy versions of the elementwise, row and vocabulary kernels.

Long chains of operations run over blocks that stay in the cache and write to the same
scratch arrays. Row sums go through ``einsum`` and ``vecdot``, row maxima through
``reduceat``: they cost a fraction of a reduction along the last axis, and a row's
result does not depend on how many other rows there are.

Shapes as in `kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from . import kernels
from .kernels import GELU_CUBIC, GELU_SLOPE

Array = np.ndarray

# Elements of a block. In float32 a few of them fit a 1 MiB cache, and the fixed cost of
# an operation on one is small; measured with powers of two from 2**13 to 2**17.
BLOCK = 1 << 16


def blocks(length: int, size: int | None = None) -> Iterator[slice]:
    """Yield slices of at most ``size`` (`BLOCK`) that cover ``range(length)``."""
    size = size or BLOCK
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def row_blocks(rows: Array) -> Iterator[slice]:
    """Yield slices of the rows of a (rows, width) array, a block of elements each."""
    return blocks(rows.shape[0], max(BLOCK // rows.shape[1], 1))


def scratch_blocks(count: int, like: Array) -> Array:
    """Return ``count`` undefined blocks for the work on an array: (count, block)."""
    return np.empty((count, min(like.size, BLOCK)), like.dtype)


def flat(x: Array) -> Array:
    """Return the elements in C order as 1-d, a view where possible."""
    return x.reshape(-1)


def as_rows(x: Array) -> Array:
    """Return x (..., D) as a C-contiguous (rows, D), a view where possible."""
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


@lru_cache(maxsize=256)
def _row_starts(rows: int, width: int) -> Array:
    return np.arange(0, rows * width, width)


def row_max(rows: Array) -> Array:
    """Return the maximum of each row of a C-contiguous (rows, width), width > 0."""
    starts = _row_starts(*rows.shape)
    return np.maximum.reduceat(rows.reshape(-1), starts)


def row_sum(rows: Array) -> Array:
    """Return the sum of each row of (rows, width)."""
    return np.einsum("ij->i", rows)


def column_sum(rows: Array) -> Array:
    """Return the sum of each column of (rows, width)."""
    return np.ones(rows.shape[0], rows.dtype) @ rows


def gelu(x: Array) -> Array:
    """See `kernels.gelu`."""
    y = np.empty(x.shape, x.dtype)
    x_flat, y_flat = flat(x), y.reshape(-1)
    for block in blocks(x.size):
        value, out = x_flat[block], y_flat[block]
        np.square(value, out=out)
        out *= GELU_SLOPE * GELU_CUBIC
        out += GELU_SLOPE
        out *= value
        np.tanh(out, out=out)
        out += 1.0
        out *= 0.5
        out *= value
    return y


def gelu_backward(x: Array, grad: Array) -> Array:
    """See `kernels.gelu_backward`."""
    dx = np.empty(x.shape, x.dtype)
    x_flat, grad_flat, dx_flat = flat(x), flat(grad), dx.reshape(-1)
    scratch = scratch_blocks(2, x)
    for block in blocks(x.size):
        value, out = x_flat[block], dx_flat[block]
        t, sech2 = scratch[:, : value.size]
        np.multiply(value, value, out=out)
        np.multiply(out, GELU_SLOPE * GELU_CUBIC, out=t)
        t += GELU_SLOPE
        t *= value
        np.tanh(t, out=t)
        np.multiply(t, t, out=sech2)
        np.subtract(1.0, sech2, out=sech2)
        sech2 *= value
        out *= 3.0 * GELU_SLOPE * GELU_CUBIC
        out += GELU_SLOPE
        out *= sech2
        out += t
        out += 1.0
        out *= 0.5
        out *= grad_flat[block]
    return dx


def _sigmoid(gate: Array, scratch: Array, out: Array) -> None:
    """Write ``sigmoid(gate)`` to `out`."""
    np.abs(gate, out=scratch)
    np.negative(scratch, out=scratch)
    np.exp(scratch, out=scratch)
    np.copyto(out, scratch)
    np.copyto(out, 1.0, where=gate >= 0)
    scratch += 1.0
    out /= scratch


def swiglu(gate: Array, up: Array) -> Array:
    """See `kernels.swiglu`."""
    y = np.empty(gate.shape, gate.dtype)
    gate_flat, up_flat, y_flat = flat(gate), flat(up), y.reshape(-1)
    (scratch,) = scratch_blocks(1, gate)
    for block in blocks(gate.size):
        value, out = gate_flat[block], y_flat[block]
        _sigmoid(value, scratch[: value.size], out)
        out *= value
        out *= up_flat[block]
    return y


def swiglu_backward(
    gate: Array, up: Array, grad: Array, wanted: tuple[bool, bool] = (True, True)
) -> tuple[Array | None, Array | None]:
    """See `kernels.swiglu_backward`."""
    gate_flat, up_flat, grad_flat = flat(gate), flat(up), flat(grad)
    dgate = np.empty(gate.shape, gate.dtype) if wanted[0] else None
    dup = np.empty(gate.shape, gate.dtype) if wanted[1] else None
    scratch = scratch_blocks(2, gate)
    for block in blocks(gate.size):
        value, upstream = gate_flat[block], grad_flat[block]
        spare, opened = scratch[:, : value.size]
        _sigmoid(value, spare, opened)
        if dgate is not None:
            out = dgate.reshape(-1)[block]
            np.subtract(1.0, opened, out=out)
            out *= value
            out += 1.0
            out *= opened
            out *= up_flat[block]
            out *= upstream
        if dup is not None:
            out = dup.reshape(-1)[block]
            np.multiply(opened, value, out=out)
            out *= upstream
    return dgate, dup


def layer_norm(
    x: Array, gain: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """See `kernels.layer_norm`."""
    if x.size == 0:
        return kernels.layer_norm(np, x, gain, bias, eps)
    y = np.empty(x.shape, x.dtype)
    mean = np.empty(x.shape[:-1], x.dtype)
    rstd = np.empty(x.shape[:-1], x.dtype)
    x_rows, y_rows = as_rows(x), y.reshape(-1, x.shape[-1])
    mean_rows, rstd_rows = mean.reshape(-1), rstd.reshape(-1)
    per_element = 1.0 / x.shape[-1]
    for block in row_blocks(x_rows):
        value, out = x_rows[block], y_rows[block]
        centre, spread = mean_rows[block], rstd_rows[block]
        np.multiply(row_sum(value), per_element, out=centre)
        np.subtract(value, centre[:, None], out=out)
        np.multiply(np.vecdot(out, out), per_element, out=spread)
        spread += eps
        np.sqrt(spread, out=spread)
        np.divide(1.0, spread, out=spread)
        out *= spread[:, None]
        if gain is not None:
            out *= gain
        if bias is not None:
            out += bias
    return y, mean, rstd


def layer_norm_backward(
    x: Array,
    mean: Array,
    rstd: Array,
    gain: Array | None,
    grad: Array,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Array | None, Array | None, Array | None]:
    """See `kernels.layer_norm_backward`.

    With ``c = x - mean`` and ``p = grad c`` every sum is a product with ``p`` or
    ``grad``, which BLAS makes: ``dgain = rstd p`` and ``mean(g h) = rstd p gain / D``.
    """
    if x.size == 0:
        return kernels.layer_norm_backward(np, x, mean, rstd, gain, grad, wanted)
    width = x.shape[-1]
    x_rows, grad_rows = as_rows(x), as_rows(grad)
    mean_rows, rstd_rows = mean.reshape(-1), rstd.reshape(-1)
    dx = np.empty(x.shape, x.dtype) if wanted[0] else None
    dgain = np.zeros(width, x.dtype) if wanted[1] else None
    dbias = np.zeros(width, x.dtype) if wanted[2] else None
    if gain is None:
        gain = np.ones(width, x.dtype)
    per_element = 1.0 / width
    for block in row_blocks(x_rows):
        upstream, spread = grad_rows[block], rstd_rows[block]
        if dbias is not None:
            dbias += column_sum(upstream)
        if dx is None and dgain is None:
            continue
        centred = x_rows[block] - mean_rows[block, None]
        out = np.empty_like(centred) if dx is None else dx.reshape(-1, width)[block]
        np.multiply(upstream, centred, out=out)
        if dgain is not None:
            dgain += spread @ out
        if dx is not None:
            slope = np.vecdot(out, gain)
            slope *= spread
            slope *= spread
            slope *= per_element
            offset = np.vecdot(upstream, gain)
            offset *= per_element
            np.multiply(upstream, gain, out=out)
            centred *= slope[:, None]
            centred += offset[:, None]
            out -= centred
            out *= spread[:, None]
    return dx, dgain, dbias


def softmax(x: Array, axis: int = -1) -> Array:
    """See `kernels.softmax`."""
    if axis not in (-1, x.ndim - 1) or x.size == 0:
        return kernels.softmax(np, x, axis)
    y = np.empty(x.shape, x.dtype)
    x_rows, y_rows = as_rows(x), y.reshape(-1, x.shape[-1])
    for block in row_blocks(x_rows):
        value, out = x_rows[block], y_rows[block]
        np.subtract(value, row_max(value)[:, None], out=out)
        np.exp(out, out=out)
        out /= row_sum(out)[:, None]
    return y


def softmax_backward(y: Array, grad: Array, axis: int = -1) -> Array:
    """See `kernels.softmax_backward`."""
    if axis not in (-1, y.ndim - 1) or y.size == 0:
        return kernels.softmax_backward(np, y, grad, axis)
    dx = np.empty(y.shape, y.dtype)
    y_rows, grad_rows = as_rows(y), as_rows(grad)
    dx_rows = dx.reshape(y_rows.shape)
    for block in row_blocks(y_rows):
        value, upstream, out = y_rows[block], grad_rows[block], dx_rows[block]
        np.subtract(upstream, np.vecdot(value, upstream)[:, None], out=out)
        out *= value
    return dx


def embedding(table: Array, ids: Array, first: int = 0) -> Array:
    """See `kernels.embedding`."""
    if table.shape[0] == 0:
        return kernels.embedding(np, table, ids, first)
    index = ids.astype(np.intp)
    index -= first
    rows = table.take(index, axis=0, mode="clip")
    outside = (index < 0) | (index >= table.shape[0])
    if outside.any():
        rows[outside] = 0
    return rows


def embedding_backward(grad: Array, ids: Array, first: int, rows: int) -> Array:
    """See `kernels.embedding_backward`.

    The positions are the columns of a sparse matrix of ones, at most one in each, and
    the gradient its product with ``grad``: a row is the left fold of its positions.
    """
    width = grad.shape[-1]
    index = ids.reshape(-1).astype(np.intp) - first
    inside = (index >= 0) & (index < rows)
    column_ends = np.zeros(index.size + 1, np.intp)
    np.cumsum(inside, out=column_ends[1:])
    if width == 0 or not column_ends[-1]:
        return np.zeros((rows, width), grad.dtype)
    from scipy.sparse import csc_array

    ones = np.ones(column_ends[-1], grad.dtype)
    shape = (rows, index.size)
    positions = csc_array((ones, index[inside], column_ends), shape=shape)
    return positions @ as_rows(grad)


def xent_local_max(logits: Array) -> Array:
    """See `kernels.xent_local_max`."""
    if logits.size == 0:
        return kernels.xent_local_max(np, logits)
    return row_max(as_rows(logits)).reshape(logits.shape[:-1])


def xent_local_stats(
    logits: Array, targets: Array, first: int, maximum: Array
) -> tuple[Array, Array]:
    """See `kernels.xent_local_stats`."""
    if logits.size == 0:
        return kernels.xent_local_stats(np, logits, targets, first, maximum)
    rows = as_rows(logits)
    peak = maximum.reshape(-1, 1)
    sumexp = np.empty(rows.shape[0], logits.dtype)
    for block in row_blocks(rows):
        weights = rows[block] - peak[block]
        np.exp(weights, out=weights)
        sumexp[block] = row_sum(weights)
    target_logit = kernels.target_logits(np, logits, targets, first)
    return sumexp.reshape(maximum.shape), target_logit


def xent_backward(
    logits: Array,
    targets: Array,
    first: int,
    logsumexp: Array,
    grad: Array,
    hit: float = 1.0,
    spread: float = 0.0,
) -> Array:
    """See `kernels.xent_backward`."""
    if logits.size == 0:
        return np.empty(logits.shape, logits.dtype)
    dlogits = np.empty(logits.shape, logits.dtype)
    rows, out_rows = as_rows(logits), dlogits.reshape(-1, logits.shape[-1])
    shift, upstream = logsumexp.reshape(-1, 1), grad.reshape(-1, 1)
    for block in row_blocks(rows):
        out = out_rows[block]
        np.subtract(rows[block], shift[block], out=out)
        np.exp(out, out=out)
        if spread:
            out -= spread
        out *= upstream[block]
    index = targets.reshape(-1).astype(np.intp) - first
    row = np.flatnonzero((index >= 0) & (index < rows.shape[1]))
    column = index[row]
    probability = np.exp(rows[row, column] - shift[row, 0])
    out_rows[row, column] = (probability - spread - hit) * upstream[row, 0]
    return dlogits
