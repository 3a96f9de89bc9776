"""Softmax and its logarithm."""

from __future__ import annotations

import string
from typing import Any

from tparmpi.ops.arithmetic import floating
from tparmpi.ops.combiners import narrowed, widened
from tparmpi.ops.reductions import normalize_dim
from tparmpi.tensors import Plan, Tensor, method, operator


def _rule(x: tuple[int, ...], *, dim: int) -> str:
    letters = string.ascii_letters[: len(x)]
    marked = f"{letters[:dim]}{{{letters[dim]}}}{letters[dim + 1 :]}"
    return f"{marked}->{marked}"


def _is_split(plan: Plan) -> bool:
    return bool(plan.factors[_factor(plan)].axes)


def _factor(plan: Plan) -> str:
    return string.ascii_letters[plan.attributes["dim"]]


def _total(plan: Plan, x: Any) -> Any:
    """The sum of `x` over the whole dim, which is kept with size 1."""
    part = x.sum(axis=plan.attributes["dim"], keepdims=True)
    return plan.combine(_factor(plan), part)


def _shifted(plan: Plan, x: Any) -> Any:
    """`x` less its maximum over the whole dim."""
    dim, xp = plan.attributes["dim"], plan.xp
    if x.shape[dim]:
        peak = x.max(axis=dim, keepdims=True)
    else:
        peak = xp.full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), -xp.inf, x.dtype)
    return x - plan.combine(_factor(plan), peak, "max")


@operator(_rule, name="softmax", dtype=floating)
def _softmax(plan: Plan, x: Any) -> Any:
    """Return the softmax of `x` along the attribute `dim`."""
    if _is_split(plan):
        y = plan.xp.exp(_shifted(plan, widened(x)))
        y /= _total(plan, y)
    else:
        y = plan.backend.softmax(widened(x), plan.attributes["dim"])
    y = y.astype(x.dtype, copy=False)
    return y, y


@_softmax.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    y, grad = widened(saved), widened(grad)
    if _is_split(plan):
        return (narrowed(plan, y * (grad - _total(plan, grad * y))),)
    dx = plan.backend.softmax_backward(y, grad, plan.attributes["dim"])
    return (narrowed(plan, dx),)


@method
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return ``exp(x) / sum(exp(x))`` along `dim`.

    Local, unless `dim` is split: then its members exchange maxima and sums only.

    Raises
    ------
    ShapeError
        If the dim does not exist.
    """
    dim = normalize_dim(x, dim, "softmax")
    result: Tensor = _softmax(x, dim=dim)
    return result


@operator(_rule, name="log_softmax", dtype=floating)
def _log_softmax(plan: Plan, x: Any) -> Any:
    """Return the logarithm of the softmax of `x` along the attribute `dim`."""
    if plan.factors[_factor(plan)].size == 0:
        return x.copy(), x
    y = _shifted(plan, widened(x))
    y -= plan.xp.log(_total(plan, plan.xp.exp(y)))
    y = y.astype(x.dtype, copy=False)
    return y, y


@_log_softmax.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    grad = widened(grad)
    share = plan.xp.exp(widened(saved))
    return (narrowed(plan, grad - share * _total(plan, grad)),)


@method
def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return ``x - log(sum(exp(x)))`` along `dim`, without overflow.

    Local, unless `dim` is split: then its members exchange maxima and sums only.

    Raises
    ------
    ShapeError
        If the dim does not exist.
    """
    dim = normalize_dim(x, dim, "log_softmax")
    result: Tensor = _log_softmax(x, dim=dim)
    return result
