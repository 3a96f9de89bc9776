"""Arrays in a process's own memory, with NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import dtypes, numpy_attention, numpy_kernels, numpy_updates
from .base import Backend
from .random import Key


class NumpyBackend(Backend):
    """NumPy arrays. See `Backend`."""

    kind = "cpu"
    xp: Any = np
    supported_dtypes = frozenset(
        np.dtype(kind).name
        for kind in (
            *("bool", "int8", "int16", "int32", "int64"),
            *("uint8", "uint16", "uint32", "uint64"),
            *("float16", dtypes.dtype("bfloat16"), "float32", "float64"),
            *("complex64", "complex128"),
        )
    )

    gelu = staticmethod(numpy_kernels.gelu)
    gelu_backward = staticmethod(numpy_kernels.gelu_backward)
    swiglu = staticmethod(numpy_kernels.swiglu)
    swiglu_backward = staticmethod(numpy_kernels.swiglu_backward)
    layer_norm = staticmethod(numpy_kernels.layer_norm)
    layer_norm_backward = staticmethod(numpy_kernels.layer_norm_backward)
    softmax = staticmethod(numpy_kernels.softmax)
    softmax_backward = staticmethod(numpy_kernels.softmax_backward)
    attention = staticmethod(numpy_attention.attention)
    attention_backward = staticmethod(numpy_attention.attention_backward)
    embedding = staticmethod(numpy_kernels.embedding)
    embedding_backward = staticmethod(numpy_kernels.embedding_backward)
    xent_local_max = staticmethod(numpy_kernels.xent_local_max)
    xent_local_stats = staticmethod(numpy_kernels.xent_local_stats)
    xent_backward = staticmethod(numpy_kernels.xent_backward)
    adamw = staticmethod(numpy_updates.adamw)
    sgd = staticmethod(numpy_updates.sgd)
    sum_of_squares = staticmethod(numpy_updates.sum_of_squares)
    all_finite = staticmethod(numpy_updates.all_finite)

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def from_host(self, array: Any) -> np.ndarray:
        return np.array(array, order="C")

    def to_host(self, array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            return array
        np.copyto(out, array, casting="no")
        return out

    def contiguous(self, array: np.ndarray) -> np.ndarray:
        return array if array.flags.c_contiguous else array.copy()

    def synchronize(self) -> None:
        return None

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # Of halves NumPy rounds each partial sum; and only of others it asks BLAS.
        if a.dtype.itemsize == 2:
            wide = dtypes.accumulation_dtype(a.dtype)
            product = np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False))
            return product.astype(a.dtype, copy=False)
        return np.matmul(a, b)

    def random_words(self, key: Key, first: int, count: int) -> np.ndarray:
        # NumPy counts up before it draws, so its first words belong to counter 1, which
        # is what random_words calls block 0.
        block, lane = divmod(first, 4)
        stream = np.random.Philox(counter=block, key=np.array(key, np.uint64))
        words = stream.random_raw(lane + count)
        return words[lane:] if lane else words

    def erf(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import erf

        return erf(x)

    def erfc(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import erfc

        return erfc(x)

    def _normal_quantile(self, probability: np.ndarray) -> np.ndarray:
        from scipy.special import ndtri

        return ndtri(probability)
