"""Norms over features: of layers, of root mean squares, of groups of channels."""

from __future__ import annotations

import string
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops.arithmetic import floating
from tparmpi.ops.combiners import widened
from tparmpi.sharding import chunk_sizes
from tparmpi.tensors import Plan, Tensor, method, operator


def _weights(plan: Plan, factor: str) -> Any:
    """Each member's share of a factor, in the order of `Plan.collect`."""
    shard = plan.factors[factor]
    sizes = [shard.size]
    for axis in shard.axes:
        parts = plan.place.shape[axis]
        sizes = [part for size in sizes for part in chunk_sizes(size, parts)]
    return np.array(sizes) / max(shard.size, 1)


def _moments(plan: Plan, x: Any, factors: Sequence[str]) -> tuple[Any, Any]:
    """Return the mean and the variance over the last dim, kept, and split `factors`.

    Of the members' own means and variances: the deviations of the means are added, so
    that nothing cancels.
    """
    xp = plan.xp
    count = x.dtype.type(max(x.shape[-1], 1))
    mean = x.sum(axis=-1, keepdims=True) / count
    variance = xp.square(x - mean).sum(axis=-1, keepdims=True) / count
    for factor in factors:
        if not plan.factors[factor].axes:
            continue
        pieces, _ = plan.collect(factor, xp.stack((mean, variance)))
        shares = xp.asarray(_weights(plan, factor).astype(x.dtype))
        shares = shares.reshape((-1,) + (1,) * mean.ndim)
        means, variances = pieces[:, 0], pieces[:, 1]
        mean = (shares * means).sum(axis=0)
        variance = (shares * (variances + xp.square(means - mean))).sum(axis=0)
    return mean, variance


def _gradient(
    plan: Plan, grad: Any, normal: Any, rstd: Any, factors: Sequence[str], count: int
) -> Any:
    """Gradient of ``normal = (x - mean) rstd`` for x, over `count` elements in all."""
    sums = plan.xp.stack(
        (
            grad.sum(axis=-1, keepdims=True),
            (grad * normal).sum(axis=-1, keepdims=True),
        )
    )
    for factor in factors:
        sums = plan.combine(factor, sums)
    offset, slope = sums / sums.dtype.type(max(count, 1))
    return (grad - offset - normal * slope) * rstd


def _sum_leading(x: Any, ndim: int = 1) -> Any:
    """Sum over all but the last `ndim` dims."""
    return x.sum(axis=tuple(range(x.ndim - ndim)))


def _as_inputs(plan: Plan, grads: Sequence[Any]) -> tuple[Any, ...]:
    """Gradients in the shape and dtype of their operands."""
    return tuple(
        g if g is None else g.reshape(spec.local_shape).astype(spec.dtype, copy=False)
        for spec, g in zip(plan.inputs, grads, strict=False)
    )


def _with_parameters(
    name: str, x: Tensor, gain: Tensor | None, bias: Tensor | None
) -> list[Tensor]:
    if gain is None and bias is not None:
        raise UsageError(
            f"{name}: a bias without a gain was given; add it to the result"
        )
    return [operand for operand in (x, gain, bias) if operand is not None]


def _layer_norm_rule(*shapes: tuple[int, ...]) -> str:
    return "...{d}" + ",{d}" * (len(shapes) - 1) + "->...{d}"


@operator(_layer_norm_rule, name="layer_norm", dtype=floating, fresh=True)
def _layer_norm(plan: Plan, x: Any, *parameters: Any, eps: float) -> Any:
    """Return `x` standardised over its last dim, times gain, plus bias."""
    wide = widened(x)
    gain, bias = (*map(widened, parameters), None, None)[:2]
    if plan.factors["d"].axes:
        mean, variance = _moments(plan, wide, "d")
        rstd = 1 / plan.xp.sqrt(variance + wide.dtype.type(eps))
        y = (wide - mean) * rstd
        if gain is not None:
            y *= gain
        if bias is not None:
            y += bias
    else:
        y, mean, rstd = plan.backend.layer_norm(wide, gain, bias, eps)
    return y.astype(x.dtype, copy=False), (x, mean, rstd, *parameters[:1])


@_layer_norm.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, mean, rstd, *gains = saved
    wide, grad = widened(x), widened(grad)
    gain = widened(gains[0]) if gains else None
    dgain_wanted, dbias_wanted = (*wanted[1:], False, False)[:2]
    if not plan.factors["d"].axes:
        all_wanted = (wanted[0], dgain_wanted, dbias_wanted)
        grads = plan.backend.layer_norm_backward(
            wide, mean, rstd, gain, grad, all_wanted
        )
        return _as_inputs(plan, grads)
    normal = (wide - mean) * rstd
    dx = dgain = dbias = None
    if wanted[0]:
        upstream = grad if gain is None else grad * gain
        count = plan.factors["d"].size
        dx = _gradient(plan, upstream, normal, rstd, "d", count)
    if dgain_wanted:
        dgain = _sum_leading(grad * normal)
    if dbias_wanted:
        dbias = _sum_leading(grad)
    return _as_inputs(plan, (dx, dgain, dbias))


@method
def layer_norm(
    x: Tensor,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Return `x` with mean 0 and variance 1 over its last dim, times gain, plus bias.

    ``(x - mean) / sqrt(variance + eps) * gain + bias``, Ba et al. (2016). Local, unless
    the last dim is split: then its members exchange two numbers a row.

    Parameters
    ----------
    x : (..., D)
    gain, bias : (D,)
        Left out if None; a bias needs a gain.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    UsageError
        If there is a bias without a gain.
    """
    operands = _with_parameters("layer_norm", x, gain, bias)
    result: Tensor = _layer_norm(*operands, eps=eps)
    return result


@operator(_layer_norm_rule, name="rms_norm", dtype=floating, fresh=True)
def _rms_norm(plan: Plan, x: Any, *gains: Any, eps: float) -> Any:
    """Return `x` over the root of its mean square along the last dim, times gain."""
    wide = widened(x)
    count = wide.dtype.type(max(plan.factors["d"].size, 1))
    square = plan.combine("d", plan.xp.square(wide).sum(axis=-1, keepdims=True))
    rstd = 1 / plan.xp.sqrt(square / count + wide.dtype.type(eps))
    y = wide * rstd
    for gain in gains:
        y *= widened(gain)
    return y.astype(x.dtype, copy=False), (x, rstd, *gains)


@_rms_norm.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, rstd, *gains = saved
    normal, grad = widened(x) * rstd, widened(grad)
    dx = dgain = None
    if wanted[0]:
        upstream = grad * widened(gains[0]) if gains else grad
        slope = plan.combine("d", (upstream * normal).sum(axis=-1, keepdims=True))
        slope /= slope.dtype.type(max(plan.factors["d"].size, 1))
        dx = (upstream - normal * slope) * rstd
    if len(wanted) > 1 and wanted[1]:
        dgain = _sum_leading(grad * normal)
    return _as_inputs(plan, (dx, dgain))


@method
def rms_norm(x: Tensor, gain: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * gain`` over the last dim.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Local, unless the
    last dim is split: then its members exchange one number a row.

    Parameters
    ----------
    x : (..., D)
    gain : (D,)
        Left out if None.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    """
    operands = _with_parameters("rms_norm", x, gain, None)
    result: Tensor = _rms_norm(*operands, eps=eps)
    return result


def _spatial(ndim: int) -> str:
    """Letters of the dims after the channels, none of them that of another factor."""
    return string.ascii_uppercase[: ndim - 2]


def _group_norm_rule(
    x: tuple[int, ...], *parameters: tuple[int, ...], groups: int
) -> tuple[str, dict[str, int]]:
    if len(x) < 2 or groups < 1 or x[1] % groups:
        raise ShapeError(
            f"group_norm: x must be (B, C, ...) with C a multiple of {groups} groups, "
            f"it is {x}"
        )
    whole = "b(gc)" + "".join(f"{{{letter}}}" for letter in _spatial(len(x)))
    text = whole + ",(gc)" * len(parameters)
    return f"{text}->{whole}", {"g": groups, "c": x[1] // groups}


@operator(_group_norm_rule, name="group_norm", dtype=floating)
def _group_norm(plan: Plan, x: Any, *parameters: Any, eps: float) -> Any:
    """Return `x` with mean 0 and variance 1 over each group of channels."""
    wide = _grouped(plan, widened(x))
    mean, variance = _moments(plan, wide, _spatial(x.ndim))
    rstd = 1 / plan.xp.sqrt(variance + wide.dtype.type(eps))
    normal = (wide - mean) * rstd
    y = normal.reshape(x.shape)
    for number, parameter in enumerate(parameters):
        channels = widened(parameter).reshape((-1,) + (1,) * (x.ndim - 2))
        y = y + channels if number else y * channels
    return y.astype(x.dtype, copy=False), (x, mean, rstd, *parameters[:1])


@_group_norm.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, mean, rstd, *gains = saved
    grad = widened(grad)
    normal = (_grouped(plan, widened(x)) - mean) * rstd
    others = (0, *range(2, x.ndim))
    grads: list[Any] = [None, None, None]
    if wanted[0]:
        upstream = grad
        for gain in gains:
            upstream = grad * widened(gain).reshape((-1,) + (1,) * (x.ndim - 2))
        factors = _spatial(x.ndim)
        count = plan.factors["c"].size * prod(plan.factors[f].size for f in factors)
        upstream = _grouped(plan, upstream)
        grads[0] = _gradient(plan, upstream, normal, rstd, factors, count)
    if len(wanted) > 1 and wanted[1]:
        grads[1] = (grad * normal.reshape(x.shape)).sum(axis=others)
    if len(wanted) > 2 and wanted[2]:
        grads[2] = grad.sum(axis=others)
    return _as_inputs(plan, grads)


def _grouped(plan: Plan, x: Any) -> Any:
    """View (B, C, ...) as (B, G, elements of a group)."""
    groups = plan.factors["g"].length
    return x.reshape(x.shape[0], groups, prod(x.shape[1:]) // max(groups, 1))


@method
def group_norm(
    x: Tensor,
    groups: int,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Return `x` with mean 0 and variance 1 over each group of channels.

    Wu and He, "Group Normalization" (2018). Local for split batches, and for channels
    split in whole groups, the same number of them on each member; if other dims are
    split, their members exchange two numbers a group.

    Parameters
    ----------
    x : (B, C, ...)
    groups
        Of ``C / groups`` channels each, which stand together.
    gain, bias : (C,)
        Left out if None; a bias needs a gain.

    Raises
    ------
    ShapeError
        If the shapes do not fit, or the channels do not divide into the groups.
    UsageError
        If there is a bias without a gain.
    """
    operands = _with_parameters("group_norm", x, gain, bias)
    result: Tensor = _group_norm(*operands, groups=groups, eps=eps)
    return result
