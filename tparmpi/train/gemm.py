"""How fast this machine multiplies matrices, at given shapes."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from tparmpi.comm import Place
from tparmpi.models.gpt_cost import Product

_SECONDS = 0.02
_TIMES = 5


def seconds(counts: Counter[Product], place: Place, dtype: Any) -> float:
    """Return what the products take, made alone, one after the other, into memory.

    Each shape is measured with the threads that BLAS has here, on arrays that are there
    already; the median of some times counts. Local: call it on all ranks at once, so
    that all are busy.
    """
    backend = place.backend
    total = 0.0
    for product, count in sorted(counts.items()):
        rows, inner, columns = product
        a, b, out = (
            backend.empty(shape, np.dtype(dtype))
            for shape in ((rows, inner), (inner, columns), (rows, columns))
        )
        a[...] = 1.0
        b[...] = 1.0
        total += count * _once(backend, a, b, out)
    return total


def _once(backend: Any, a: Any, b: Any, out: Any) -> float:
    def timed(repeat: int) -> float:
        start = time.perf_counter()
        for _ in range(repeat):
            backend.xp.matmul(a, b, out=out)
        backend.synchronize()
        return (time.perf_counter() - start) / repeat

    timed(1)
    repeat = max(1, int(_SECONDS / max(timed(1), 1e-6)))
    return float(np.median([timed(repeat) for _ in range(_TIMES)]))
