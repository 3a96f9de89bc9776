"""Conversions of dtypes, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.tensors import Plan, Tensor, method, operator


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
    wide = dtypes.promote(*operands, attributes["dtype"]) == attributes["dtype"]
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


@operator("...->...", linear=(0,))
def copy(plan: Plan, x: Any) -> Any:
    """Return the values of `x` in memory of their own. Local."""
    return x.copy(), None


@copy.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    return (grad,)
