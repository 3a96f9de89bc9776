"""What a reduction is: a left fold in member order, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tparmpi.backend.dtypes import accumulation_dtype
from tparmpi.comm.algorithms import Fold
from tparmpi.errors import UsageError

Array = Any

OPERATIONS = ("sum", "max", "min", "mean")


@cache
def fold_of(op: str, dtype: np.dtype[Any], xp: Any, doing: str) -> Fold:
    """Return the function that folds the members' arrays of `dtype` into one. Local.

    Sums and means of float16 and bfloat16 are accumulated in float32 and rounded once;
    integers wrap and truth values are or-ed, as NumPy's ``add`` does.

    Raises
    ------
    UsageError
        If there is no such operation, or it has no meaning for the dtype.
    """
    if op not in OPERATIONS:
        raise UsageError(f"{doing}: op must be one of {OPERATIONS}, it is {op!r}")
    if op in ("max", "min"):
        return Plain(xp.maximum if op == "max" else xp.minimum)
    if op == "mean" and dtype.kind in "biu":
        raise UsageError(
            f"{doing}: the mean of {dtype.name} arrays is not {dtype.name}; cast them "
            "to a floating dtype first"
        )
    wide = accumulation_dtype(dtype)
    if wide == dtype and op == "sum":
        return Plain(xp.add)
    return _Wide(wide, mean=op == "mean")


class Plain:
    """Folds with one ufunc in the arrays' own dtype."""

    def __init__(self, ufunc: Any) -> None:
        self.ufunc = ufunc

    def __call__(self, parts: Sequence[Array], out: Array) -> None:
        ufunc = self.ufunc
        ufunc(parts[0], parts[1], out=out)
        for member in range(2, len(parts)):
            ufunc(out, parts[member], out=out)


class _Wide:
    """Sums in another dtype, perhaps divides, and rounds at the end."""

    def __init__(self, wide: np.dtype[Any], *, mean: bool) -> None:
        self._wide = wide
        self._mean = mean

    def __call__(self, parts: Sequence[Array], out: Array) -> None:
        total = parts[0].astype(self._wide)
        for part in parts[1:]:
            total += part.astype(self._wide, copy=False)
        if self._mean:
            total /= len(parts)
        out[...] = total.astype(out.dtype, copy=False)
