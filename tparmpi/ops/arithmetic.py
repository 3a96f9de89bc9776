"""Elementwise arithmetic, broadcast and with dtypes as NumPy has them.

In all but the wrappers a number may stand for one of two operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tparmpi.backend import dtypes, has_values
from tparmpi.errors import UsageError
from tparmpi.tensors import (
    NUMBERS,
    Plan,
    Tensor,
    beside,
    fitted,
    method,
    operator,
    registry,
)

Dtypes = Sequence[np.dtype[Any]]


def sum_to(plan: Plan, grad: Any, operand: int) -> Any:
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
    wide = dtypes.accumulation_dtype(grad.dtype)
    return grad.sum(axis=axes, dtype=wide).reshape(shape)


def floating(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
    """Return the dtype of a function of real numbers: integers become float64."""
    dtype = dtypes.promote(*operands)
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


def without_bools(name: str, instead: str) -> Callable[..., np.dtype[Any]]:
    """Return a dtype rule that promotes, and refuses bools as NumPy does."""

    def rule(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
        dtype = dtypes.promote(*operands)
        if dtype.kind == "b":
            raise UsageError(f"{name}: it has no meaning for bools; {instead}")
        return dtype

    return rule


def integers_of_bools(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
    """Promote; bools become int8, as NumPy's powers and floor divisions of them do."""
    dtype = dtypes.promote(*operands)
    return np.dtype(np.int8) if dtype.kind == "b" else dtype


@operator("... + ...->...", additive=True, numbers=beside)
def add(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a + b``, broadcast as NumPy does."""
    return a + b, None


@add.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return tuple(
        sum_to(plan, grad, number) if want else None
        for number, want in enumerate(wanted)
    )


@operator(
    "... + ...->...",
    additive=True,
    dtype=without_bools("sub", "use a ^ b, or cast one to integers"),
    numbers=beside,
)
def sub(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a - b``, broadcast as NumPy does."""
    return a - b, None


@sub.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    left = sum_to(plan, grad, 0) if wanted[0] else None
    right = -sum_to(plan, grad, 1) if wanted[1] else None
    return left, right


@operator("...,...->...", linear=(0, 1), numbers=beside)
def mul(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a * b``, broadcast as NumPy does."""
    return a * b, (a, b)


@mul.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    a, b = saved
    left = sum_to(plan, grad * b, 0) if wanted[0] else None
    right = sum_to(plan, grad * a, 1) if wanted[1] else None
    return left, right


@operator("...,...->...", linear=(0,), dtype=floating, numbers=beside)
def div(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a / b``, broadcast as NumPy does; of integers it is float64.

    A pending sum in `a` stays pending.
    """
    return a / b, (a, b)


@div.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    a, b = saved
    share = grad / b
    left = sum_to(plan, share, 0) if wanted[0] else None
    right = -sum_to(plan, share * (a / b), 1) if wanted[1] else None
    return left, right


def _floor_dtype(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
    dtype = integers_of_bools(operands, attributes)
    if dtype.kind == "c":
        raise UsageError("floor_divide: complex numbers have no floor; use a / b")
    return dtype


@operator("...,...->...", dtype=_floor_dtype, numbers=beside)
def floor_divide(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a // b``: the quotient rounded down, broadcast as NumPy does.

    Its gradients are zero, as they are wherever it has any.
    """
    return a // b, None


@floor_divide.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return tuple(
        plan.backend.zeros(spec.local_shape, grad.dtype) if want else None
        for spec, want in zip(plan.inputs, wanted, strict=True)
    )


@operator("...,...->...", name="pow", dtype=integers_of_bools, numbers=beside)
def _pow(plan: Plan, a: Any, b: Any) -> Any:
    """Return ``a ** b``, broadcast as NumPy does."""
    if b.dtype.kind == "i" and b.size and has_values(b) and int(b.min()) < 0:
        raise UsageError(
            f"pow: integers have no power {int(b.min())}; cast one operand to a "
            "floating dtype"
        )
    y = a**b
    return y, (a, b, y)


@_pow.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    xp = plan.xp
    a, b, y = saved
    left = right = None
    if wanted[0]:
        one = b.dtype.type(1)
        slope = b * a ** (xp.where(b == 0, one, b) - one)
        left = sum_to(plan, grad * slope, 0)
    if wanted[1]:
        level = (a == 0) & (b >= 0)
        logarithm = xp.log(xp.where(level, a.dtype.type(1), a))
        right = sum_to(plan, grad * (y * logarithm), 1)
    return left, right


@operator("...->...", name="power", dtype=integers_of_bools)
def _power(plan: Plan, x: Any, *, exponent: Any) -> Any:
    """Return ``x ** exponent`` for a number, in the dtype of `x`."""
    if exponent == 2:
        y = x * x
    elif exponent == 0.5:
        y = plan.xp.sqrt(x)
    elif exponent == -1:
        y = x.dtype.type(1) / x
    else:
        y = x ** x.dtype.type(exponent)
    kept = y if exponent in (0.5, -1) else x
    return y, (kept, exponent)


@_power.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    kept, exponent = saved
    factor = kept.dtype.type(exponent)
    if exponent == 0.5:
        return (grad * (factor / kept),)
    if exponent == -1:
        return (grad * (factor * kept * kept),)
    if exponent == 0:
        return (plan.xp.zeros_like(grad),)
    slope = kept if exponent == 2 else kept ** kept.dtype.type(exponent - 1)
    return (grad * (factor * slope),)


@method
def power(x: Tensor, exponent: Any) -> Tensor:
    """Return ``x ** exponent`` for a number `exponent`.

    The powers 2, 0.5 and -1 are a product, a root and a quotient.

    Raises
    ------
    UsageError
        If an integer is raised to a negative integer.
    """
    x = fitted("power", x, exponent)
    if isinstance(x, Tensor) and x.dtype.kind in "iu" and exponent < 0:
        raise UsageError(
            f"power: integers have no power {exponent}; cast the tensor to a floating "
            "dtype"
        )
    return _apply("power", x, exponent=exponent)


@method
def pow(a: Any, b: Any) -> Tensor:
    """Return ``a ** b``, broadcast as NumPy does. One operand may be a number.

    The gradient for `b` is NaN where `a` is negative; that for either is 0 where the
    power is constant: ``0 ** b`` with ``b >= 0``, and ``a ** 0``.

    Raises
    ------
    UsageError
        If an integer is raised to a negative integer.
    """
    if isinstance(a, Tensor) and isinstance(b, NUMBERS):
        return power(a, b)
    return _apply("pow", a, b)


@operator("...->...", name="scale", linear=(0,))
def _scale(plan: Plan, x: Any, *, factor: Any) -> Any:
    """Return ``factor * x`` for a number `factor`, in the dtype of `x`."""
    factor = x.dtype.type(factor)
    return x * factor, factor


@_scale.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad * saved,)


@method
def scale(x: Tensor, factor: Any) -> Tensor:
    """Return ``factor * x`` for a number `factor`. A pending sum stays pending."""
    return _apply("scale", fitted("scale", x, factor), factor=factor)


@operator("...->...", name="divide", linear=(0,), dtype=floating)
def _divide(plan: Plan, x: Any, *, divisor: Any) -> Any:
    """Return ``x / divisor`` for a number `divisor`."""
    divisor = x.dtype.type(divisor)
    return x / divisor, divisor


@_divide.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad / saved,)


@method
def divide(x: Tensor, divisor: Any) -> Tensor:
    """Return ``x / divisor`` for a number `divisor`. A pending sum stays pending."""
    return _apply("divide", fitted("divide", x, divisor), divisor=divisor)


@operator(
    "...->...",
    linear=(0,),
    dtype=without_bools("neg", "use ~x"),
)
def neg(plan: Plan, x: Any) -> Any:
    """Return ``-x``."""
    return -x, None


@neg.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (-grad,)


def _abs_dtype(operands: Dtypes, attributes: dict[str, Any]) -> np.dtype[Any]:
    (dtype,) = operands
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


@operator("...->...", dtype=_abs_dtype, cast=False)
def abs(plan: Plan, x: Any) -> Any:
    """Return the absolute value of `x`. Its derivative at 0 is 0."""
    return plan.xp.abs(x), x


@abs.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    sign = plan.xp.sign(saved)
    return (grad * (sign.conj() if sign.dtype.kind == "c" else sign),)


def _apply(name: str, *operands: Any, **keywords: Any) -> Tensor:
    result: Tensor = registry[name](*operands, **keywords)
    return result
