"""Python and NumPy numbers that stand beside tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import UsageError
from tparmpi.tensors.registry import methods

NUMBERS = (int, float, complex, np.generic)
"""Types of the numbers that operators take in place of tensors."""


_JOINT: dict[tuple[np.dtype[Any], type[Any]], np.dtype[Any]] = {}


def beside(name: str, value: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return `value` as an array without dims, of the dtype it has beside `dtype`.

    Python's numbers are weak and NumPy's scalars strong, see `dtypes.promote`. Local.

    Raises
    ------
    TypeError
        If `value` is no number.
    UsageError
        If it does not fit into the dtype.
    """
    joint = _joint(name, dtype, type(value))
    try:
        return np.asarray(value, joint)
    except OverflowError:
        raise UsageError(
            f"{name}: {value} does not fit into {joint}; cast the tensor to a wider "
            "dtype"
        ) from None


def _joint(name: str, dtype: np.dtype[Any], kind: type[Any]) -> np.dtype[Any]:
    """The dtype in which `dtype` combines with numbers of type `kind`."""
    joint = _JOINT.get((dtype, kind))
    if joint is None:
        joint = _JOINT[dtype, kind] = dtypes.promote(dtype, _like(name, kind))
    return joint


def _like(name: str, kind: type[Any]) -> Any:
    """What `dtypes.promote` takes for numbers of type `kind`."""
    if issubclass(kind, np.generic) and not issubclass(kind, np.character):
        return np.dtype(kind)
    for weak in (bool, int, float, complex):
        if issubclass(kind, weak):
            return weak()
    if hasattr(kind, "spec"):
        raise TypeError(
            f"{name}: a number is needed, not a tensor; write a * b, a / b or a ** b"
        )
    raise TypeError(
        f"{name}: operand is a {kind.__name__}, not a tensor; make it one with "
        "tpm.tensor(array, group)"
    )


def compared(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """As `beside`, for comparisons: a whole number out of range is an infinity."""
    try:
        return beside(name, value, dtype)
    except UsageError:
        return np.asarray(np.inf if value > 0 else -np.inf)


def fitted(name: str, x: Any, number: object) -> Any:
    """Return a tensor `x`, cast where NumPy would combine it with `number` in another
    dtype; what is no tensor as it is, for the operator to refuse. Local.

    Raises
    ------
    TypeError
        If `number` is no number.
    UsageError
        If it does not fit into the dtype.
    """
    if not hasattr(x, "spec"):
        return x
    dtype = x.dtype
    if dtype.kind in "fcV" and (
        type(number) is float or (type(number) is int and abs(number) < 1 << 53)
    ):
        return x
    joint = _joint(name, dtype, type(number))
    if joint.kind in "iu":
        beside(name, number, dtype)
    return x if joint == dtype else methods["cast"](x, joint)
