"""Arrays without data: shapes of what lives elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from ..errors import DeviceError
from . import dtypes
from .base import KERNELS, Backend, MetaArray
from .numpy_backend import NumpyBackend


class MetaBackend(Backend):
    """`MetaArray` objects. Whatever needs values raises DeviceError. See `Backend`."""

    kind = "meta"
    xp: Any = None
    supported_dtypes = NumpyBackend.supported_dtypes

    def empty(self, shape: Sequence[int], dtype: Any) -> MetaArray:
        return MetaArray(tuple(shape), dtypes.dtype(dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> MetaArray:
        return self.empty(shape, dtype)

    def from_host(self, array: Any) -> MetaArray:
        return MetaArray(np.shape(array), np.asarray(array).dtype)

    def to_host(self, array: MetaArray) -> NoReturn:
        raise DeviceError(
            f"an array of shape {array.shape} on a meta device has no values; read it "
            "on a rank that holds it"
        )

    def contiguous(self, array: MetaArray) -> MetaArray:
        return array

    def synchronize(self) -> None:
        return None

    def random_words(self, key: Any, first: int, count: int) -> NoReturn:
        raise _no_values("random_words")

    def erf(self, x: MetaArray) -> NoReturn:
        raise _no_values("erf")

    def erfc(self, x: MetaArray) -> NoReturn:
        raise _no_values("erfc")

    def _normal_quantile(self, probability: MetaArray) -> NoReturn:
        raise _no_values("normal_quantile")


def _no_values(operation: str) -> DeviceError:
    return DeviceError(f"{operation}: arrays on a meta device have no values")


def _refuse(kernel: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **options: Any) -> NoReturn:
        raise _no_values(kernel)

    return refused


for _kernel in KERNELS:
    setattr(MetaBackend, _kernel, _refuse(_kernel))
