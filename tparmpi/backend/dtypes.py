"""Number types: their names, how they combine, and what sums are accumulated in."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT16 = np.dtype(np.float16)
_HALVES = frozenset({_BFLOAT16, _FLOAT16})
_FLOATING = _HALVES | {np.dtype(np.float32), np.dtype(np.float64)}
_WEAK = {bool: 0, int: 1, float: 2, complex: 3}


def dtype(kind: Any) -> np.dtype[Any]:
    """Return the canonical dtype named by ``kind``.

    Parameters
    ----------
    kind : str, numpy.dtype or type
        Everything NumPy takes, and ``"bfloat16"``.

    Raises
    ------
    TypeError
        If no number type has that name.

    Notes
    -----
    Local.
    """
    return _BFLOAT16 if kind == "bfloat16" else np.dtype(kind)


def is_floating(kind: Any) -> bool:
    """Say whether ``kind`` is a real floating type, the two halves included."""
    return dtype(kind) in _FLOATING


def is_complex(kind: Any) -> bool:
    """Say whether ``kind`` is a complex type."""
    return dtype(kind).kind == "c"


def is_integer(kind: Any) -> bool:
    """Say whether ``kind`` is a signed or unsigned integer type (bool is not)."""
    return dtype(kind).kind in "iu"


def accumulation_dtype(kind: Any) -> np.dtype[Any]:
    """Return the dtype that sums of ``kind`` are accumulated in.

    It is float32 for float16 and bfloat16, and the type itself for all others.
    """
    own = dtype(kind)
    return np.dtype(np.float32) if own in _HALVES else own


def promote(*operands: Any) -> np.dtype[Any]:
    """Return the dtype in which ``operands`` combine.

    Parameters
    ----------
    *operands : dtype, str or Python number
        Dtypes are strong. Python numbers are weak: they change the kind (an integer
        with ``1.5`` becomes float64) but never the width of a type that already has
        that kind (float32 with ``1.5`` stays float32).

    Raises
    ------
    TypeError
        If there is no operand, or two of them have no common type.
    """
    if not operands:
        raise TypeError("promote: at least one dtype or number is needed")
    strong = tuple(dtype(o) for o in operands if type(o) not in _WEAK)
    return _promote(strong, max(_WEAK.get(type(o), 0) for o in operands))


@lru_cache(maxsize=1024)
def _promote(strong: tuple[np.dtype[Any], ...], weak: int) -> np.dtype[Any]:
    number = (False, 0, 0.0, 0j)[weak]
    if not strong:
        return np.result_type(number)
    # float16 stands in for bfloat16, which NumPy can neither combine with wide integers
    # nor with a Python number.
    stand_in = tuple(_FLOAT16 if s == _BFLOAT16 else s for s in strong)
    has_bfloat16 = _BFLOAT16 in strong
    if has_bfloat16 and _FLOAT16 in strong:
        stand_in += (np.dtype(np.float32),)
    common = np.result_type(*stand_in, number)
    return _BFLOAT16 if has_bfloat16 and common == _FLOAT16 else common
