"""Losses: one number for each element or position, or their sum and its weight."""

from __future__ import annotations

from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import UsageError
from tparmpi.ops.arithmetic import floating
from tparmpi.ops.casting import cast
from tparmpi.ops.combiners import narrowed, widened
from tparmpi.ops.embedding import check_ids
from tparmpi.ops.gating import same_shapes
from tparmpi.ops.reductions import sum
from tparmpi.tensors import Plan, Tensor, operator, tensor


def _summed(loss: Tensor) -> Tensor:
    """The sum of a loss's elements, of halves in float32."""
    return sum(cast(loss, dtypes.accumulation_dtype(loss.dtype)))


def _count(like: Tensor) -> Tensor:
    """The number of elements of all, as a tensor without dims. Local."""
    return tensor(np.array(float(like.size)), like.device)


@operator("...{v},...->...", name="cross_entropy", dtype=lambda d, _: d[0], cast=False)
def _cross_entropy(
    plan: Plan,
    logits: Any,
    targets: Any,
    *,
    label_smoothing: float,
    ignore_index: int | None,
) -> Any:
    """Return ``logsumexp(logits) - logits[target]`` for each position, in nats."""
    if logits.dtype.kind in "biu":
        raise UsageError(
            f"cross_entropy: logits must be floating, they are {logits.dtype}"
        )
    backend, xp, shard = plan.backend, plan.xp, plan.factors["v"]
    ignored = None
    if ignore_index is not None:
        ignored = targets == ignore_index
        check_ids(plan, xp.where(ignored, 0, targets), shard.size)
        # Where nothing is to be found, in any member's part of the vocabulary.
        targets = xp.where(ignored, shard.size, targets.astype(np.int64))
    else:
        check_ids(plan, targets, shard.size)
    wide = widened(logits)
    peak = plan.combine("v", backend.xent_local_max(wide), "max")
    sums, chosen = backend.xent_local_stats(wide, targets, shard.offset, peak)
    parts = [sums, chosen]
    if label_smoothing:
        parts.append((wide - peak[..., None]).sum(axis=-1))
    if shard.axes:
        parts = list(plan.combine("v", xp.stack(parts)))
    # The target's logit is near the peak: their difference has no rounding error.
    below = peak - parts[1]
    loss = xp.log(parts[0])
    logsumexp = loss + peak
    if label_smoothing:
        below *= 1 - label_smoothing
        below -= parts[2] * (label_smoothing / shard.size)
    loss += below
    if ignored is not None:
        loss = xp.where(ignored, loss.dtype.type(0), loss)
    loss = loss.astype(logits.dtype, copy=False)
    return loss, (logits, targets, logsumexp, ignored, label_smoothing)


@_cross_entropy.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    logits, targets, logsumexp, ignored, smoothing = saved
    shard = plan.factors["v"]
    dlogits = plan.backend.xent_backward(
        *(widened(logits), targets, shard.offset, logsumexp, widened(grad)),
        hit=1 - smoothing,
        spread=smoothing / max(shard.size, 1),
    )
    if ignored is not None:
        plan.xp.copyto(dlogits, 0, where=ignored[..., None])
    return narrowed(plan, dlogits), None


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Tensor:
    """Return ``logsumexp(logits) - logits[target]`` for each position, in nats.

    If the vocabulary is split, its members exchange the maximum, and then the sum of
    exponentials together with the target's logit (and the logits' mean, for label
    smoothing): two or three numbers a position. Collective over its axes; else local.

    Parameters
    ----------
    logits : (..., V)
    targets : (...), integers from 0 to V-1
    label_smoothing
        The part of the target's probability that is spread evenly over all V, in
        [0, 1): Szegedy et al., "Rethinking the Inception Architecture" (2016).
    ignore_index
        Positions with this target have loss and gradient 0, whatever their logits.

    Returns
    -------
    Tensor : (...)

    Raises
    ------
    UsageError
        If a target is outside the vocabulary, the logits are not floating or
        `label_smoothing` is out of range.
    """
    if not 0 <= label_smoothing < 1:
        raise UsageError(
            "cross_entropy: label_smoothing must be at least 0 and below 1, it is "
            f"{label_smoothing}"
        )
    result: Tensor = _cross_entropy(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    return result


@operator(
    "...->...",
    name="counted",
    dtype=lambda d, _: np.dtype(np.float64),
    cast=False,
)
def _counted(plan: Plan, targets: Any, *, ignore_index: int) -> Any:
    """Return 1 for each target that is not ignored, 0 for the others."""
    return (targets != ignore_index).astype(np.float64), None


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `cross_entropy` over the positions, and their number.

    The mean over any layout, and over any number of calls, is the sum of the sums over
    the sum of the weights. Collective as `cross_entropy` is; where positions are split
    both results are pending sums.

    Parameters
    ----------
    logits, targets, label_smoothing, ignore_index
        See `cross_entropy`.

    Returns
    -------
    sum : Tensor, ()
        In float32 for half logits.
    weight : Tensor, (), float64
        The number of positions of all members that are not ignored; it has no gradient.

    Raises
    ------
    UsageError
        See `cross_entropy`.
    """
    loss = cross_entropy(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    if ignore_index is None:
        return _summed(loss), _count(loss)
    return _summed(loss), sum(_counted(targets, ignore_index=ignore_index))


@operator("...,...->...", name="mse", dtype=floating)
def _mse(plan: Plan, prediction: Any, target: Any) -> Any:
    """Return ``(prediction - target)^2`` for each element."""
    difference = widened(prediction) - widened(target)
    loss = plan.xp.square(difference)
    return loss.astype(prediction.dtype, copy=False), difference


@_mse.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, bool]) -> Any:
    slope = 2 * saved * grad
    return _narrow(plan, slope if wanted[0] else None, -slope if wanted[1] else None)


def _narrow(plan: Plan, *grads: Any) -> tuple[Any, ...]:
    return tuple(
        g if g is None else g.astype(spec.dtype, copy=False)
        for spec, g in zip(plan.inputs, grads, strict=True)
    )


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the squared error ``(prediction - target)^2`` of each element. Local.

    Raises
    ------
    ShapeError
        If the shapes differ: nothing is broadcast.
    """
    same_shapes("mse", "'prediction' and 'target'", prediction, target)
    result: Tensor = _mse(prediction, target)
    return result


def mse_sum(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the squared errors, and the number of elements. Local.

    Returns
    -------
    sum, weight : Tensor, ()
        See `cross_entropy_sum`.

    Raises
    ------
    ShapeError
        If the shapes differ.
    """
    loss = mse(prediction, target)
    return _summed(loss), _count(loss)


@operator("...,...->...", name="bce", dtype=floating)
def _bce(plan: Plan, logits: Any, target: Any) -> Any:
    """Return the cross-entropy of two classes for each element."""
    xp, x, y = plan.xp, widened(logits), widened(target)
    loss = xp.maximum(x, 0) - x * y + xp.log1p(xp.exp(-xp.abs(x)))
    return loss.astype(logits.dtype, copy=False), (logits, target)


@_bce.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, bool]) -> Any:
    x, y = map(widened, saved)
    grad = widened(grad)
    dx = (plan.backend.sigmoid(x) - y) * grad if wanted[0] else None
    return _narrow(plan, dx, -x * grad if wanted[1] else None)


def bce(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of two classes for each element, in nats. Local.

    ``-target log p - (1 - target) log(1 - p)`` with ``p = sigmoid(logits)``, computed
    as ``max(x, 0) - x target + log(1 + exp(-|x|))``, which cannot overflow.

    Parameters
    ----------
    logits : (...)
    target : (...)
        Probabilities of the first class, 0 to 1.

    Raises
    ------
    ShapeError
        If the shapes differ: nothing is broadcast.
    """
    same_shapes("bce", "'logits' and 'target'", logits, target)
    result: Tensor = _bce(logits, target)
    return result


def bce_sum(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of `bce` over the elements, and their number. Local.

    Returns
    -------
    sum, weight : Tensor, ()
        See `cross_entropy_sum`.

    Raises
    ------
    ShapeError
        If the shapes differ.
    """
    loss = bce(logits, target)
    return _summed(loss), _count(loss)
