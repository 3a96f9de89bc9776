"""Faster NumPy versions of the optimizer steps and of the sums over whole arrays.

Each makes one pass over blocks that stay in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import kernels
from .numpy_kernels import blocks, flat, scratch_blocks

Array = np.ndarray

# BLAS splits a dot product over its threads from 10,000 elements on; below that its
# result does not depend on their number.
DOT_BLOCK = 1 << 13


def adamw(
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
    """See `kernels.adamw`."""
    if not _all_contiguous(param, m, v):
        kernels.adamw(
            np,
            param,
            grad,
            m,
            v,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            scale=scale,
        )
        return
    slope, floor = kernels.adamw_factors(lr, beta1, beta2, eps, step)
    shrink = 1.0 - lr * weight_decay
    param_flat, grad_flat, m_flat, v_flat = (flat(a) for a in (param, grad, m, v))
    scratch = scratch_blocks(2, param)
    for block in blocks(param.size):
        weight, mean, square = param_flat[block], m_flat[block], v_flat[block]
        scaled, update = scratch[:, : weight.size]
        np.multiply(grad_flat[block], scale, out=scaled)
        mean *= beta1
        np.multiply(scaled, 1.0 - beta1, out=update)
        mean += update
        square *= beta2
        scaled *= scaled
        scaled *= 1.0 - beta2
        square += scaled
        np.sqrt(square, out=update)
        update += floor
        np.divide(mean, update, out=update)
        update *= slope
        if weight_decay:
            weight *= shrink
        weight -= update


def sgd(
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """See `kernels.sgd`."""
    buffers = () if momentum_buffer is None else (momentum_buffer,)
    if not _all_contiguous(param, *buffers):
        kernels.sgd(
            np,
            param,
            grad,
            momentum_buffer,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            scale=scale,
        )
        return
    param_flat, grad_flat = flat(param), flat(grad)
    buffer_flat = None if momentum_buffer is None else flat(momentum_buffer)
    scratch = scratch_blocks(2, param)
    for block in blocks(param.size):
        weight = param_flat[block]
        update, decay = scratch[:, : weight.size]
        np.multiply(grad_flat[block], scale, out=update)
        if weight_decay:
            np.multiply(weight, weight_decay, out=decay)
            update += decay
        if buffer_flat is not None:
            buffer = buffer_flat[block]
            buffer *= momentum
            buffer += update
            update[...] = buffer
        update *= lr
        weight -= update


def sum_of_squares(x: Array) -> float:
    """See `kernels.sum_of_squares`."""
    x_flat = flat(x)
    total = 0.0
    for block in blocks(x.size, DOT_BLOCK):
        wide = x_flat[block].astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total


def all_finite(x: Array) -> bool:
    """See `kernels.all_finite`."""
    x_flat = flat(x)
    return all(bool(np.isfinite(x_flat[block]).all()) for block in blocks(x.size))


def _all_contiguous(*arrays: Any) -> bool:
    return all(a.flags.c_contiguous for a in arrays)
