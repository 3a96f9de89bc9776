"""Elementwise operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import UsageError
from tparmpi.tensors import Plan, Tensor, method, operator, random


def _sum_to(plan: Plan, grad: Any, operand: int) -> Any:
    """Sum `grad` over the dims along which `operand` was broadcast."""
    shape = plan.inputs[operand].local_shape
    if grad.shape == shape:
        return grad
    extra = grad.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + dim
        for dim, size in enumerate(shape)
        if size == 1 and grad.shape[extra + dim] != 1
    )
    return grad.sum(axis=axes).reshape(shape)


def floating(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    """Return the dtype of a function of real numbers: integers become float64."""
    dtype = np.result_type(*operands)
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


@operator("... + ...->...", additive=True)
def add(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a + b``, broadcast as NumPy does."""
    return a + b, None


@add.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return tuple(
        _sum_to(plan, grad, number) if want else None
        for number, want in enumerate(wanted)
    )


@operator("... + ...->...", additive=True)
def sub(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a - b``, broadcast as NumPy does."""
    return a - b, None


@sub.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    left = _sum_to(plan, grad, 0) if wanted[0] else None
    right = -_sum_to(plan, grad, 1) if wanted[1] else None
    return left, right


@operator("...,...->...", linear=(0, 1))
def mul(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a * b``, broadcast as NumPy does."""
    return a * b, (a, b)


@mul.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    a, b = saved
    left = _sum_to(plan, grad * b, 0) if wanted[0] else None
    right = _sum_to(plan, grad * a, 1) if wanted[1] else None
    return left, right


@operator("...->...", linear=(0,))
def scale(plan: Plan, x: Any, *, factor: float) -> Any:
    """Return ``factor * x`` for a number `factor`, in the dtype of `x`."""
    factor = x.dtype.type(factor)
    return x * factor, factor


@scale.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad * saved,)


@operator("...->...", dtype=floating)
def gelu(plan: Plan, x: Any) -> Any:
    """Return the Gaussian error linear unit of `x` in its tanh form.

    ``x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, Hendrycks and Gimpel (2016).
    """
    return plan.backend.gelu(x), x


@gelu.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (plan.backend.gelu_backward(saved, grad),)


def _cast_rule(x: tuple[int, ...], *, dtype: np.dtype[Any]) -> str:
    return "...->..."


def _cast_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    return np.dtype(attributes["dtype"])


def _cast_linear(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> tuple[int, ...]:
    """A pending sum passes only if the type is at least as wide: rounding "
    "is not linear.
    """
    wide = np.result_type(operands[0], attributes["dtype"]) == attributes["dtype"]
    return (0,) if wide else ()


@operator(_cast_rule, name="cast", linear=_cast_linear, dtype=_cast_dtype, cast=False)
def _cast(plan: Plan, x: Any) -> Any:
    """Return `x` converted to the attribute `dtype`."""
    return x.astype(plan.attributes["dtype"]), None


@_cast.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad.astype(plan.inputs[0].dtype),)


@method
def cast(x: Tensor, dtype: Any) -> Tensor:
    """Return `x` converted to `dtype`. Local, but for a pending sum made narrower.

    A sum that is pending is reduced before it is rounded to a narrower type.
    """
    target = dtypes.dtype(dtype)
    if target == x.dtype:
        return x
    result: Tensor = _cast(x, dtype=target)
    return result


@operator("...->...", name="dropout", linear=(0,), dtype=floating)
def _dropout(
    plan: Plan, x: Any, *, key: tuple[int, int], p: float, rows: int | None
) -> Any:
    """Return `x` with elements zeroed with probability `p`, the others scaled up."""
    mask = random.keep_mask(key, plan.outputs[0], p, rows)
    factor = x.dtype.type(1 / (1 - p))
    return x * mask * factor, (mask, factor)


@_dropout.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    mask, factor = saved
    return (grad * mask * factor,)


@method
def dropout(x: Tensor, p: float, stream: str = "") -> Tensor:
    """Return `x` with elements zeroed with probability `p`, the others scaled. Local.

    The mask is a function of (seed, stream, call, step, index in the global batch), see
    `tpm.random.scope`: the same on every layout.

    Parameters
    ----------
    p
        In [0, 1).
    stream
        Name of the stream of random numbers, such as a module's path.

    Raises
    ------
    UsageError
        If `p` is out of range.
    """
    if not 0 <= p < 1:
        raise UsageError(f"dropout: p must be at least 0 and below 1, it is {p}")
    if p == 0:
        return x
    now = random.current()
    result: Tensor = _dropout(x, key=now.next_key(stream), p=p, rows=now.rows)
    return result
