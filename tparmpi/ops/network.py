"""Operators of neural networks: softmax, norms, embedding, losses."""

from __future__ import annotations

import string
from typing import Any

from tparmpi.errors import UsageError
from tparmpi.ops.arithmetic import floating
from tparmpi.ops.reductions import normalize_dims
from tparmpi.tensors import Plan, Tensor, method, operator


def _softmax_rule(x: tuple[int, ...], *, dim: int) -> str:
    letters = string.ascii_letters[: len(x)]
    marked = f"{letters[:dim]}{{{letters[dim]}}}{letters[dim + 1 :]}"
    return f"{marked}->{marked}"


@operator(_softmax_rule, name="softmax", dtype=floating)
def _softmax(plan: Plan, x: Any) -> Any:
    """Return the softmax of `x` along the attribute `dim`."""
    dim = plan.attributes["dim"]
    factor = string.ascii_letters[dim]
    if not plan.factors[factor].axes:
        y = plan.backend.softmax(x, dim)
        return y, y
    shape = plan.inputs[0].local_shape
    if shape[dim]:
        peak = x.max(axis=dim, keepdims=True)
    else:
        peak = plan.xp.full((*shape[:dim], 1, *shape[dim + 1 :]), -plan.xp.inf, x.dtype)
    y = plan.xp.exp(x - plan.combine(factor, peak, "max"))
    y /= plan.combine(factor, y.sum(axis=dim, keepdims=True))
    return y, y


@_softmax.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    dim = plan.attributes["dim"]
    factor = string.ascii_letters[dim]
    if not plan.factors[factor].axes:
        return (plan.backend.softmax_backward(saved, grad, dim),)
    inner = plan.combine(factor, (grad * saved).sum(axis=dim, keepdims=True))
    return (saved * (grad - inner),)


@method
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return ``exp(x) / sum(exp(x))`` along `dim`.

    If `dim` is sharded, members exchange its maximum and sum only.

    Raises
    ------
    ShapeError
        If the dim does not exist.
    """
    (dim,) = normalize_dims(x, dim, "softmax")
    result: Tensor = _softmax(x, dim=dim)
    return result


@operator("...[d],[d],[d]->...[d]", dtype=floating)
def layer_norm(plan: Plan, x: Any, gain: Any, bias: Any, *, eps: float = 1e-5) -> Any:
    """Return `x` with mean 0 and variance 1 over its last dim, times gain, plus bias.

    ``(x - mean) / sqrt(variance + eps) * gain + bias``, Ba et al. (2016). The last dim
    must not be sharded.

    Parameters
    ----------
    x : (..., D)
    gain, bias : (D,)
    """
    y, mean, rstd = plan.backend.layer_norm(x, gain, bias, eps)
    return y, (x, mean, rstd, gain)


@layer_norm.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, bool, bool]) -> Any:
    x, mean, rstd, gain = saved
    return plan.backend.layer_norm_backward(x, mean, rstd, gain, grad, wanted)


def _check_ids(name: str, ids: Any, size: int) -> None:
    """Refuse what a kernel would silently round or take for another member's row."""
    if ids.dtype.kind not in "iu":
        raise UsageError(f"{name}: ids must be integers, they are {ids.dtype}")
    if ids.size == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise UsageError(
            f"{name}: the id {low if low < 0 else high} is outside the vocabulary of "
            f"{size}; ids go from 0 to {size - 1}"
        )


@operator("vd,...->...d", linear=(0,), dtype=lambda dtypes, _: dtypes[0], cast=False)
def embedding(plan: Plan, table: Any, ids: Any) -> Any:
    """Return the rows of `table` that `ids` name.

    A contraction over the vocabulary: if that is sharded, each member gives its own
    rows, zeros for the others, and the result is a pending sum.

    Parameters
    ----------
    table : (V, D)
    ids : (...), integers from 0 to V-1

    Raises
    ------
    UsageError
        If an id is outside the vocabulary.
    """
    _check_ids("embedding", ids, plan.factors["v"].size)
    rows = plan.backend.embedding(table, ids, plan.factors["v"].offset)
    return rows, ids


@embedding.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    shard = plan.factors["v"]
    dtable = plan.backend.embedding_backward(grad, saved, shard.offset, shard.length)
    return dtable, None


@operator("...{v},...->...", dtype=lambda dtypes, _: dtypes[0], cast=False)
def cross_entropy(plan: Plan, logits: Any, targets: Any) -> Any:
    """Return ``logsumexp(logits) - logits[target]`` for each position, in nats.

    If the vocabulary is sharded, members exchange the maximum, and then the sum of
    exponentials together with the target's logit: two numbers a position.

    Parameters
    ----------
    logits : (..., V)
    targets : (...), integers from 0 to V-1

    Returns
    -------
    Tensor : (...)

    Raises
    ------
    UsageError
        If a target is outside the vocabulary.
    """
    _check_ids("cross_entropy", targets, plan.factors["v"].size)
    if logits.dtype.kind in "biu":
        raise UsageError(
            f"cross_entropy: logits must be floating, they are {logits.dtype}"
        )
    backend, xp = plan.backend, plan.xp
    first = plan.factors["v"].offset
    peak = plan.combine("v", backend.xent_local_max(logits), "max")
    sums, chosen = backend.xent_local_stats(logits, targets, first, peak)
    if plan.factors["v"].axes:
        sums, chosen = plan.combine("v", xp.stack((sums, chosen)))
    logsumexp = xp.log(sums) + peak
    return logsumexp - chosen, (logits, targets, logsumexp)


@cross_entropy.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    logits, targets, logsumexp = saved
    first = plan.factors["v"].offset
    dlogits = plan.backend.xent_backward(logits, targets, first, logsumexp, grad)
    return dlogits, None
