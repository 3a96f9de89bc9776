"""Arrays without data: shapes of what lives elsewhere, and of simulated meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from . import dtypes
from .attention import Softmax, check_attention_shapes, head_groups
from .base import Backend
from .meta_array import MetaArray, meta_of, no_values
from .meta_module import meta_module
from .numpy_backend import NumpyBackend


class MetaBackend(Backend):
    """`MetaArray` objects. Whatever needs values raises DeviceError. See `Backend`.

    Kernels return arrays of the shapes and dtypes that they return on other backends.
    """

    kind = "meta"
    xp: Any = meta_module
    supported_dtypes = NumpyBackend.supported_dtypes

    def empty(self, shape: Sequence[int], dtype: Any) -> MetaArray:
        return MetaArray(tuple(shape), dtypes.dtype(dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> MetaArray:
        return self.empty(shape, dtype)

    def from_host(self, array: Any) -> MetaArray:
        return meta_of(array)

    def to_host(self, array: MetaArray, out: np.ndarray | None = None) -> NoReturn:
        raise no_values(f"an array of shape {array.shape}")

    def contiguous(self, array: MetaArray) -> MetaArray:
        return array

    def synchronize(self) -> None:
        return None

    # Kernels whose plain form is slow here, or asks for values

    def attention(
        self, q: Any, k: Any, v: Any, scale: float, band: Any = None, bias: Any = None
    ) -> tuple[MetaArray, Softmax]:
        check_attention_shapes(q, k, v)
        rows = (*q.shape[:1], *head_groups(q, k), q.shape[1], 1)
        statistics = MetaArray(rows, q.dtype)
        y = MetaArray((*q.shape[:3], v.shape[3]), q.dtype)
        return y, Softmax(statistics, statistics)

    def attention_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        saved: Any,
        y: Any,
        grad: Any,
        scale: float,
        band: Any = None,
        bias: Any = None,
        wanted: tuple[bool, bool, bool, bool] = (True, True, True, False),
    ) -> Any:
        return tuple(
            MetaArray(x.shape, q.dtype) if want and x is not None else None
            for x, want in zip((q, k, v, bias), wanted, strict=True)
        )

    def embedding(self, table: Any, ids: Any, first: int = 0) -> MetaArray:
        return MetaArray((*ids.shape, *table.shape[1:]), table.dtype)

    def embedding_backward(
        self, grad: Any, ids: Any, first: int, rows: int
    ) -> MetaArray:
        return MetaArray((rows, grad.shape[-1]), grad.dtype)

    def xent_local_stats(
        self, logits: Any, targets: Any, first: int, maximum: Any
    ) -> tuple[MetaArray, MetaArray]:
        return maximum.copy(), maximum.copy()

    def xent_backward(
        self, logits: Any, targets: Any, first: int, *rest: Any, **options: Any
    ) -> MetaArray:
        return MetaArray(logits.shape, logits.dtype)

    def adamw(self, *arrays: Any, **options: Any) -> None:
        return None

    def sgd(self, *arrays: Any, **options: Any) -> None:
        return None

    def sum_of_squares(self, x: Any) -> float:
        """Return that of zeros."""
        return 0.0

    def all_finite(self, x: Any) -> bool:
        """Return that of zeros."""
        return True

    def random_block(
        self, key: Any, shape: Any, start: Any, extent: Sequence[int]
    ) -> MetaArray:
        return MetaArray(extent, np.dtype(np.uint64))

    def random_uniform(
        self, key: Any, shape: Any, start: Any, extent: Sequence[int], dtype: Any
    ) -> MetaArray:
        return MetaArray(extent, dtypes.dtype(dtype))

    random_normal = random_uniform

    def random_keep(
        self, key: Any, shape: Any, start: Any, extent: Sequence[int], p: float
    ) -> MetaArray:
        return MetaArray(extent, np.dtype(np.bool_))

    def random_words(self, key: Any, first: int, count: int) -> MetaArray:
        return MetaArray((count,), np.dtype(np.uint64))

    def erf(self, x: MetaArray) -> MetaArray:
        return x.copy()

    def erfc(self, x: MetaArray) -> MetaArray:
        return x.copy()

    def _normal_quantile(self, probability: MetaArray) -> MetaArray:
        return MetaArray(probability.shape, np.dtype(np.float64))
