"""Comparisons, logic, choices: elementwise and broadcast as NumPy does.

In operators of two operands a number may stand for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import UsageError
from tparmpi.ops.arithmetic import sum_to
from tparmpi.tensors import (
    NUMBERS,
    Operator,
    Plan,
    Tensor,
    beside,
    compared,
    fitted,
    method,
    operator,
)

Dtypes = Sequence[np.dtype[Any]]


def _bool(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
    return np.dtype(np.bool_)


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Bring to one dtype what NumPy cannot promote: bfloat16 beside another."""
    if a.dtype != b.dtype and "V" in (a.dtype.kind, b.dtype.kind):
        joint = dtypes.promote(a.dtype, b.dtype)
        return a.astype(joint), b.astype(joint)
    return a, b


def _comparison(name: str, function: str, doc: str) -> Operator:
    """Return a record of two operands whose result is bool."""

    def forward(plan: Plan, a: Any, b: Any) -> Any:
        return getattr(plan.xp, function)(*_alike(a, b)), None

    forward.__doc__ = f"Return {doc}: a bool for each element."
    made = operator(
        "...,...->...", name=name, dtype=_bool, cast=False, numbers=compared
    )
    return made(forward)


eq = _comparison("eq", "equal", "whether ``a == b``")
ne = _comparison("ne", "not_equal", "whether ``a != b``")
lt = _comparison("lt", "less", "whether ``a < b``")
le = _comparison("le", "less_equal", "whether ``a <= b``")
gt = _comparison("gt", "greater", "whether ``a > b``")
ge = _comparison("ge", "greater_equal", "whether ``a >= b``")
logical_and = _comparison(
    "logical_and", "logical_and", "whether `a` and `b` are not zero"
)
logical_or = _comparison("logical_or", "logical_or", "whether `a` or `b` is not zero")
logical_xor = _comparison(
    "logical_xor", "logical_xor", "whether one of `a` and `b` is not zero"
)


def _test(name: str, doc: str) -> Operator:
    """Return a record of one operand whose result is bool."""

    def forward(plan: Plan, x: Any) -> Any:
        return getattr(plan.xp, name)(x), None

    forward.__doc__ = f"Return whether `x` is {doc}: a bool for each element."
    return operator("...->...", name=name, dtype=_bool, cast=False)(forward)


logical_not = _test("logical_not", "zero")
isfinite = _test("isfinite", "neither infinite nor NaN")
isinf = _test("isinf", "infinite")
isnan = _test("isnan", "NaN, not a number")


def _whole_numbers(name: str) -> Callable[..., np.dtype[Any]]:
    def rule(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
        dtype = dtypes.promote(*operands)
        if dtype.kind not in "biu":
            raise UsageError(
                f"{name}: takes bools and integers, not {dtype}; compare first, for "
                f"example (a > 0) & (b > 0), or use logical_{name.split('_')[1]}"
            )
        return dtype

    return rule


def _bitwise(name: str, doc: str) -> Operator:
    def forward(plan: Plan, a: Any, b: Any) -> Any:
        return getattr(plan.xp, name)(a, b), None

    forward.__doc__ = f"Return {doc} of integers, bit by bit; of bools the logical one."
    made = operator(
        "...,...->...", name=name, dtype=_whole_numbers(name), numbers=beside
    )
    return made(forward)


bitwise_and = _bitwise("bitwise_and", "``a & b``")
bitwise_or = _bitwise("bitwise_or", "``a | b``")
bitwise_xor = _bitwise("bitwise_xor", "``a ^ b``")


@operator("...->...", dtype=_whole_numbers("bitwise_not"))
def bitwise_not(plan: Plan, x: Any) -> Any:
    """Return ``~x`` of integers, bit by bit; of bools the logical not."""
    return ~x, None


@operator("...,...->...", numbers=beside)
def maximum(plan: Plan, a: Any, b: Any) -> Any:
    """Return the greater of `a` and `b`; NaN where one of them is.

    Where they are equal each gets half the gradient.
    """
    return plan.xp.maximum(a, b), (a, b)


@maximum.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    a, b = saved
    return _shares(plan, grad, wanted, a < b, b < a, a == b)


@operator("...,...->...", numbers=beside)
def minimum(plan: Plan, a: Any, b: Any) -> Any:
    """Return the lesser of `a` and `b`; NaN where one of them is.

    Where they are equal each gets half the gradient.
    """
    return plan.xp.minimum(a, b), (a, b)


@minimum.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    a, b = saved
    return _shares(plan, grad, wanted, b < a, a < b, a == b)


def _shares(
    plan: Plan, grad: Any, wanted: tuple[bool, ...], *lost: Any
) -> tuple[Any, ...]:
    """Gradients of two operands, of which the first loses at ``lost[0]``, the second at
    ``lost[1]``, and both have half at ``lost[2]``.
    """
    where, number = plan.xp.where, grad.dtype.type
    grad = where(lost[2], grad * number(0.5), grad)
    return tuple(
        sum_to(plan, where(lost[i], number(0), grad), i) if wanted[i] else None
        for i in (0, 1)
    )


def _where_dtype(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
    condition, *values = operands
    if condition.kind != "b":
        raise UsageError(
            f"where: the condition must be bool, it is {condition}; compare it, for "
            "example where(x != 0, a, b)"
        )
    return dtypes.promote(*values)


@operator(
    "...,... + ...->...", name="where", linear=(1, 2), dtype=_where_dtype, cast=False
)
def _where(plan: Plan, condition: Any, a: Any, b: Any) -> Any:
    """Return `a` where the condition is true, `b` elsewhere."""
    dtype = plan.outputs[0].dtype
    # Of a sum that is pending in one value, a single member adds the other value.
    a = a if plan.leads(1) else plan.backend.zeros(a.shape, dtype)
    b = b if plan.leads(2) else plan.backend.zeros(b.shape, dtype)
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    return plan.xp.where(condition, a, b), condition


@_where.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    where, zero = plan.xp.where, grad.dtype.type(0)
    left = sum_to(plan, where(saved, grad, zero), 1) if wanted[1] else None
    right = sum_to(plan, where(saved, zero, grad), 2) if wanted[2] else None
    return None, left, right


def where(condition: Tensor, a: Any, b: Any) -> Tensor:
    """Return `a` where `condition` is true and `b` elsewhere, broadcast as NumPy does.

    A sum that is pending in `a` or `b` stays pending.

    Parameters
    ----------
    condition : Tensor of bools
    a, b : Tensor or number

    Raises
    ------
    UsageError
        If the condition is not bool.
    """
    if isinstance(condition, Tensor):
        if isinstance(a, NUMBERS) and isinstance(b, NUMBERS):
            b = condition.constant(np.asarray(b, dtypes.promote(a, b)))
        if isinstance(b, Tensor) and not isinstance(a, Tensor):
            a = condition.constant(beside("where", a, b.dtype))
        elif isinstance(a, Tensor) and not isinstance(b, Tensor):
            b = condition.constant(beside("where", b, a.dtype))
    result: Tensor = _where(condition, a, b)
    return result


def _clip_dtype(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
    (dtype,) = operands
    if dtype.kind == "c":
        raise UsageError(f"clip: takes real numbers, the tensor is {dtype}")
    return dtype


@operator("...->...", name="clip", dtype=_clip_dtype)
def _clip(plan: Plan, x: Any, *, lower: Any, upper: Any) -> Any:
    """Return `x` limited to the range from `lower` to `upper`."""
    y = x
    if lower is not None:
        lower = x.dtype.type(lower)
        y = plan.xp.maximum(y, lower)
    if upper is not None:
        upper = x.dtype.type(upper)
        y = plan.xp.minimum(y, upper)
    return y, (x, lower, upper)


@_clip.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x, lower, upper = saved
    zero = grad.dtype.type(0)
    if lower is not None:
        grad = plan.xp.where(x < lower, zero, grad)
    if upper is not None:
        grad = plan.xp.where(x > upper, zero, grad)
    return (grad,)


@method
def clip(x: Tensor, lower: Any = None, upper: Any = None) -> Tensor:
    """Return `x` limited to the range from `lower` to `upper`.

    NaN stays NaN; where the bounds cross, `upper` counts. The gradient passes between
    the bounds, at the bounds too, and is 0 outside.

    Parameters
    ----------
    lower, upper : number or None
        None is no bound. For bounds that are tensors see `maximum` and `minimum`.

    Raises
    ------
    UsageError
        If a bound is a tensor, or does not fit into the dtype of integers.
    """
    for bound in (lower, upper):
        if isinstance(bound, Tensor):
            raise UsageError(
                "clip: a bound is a tensor; use tpm.maximum(x, lower) and "
                "tpm.minimum(x, upper)"
            )
        if bound is not None:
            x = fitted("clip", x, bound)
    if lower is None and upper is None:
        return x
    result: Tensor = _clip(x, lower=lower, upper=upper)
    return result
