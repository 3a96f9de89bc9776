"""Smooth functions of one operand, element by element.

Integers become the floating dtype that NumPy's own functions give them: float16 of one
byte, float32 of two, else float64. Halves are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi
from math import sqrt as root
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import UsageError
from tparmpi.tensors import Plan, operator


def _floating(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    (dtype,) = operands
    if dtype.kind not in "biu":
        return dtype
    return np.dtype({1: np.float16, 2: np.float32}.get(dtype.itemsize, np.float64))


def _real(name: str) -> Callable[..., np.dtype[Any]]:
    """Return the dtype rule of a function that has none of complex numbers."""

    def rule(
        operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
    ) -> np.dtype[Any]:
        if operands[0].kind == "c":
            raise UsageError(f"{name}: takes real numbers, the tensor is {operands[0]}")
        return _floating(operands, attributes)

    return rule


def _wide(x: Any) -> Any:
    """`x`, as float32 if it is of halves."""
    return x.astype(dtypes.accumulation_dtype(x.dtype), copy=False)


def _narrow(plan: Plan, y: Any) -> Any:
    return y.astype(plan.outputs[0].dtype, copy=False)


@operator("...->...", dtype=_floating)
def sqrt(plan: Plan, x: Any) -> Any:
    """Return the square root of `x`."""
    y = plan.xp.sqrt(x)
    return y, y


@sqrt.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    y = _wide(saved)
    return (grad * (y.dtype.type(0.5) / y),)


@operator("...->...", dtype=_floating)
def rsqrt(plan: Plan, x: Any) -> Any:
    """Return ``1 / sqrt(x)``."""
    x = _wide(x)
    y = x.dtype.type(1) / plan.xp.sqrt(x)
    return _narrow(plan, y), y


@rsqrt.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    y = saved
    return (grad * (y.dtype.type(-0.5) * y * (y * y)),)


@operator("...->...", dtype=_floating)
def exp(plan: Plan, x: Any) -> Any:
    """Return e to the power of `x`."""
    y = plan.xp.exp(x)
    return y, y


@exp.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad * _wide(saved),)


@operator("...->...", dtype=_floating)
def log(plan: Plan, x: Any) -> Any:
    """Return the natural logarithm of `x`."""
    return plan.xp.log(x), x


@log.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad / _wide(saved),)


@operator("...->...", dtype=_floating)
def sin(plan: Plan, x: Any) -> Any:
    """Return the sine of `x`, in radians."""
    return plan.xp.sin(x), x


@sin.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad * plan.xp.cos(_wide(saved)),)


@operator("...->...", dtype=_floating)
def cos(plan: Plan, x: Any) -> Any:
    """Return the cosine of `x`, in radians."""
    return plan.xp.cos(x), x


@cos.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad * -plan.xp.sin(_wide(saved)),)


@operator("...->...", dtype=_floating)
def tanh(plan: Plan, x: Any) -> Any:
    """Return the hyperbolic tangent of `x`."""
    y = plan.xp.tanh(x)
    return y, y


@tanh.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    y = _wide(saved)
    return (grad * (y.dtype.type(1) - y * y),)


@operator("...->...", dtype=_real("sigmoid"))
def sigmoid(plan: Plan, x: Any) -> Any:
    """Return ``1 / (1 + exp(-x))``."""
    y = plan.backend.sigmoid(_wide(x))
    return _narrow(plan, y), y


@sigmoid.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    y = saved
    return (grad * (y * (y.dtype.type(1) - y)),)


@operator("...->...", dtype=_real("silu"))
def silu(plan: Plan, x: Any) -> Any:
    """Return ``x sigmoid(x)``, also called swish; Elfwing et al. (2018)."""
    wide = _wide(x)
    return _narrow(plan, wide * plan.backend.sigmoid(wide)), x


@silu.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x = _wide(saved)
    y = plan.backend.sigmoid(x)
    one = x.dtype.type(1)
    return (grad * (y * (one + x * (one - y))),)


@operator("...->...", dtype=_real("softplus"))
def softplus(plan: Plan, x: Any) -> Any:
    """Return ``log(1 + exp(x))``, as ``max(x, 0) + log1p(exp(-|x|))``."""
    xp, wide = plan.xp, _wide(x)
    y = xp.maximum(wide, wide.dtype.type(0)) + xp.log1p(xp.exp(-xp.abs(wide)))
    return _narrow(plan, y), x


@softplus.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad * plan.backend.sigmoid(_wide(saved)),)


@operator("...->...", dtype=_real("erf"))
def erf(plan: Plan, x: Any) -> Any:
    """Return the error function, ``2/sqrt(pi)`` times the integral of ``exp(-t^2)``
    from 0 to `x`.
    """
    return _narrow(plan, plan.backend.erf(_wide(x))), x


@erf.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x = _wide(saved)
    return (grad * (x.dtype.type(2 / root(pi)) * plan.xp.exp(-x * x)),)


def _relu_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    _real("relu")(operands, attributes)
    return operands[0]


@operator("...->...", dtype=_relu_dtype)
def relu(plan: Plan, x: Any) -> Any:
    """Return ``max(x, 0)``, of the dtype of `x`. Its derivative at 0 is 0."""
    return plan.xp.maximum(x, x.dtype.type(0)), x


@relu.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (plan.xp.where(saved > 0, grad, grad.dtype.type(0)),)


def _gelu_rule(x: tuple[int, ...], *, approximate: str = "tanh") -> str:
    if approximate not in ("tanh", "none"):
        raise UsageError(
            f"gelu: approximate must be 'tanh' or 'none', it is {approximate!r}"
        )
    return "...->..."


@operator(_gelu_rule, dtype=_real("gelu"))
def gelu(plan: Plan, x: Any) -> Any:
    """Return the Gaussian error linear unit of `x`; Hendrycks and Gimpel (2016).

    Parameters
    ----------
    approximate : {"tanh", "none"}
        ``x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, the form that GPT-2 uses, or
        ``x/2 (1 + erf(x / sqrt(2)))``, which is exact.
    """
    wide = _wide(x)
    if plan.attributes["approximate"] == "tanh":
        y = plan.backend.gelu(wide)
    else:
        y = wide * _normal_share(plan, wide)
    return _narrow(plan, y), x


@gelu.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    x = _wide(saved)
    if plan.attributes["approximate"] == "tanh":
        return (plan.backend.gelu_backward(x, _wide(grad)),)
    half, peak = x.dtype.type(0.5), x.dtype.type(1 / root(2 * pi))
    density = peak * plan.xp.exp(-half * x * x)
    return (grad * (_normal_share(plan, x) + x * density),)


def _normal_share(plan: Plan, x: Any) -> Any:
    """Share of the normal distribution below `x`, precise in its lower tail too."""
    return x.dtype.type(0.5) * plan.backend.erfc(x * x.dtype.type(-1 / root(2)))
