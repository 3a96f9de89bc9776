"""One rank's arrays: NumPy, CuPy or shapes only. Knows nothing of other ranks."""

from __future__ import annotations

from functools import cache

from ..errors import DeviceError
from .base import Backend
from .meta_array import MetaArray, has_values

__all__ = ["Backend", "MetaArray", "get", "has_values"]


@cache
def get(kind: str) -> Backend:
    """Return the backend of a kind of device, always the same object.

    Parameters
    ----------
    kind : {"cpu", "cuda", "meta"}

    Raises
    ------
    DeviceError
        If there is no such kind, or the package that it needs is not installed.

    Notes
    -----
    Local. ``get("cuda")`` imports CuPy and touches no GPU.
    """
    if kind == "cpu":
        from .numpy_backend import NumpyBackend

        return NumpyBackend()
    if kind == "cuda":
        from .cupy_backend import CupyBackend

        return CupyBackend()
    if kind == "meta":
        from .meta_backend import MetaBackend

        return MetaBackend()
    raise DeviceError(f"no device of kind {kind!r}; expected 'cpu', 'cuda' or 'meta'")
