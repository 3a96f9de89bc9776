"""NumPy's functions for arrays without data: the array module of meta devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from .meta_array import MetaArray, meta_of


class MetaModule(ModuleType):
    """NumPy, but for the functions that make arrays: they make `MetaArray` objects."""

    ndarray = MetaArray
    lib: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: Any, dtype: Any = float, **_: Any) -> MetaArray:
        """See `numpy.empty`."""
        return MetaArray(_shape(shape), np.dtype(dtype))

    zeros = ones = empty

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any = None, **_: Any) -> MetaArray:
        """See `numpy.full`."""
        found = meta_of(value).dtype if dtype is None else np.dtype(dtype)
        return MetaArray(_shape(shape), found)

    @staticmethod
    def asarray(value: Any, dtype: Any = None, **_: Any) -> MetaArray:
        """See `numpy.asarray`."""
        found = meta_of(value)
        return found if dtype is None else found.astype(dtype)

    array = ascontiguousarray = asarray

    @staticmethod
    def as_strided(x: Any, shape: Any, strides: Any = None, **_: Any) -> MetaArray:
        """See `numpy.lib.stride_tricks.as_strided`."""
        return MetaArray(shape, x.dtype)


def _shape(shape: int | Sequence[int]) -> Sequence[int]:
    return (shape,) if isinstance(shape, int | np.integer) else shape


def _made(name: str) -> Callable[..., MetaArray]:
    function = getattr(np, name)

    def make(*args: Any, **options: Any) -> MetaArray:
        return meta_of(function(*args, **options))

    make.__name__ = name
    make.__doc__ = f"See `numpy.{name}`."
    return make


for _name in ("arange", "eye", "identity", "indices", "linspace", "tri"):
    setattr(MetaModule, _name, staticmethod(_made(_name)))

MetaModule.lib = SimpleNamespace(
    stride_tricks=SimpleNamespace(as_strided=MetaModule.as_strided)
)

meta_module = MetaModule("numpy without values")
