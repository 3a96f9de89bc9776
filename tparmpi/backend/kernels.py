"""Kernels for any array module: what each computes, and one plain way to do it.

Every function takes the array module ``xp`` (``numpy`` or ``cupy``) first. These are
the reference for a backend's faster versions, and what runs where there is none.
Floating inputs are float32 or float64; results have the input's dtype. All are local.

Those of attention are in `attention`.

Shapes: D model dim, V vocabulary rows held here; ``...`` is any number of leading dims.
Any dim may be 0.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import numpy as np

Array = Any

GELU_SLOPE = sqrt(2.0 / pi)
GELU_CUBIC = 0.044715


def gelu(xp: Any, x: Array) -> Array:
    """Return ``x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``.

    The tanh form of Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), which
    GPT-2 uses.
    """
    inner = GELU_SLOPE * x * (1.0 + GELU_CUBIC * (x * x))
    return 0.5 * x * (1.0 + xp.tanh(inner))


def gelu_backward(xp: Any, x: Array, grad: Array) -> Array:
    """Return ``grad`` times the derivative of `gelu` at ``x``."""
    square = x * x
    t = xp.tanh(GELU_SLOPE * x * (1.0 + GELU_CUBIC * square))
    inner_slope = GELU_SLOPE * (1.0 + 3.0 * GELU_CUBIC * square)
    return grad * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope)


def sigmoid(xp: Any, x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``, which cannot overflow."""
    decay = xp.exp(-xp.abs(x))
    one = x.dtype.type(1)
    return xp.where(x >= 0, one, decay) / (one + decay)


def swiglu(xp: Any, gate: Array, up: Array) -> Array:
    """Return ``gate sigmoid(gate) up`` for arrays of one shape.

    Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    return gate * sigmoid(xp, gate) * up


def swiglu_backward(
    xp: Any,
    gate: Array,
    up: Array,
    grad: Array,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Array | None, Array | None]:
    """Return the gradients of `swiglu` for gate and up; None where not wanted.

    With ``s = sigmoid(gate)``: ``grad up s (1 + gate (1 - s))`` and ``grad gate s``.
    """
    s = sigmoid(xp, gate)
    dgate = grad * up * (s * (1.0 + gate * (1.0 - s))) if wanted[0] else None
    dup = grad * (gate * s) if wanted[1] else None
    return dgate, dup


def layer_norm(
    xp: Any, x: Array, gain: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Normalise over the last dim: ``(x - mean) * rstd * gain + bias``.

    Ba, Kiros and Hinton, "Layer Normalization" (2016), with the biased variance.

    Parameters
    ----------
    x : (..., D)
    gain, bias : (D,)
        1 and 0 if None.
    eps : float
        Added to the variance.

    Returns
    -------
    y : (..., D)
    mean, rstd : (...)
        What the backward needs; ``rstd = 1/sqrt(variance + eps)``.
    """
    count = max(x.shape[-1], 1)
    mean = x.sum(axis=-1) / count
    centred = x - mean[..., None]
    variance = (centred * centred).sum(axis=-1) / count
    rstd = 1.0 / xp.sqrt(variance + eps)
    y = centred * rstd[..., None]
    if gain is not None:
        y = y * gain
    return y if bias is None else y + bias, mean, rstd


def layer_norm_backward(
    xp: Any,
    x: Array,
    mean: Array,
    rstd: Array,
    gain: Array | None,
    grad: Array,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the gradients of `layer_norm` for x, gain and bias.

    Those that ``wanted`` leaves out are None. With ``h = (x - mean) rstd`` and
    ``g = grad gain``: ``dx = rstd (g - mean(g) - h mean(g h))``; ``dgain`` and
    ``dbias`` are the sums of ``grad h`` and ``grad`` over the leading dims.
    """
    count = max(x.shape[-1], 1)
    leading = tuple(range(x.ndim - 1))
    normalised = (x - mean[..., None]) * rstd[..., None]
    dx = dgain = dbias = None
    if wanted[0]:
        scaled = grad if gain is None else grad * gain
        offset = scaled.sum(axis=-1, keepdims=True) / count
        slope = (scaled * normalised).sum(axis=-1, keepdims=True) / count
        dx = (scaled - offset - normalised * slope) * rstd[..., None]
    if wanted[1]:
        dgain = (grad * normalised).sum(axis=leading)
    if wanted[2]:
        dbias = grad.sum(axis=leading)
    return dx, dgain, dbias


def softmax(xp: Any, x: Array, axis: int = -1) -> Array:
    """Return ``exp(x) / sum(exp(x))`` along ``axis``."""
    if x.size == 0:
        return xp.empty(x.shape, x.dtype)
    weights = xp.exp(x - x.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


def softmax_backward(xp: Any, y: Array, grad: Array, axis: int = -1) -> Array:
    """Return the gradient of `softmax` from its result: ``y (grad - sum(y grad))``."""
    return y * (grad - (y * grad).sum(axis=axis, keepdims=True))


def embedding(xp: Any, table: Array, ids: Array, first: int = 0) -> Array:
    """Return the table's rows for ``ids``, zeros for ids outside it.

    Parameters
    ----------
    table : (R, D)
        Rows ``first .. first+R-1`` of the vocabulary.
    ids : (...) integers of any width

    Returns
    -------
    rows : (..., D)
    """
    rows = table.shape[0]
    if rows == 0 or ids.size == 0:
        return xp.zeros((*ids.shape, table.shape[1]), table.dtype)
    index = ids.astype(np.int64) - first
    inside = (index >= 0) & (index < rows)
    taken = xp.take(table, xp.where(inside, index, 0), axis=0)
    return xp.where(inside[..., None], taken, taken.dtype.type(0))


def embedding_backward(
    xp: Any, grad: Array, ids: Array, first: int, rows: int
) -> Array:
    """Return the gradient of `embedding` for the table: (rows, D).

    Parameters
    ----------
    grad : (..., D)
    ids : (...) integers
    first, rows : int
        The part of the vocabulary that the table holds.

    Notes
    -----
    Sums run in a fixed order, so the result is the same in every run.
    """
    width = grad.shape[-1]
    dtable = xp.zeros((rows, width), grad.dtype)
    index = ids.reshape(-1).astype(np.int64) - first
    position = xp.flatnonzero((index >= 0) & (index < rows))
    if position.size == 0 or width == 0:
        return dtable
    position = position[xp.argsort(index[position], kind="stable")]
    index = index[position]
    segment = xp.flatnonzero(xp.concatenate((index[:1] >= 0, index[1:] != index[:-1])))
    ordered = grad.reshape(-1, width)[position]
    dtable[index[segment]] = xp.add.reduceat(ordered, segment, axis=0)
    return dtable


def xent_local_max(xp: Any, logits: Array) -> Array:
    """Return the largest logit of each position: (..., V) to (...).

    It is minus infinity where no part of the vocabulary is held.
    """
    if logits.shape[-1] == 0:
        return xp.full(logits.shape[:-1], -np.inf, logits.dtype)
    return logits.max(axis=-1)


def xent_local_stats(
    xp: Any, logits: Array, targets: Array, first: int, maximum: Array
) -> tuple[Array, Array]:
    """Return this part's contribution to a cross-entropy over a split vocabulary.

    Parameters
    ----------
    logits : (..., V)
        Columns ``first .. first+V-1`` of the vocabulary.
    targets : (...) integers
    maximum : (...)
        Over the whole vocabulary.

    Returns
    -------
    sumexp : (...)
        ``sum(exp(logits - maximum))`` over the columns held here.
    target_logit : (...)
        The target's logit, 0 where it is not held here.

    Notes
    -----
    Summed over the members, the loss is ``log(sumexp) + maximum - target_logit``.
    """
    sumexp = xp.exp(logits - maximum[..., None]).sum(axis=-1)
    return sumexp, target_logits(xp, logits, targets, first)


def target_logits(xp: Any, logits: Array, targets: Array, first: int) -> Array:
    """Return each target's logit, 0 where it is not among the columns held."""
    columns = logits.shape[-1]
    if columns == 0:
        return xp.zeros(targets.shape, logits.dtype)
    index = targets.astype(np.int64) - first
    inside = (index >= 0) & (index < columns)
    picked = xp.take_along_axis(logits, xp.where(inside, index, 0)[..., None], axis=-1)
    return xp.where(inside, picked[..., 0], 0.0).astype(logits.dtype, copy=False)


def xent_backward(
    xp: Any,
    logits: Array,
    targets: Array,
    first: int,
    logsumexp: Array,
    grad: Array,
    hit: float = 1.0,
    spread: float = 0.0,
) -> Array:
    """Return the gradient for the logits held here: (..., V).

    It is ``(exp(logits - logsumexp) - spread - hit [column is the target]) grad``;
    ``logsumexp`` and ``grad`` are (...). The result is the only array of the
    vocabulary's size.

    Parameters
    ----------
    hit, spread
        The target's probability beside what each column has.
    """
    if logits.size == 0:
        return xp.empty(logits.shape, logits.dtype)
    # Reshaped below, which must give a view whatever the strides of the logits.
    dlogits = xp.empty(logits.shape, logits.dtype)
    xp.subtract(logits, logsumexp[..., None], out=dlogits)
    xp.exp(dlogits, out=dlogits)
    if spread:
        dlogits -= spread
    columns = logits.shape[-1]
    flat = dlogits.reshape(-1, columns)
    index = targets.reshape(-1).astype(np.int64) - first
    row = xp.flatnonzero((index >= 0) & (index < columns))
    flat[row, index[row]] -= hit
    dlogits *= grad[..., None]
    return dlogits


def adamw(
    xp: Any,
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float = 1.0,
) -> None:
    """Make one AdamW step in place in ``param``, ``m`` and ``v``.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019): with
    ``g = scale grad``, ``m`` and ``v`` the running means of g and g squared, and both
    corrected for their start at zero,
    ``param -= lr (m' / (sqrt(v') + eps) + weight_decay param)``.

    Parameters
    ----------
    step : int
        Number of this step, counted from 1.
    scale : float
        Multiplies the gradient (clipping).
    """
    slope, floor = adamw_factors(lr, beta1, beta2, eps, step)
    scaled = grad * scale
    m *= beta1
    m += (1.0 - beta1) * scaled
    v *= beta2
    v += (1.0 - beta2) * (scaled * scaled)
    param *= 1.0 - lr * weight_decay
    param -= slope * (m / (xp.sqrt(v) + floor))


def adamw_factors(
    lr: float, beta1: float, beta2: float, eps: float, step: int
) -> tuple[float, float]:
    """Fold both bias corrections into the step size and eps, so no array needs them."""
    root = sqrt(1.0 - beta2**step)
    return lr * root / (1.0 - beta1**step), eps * root


def sgd(
    xp: Any,
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """Make one step of gradient descent in place.

    With ``g = scale grad + weight_decay param`` and a buffer ``b`` (zeros at first):
    ``b = momentum b + g`` and ``param -= lr b``; without one, ``param -= lr g``.
    """
    update = xp.multiply(grad, scale)
    if weight_decay:
        update += weight_decay * param
    if momentum_buffer is not None:
        momentum_buffer *= momentum
        momentum_buffer += update
        update = momentum_buffer
    param -= lr * update


def sum_of_squares(xp: Any, x: Array) -> float:
    """Return the sum of the squares of all elements, accumulated in float64."""
    wide = x.astype(np.float64)
    return float((wide * wide).sum())


def all_finite(xp: Any, x: Array) -> bool:
    """Say whether no element is infinite or NaN."""
    return bool(xp.isfinite(x).all())
