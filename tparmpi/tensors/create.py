"""Making tensors from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from tparmpi.backend import MetaArray
from tparmpi.comm import Place
from tparmpi.errors import ShapeError, UsageError
from tparmpi.sharding import Placement, replicated
from tparmpi.tensors.blocks import shape_of_blocks
from tparmpi.tensors.request import plain_place, requested_layout
from tparmpi.tensors.spec import spec_of
from tparmpi.tensors.tensor import Tensor

_KINDS = "biufcV"
"""Kinds of dtypes that tensors have; bfloat16 is among NumPy's kind V, and so are
records, which are none."""


def tensor(array: Any, place: Place, dtype: Any = None) -> Tensor:
    """Return `array`, the same on every rank, as a replicated tensor on `place`. Local.

    Nothing is uploaded before it is needed, so that ``tensor(...).with_sharding(...)``
    uploads this rank's block only.

    Parameters
    ----------
    array
        NumPy or CuPy array, whose dtype is kept, or numbers, which get the default
        dtype of `place`. It is copied.
    place
        Device, group or mesh; ranks that are no members get a shell.
    dtype
        Cast to this dtype.
    """
    inner = plain_place("tensor", place)
    host = array if hasattr(array, "dtype") else _with_default_dtype(array, inner)
    if dtype is not None:
        host = host.astype(np.dtype(dtype))
    if host.dtype.kind not in _KINDS or issubclass(host.dtype.type, np.void):
        raise UsageError(
            f"tensor: an array of {host.dtype} is no array of numbers; convert it first"
        )
    native = host.dtype.newbyteorder("=")
    shape = tuple(int(n) for n in host.shape)
    spec = spec_of(inner, shape, native, replicated(len(inner.shape)))
    if not inner.is_member or inner.kind == "meta":
        return Tensor(spec, MetaArray(shape, spec.dtype), place, cell=[0])
    result = Tensor(spec, None, place, cell=[0])
    if isinstance(host, np.ndarray) or not hasattr(host, "__cuda_array_interface__"):
        result._host = np.array(host, dtype=spec.dtype, order="C")
    else:
        result._array = host.copy()
    return result


def from_local(
    array: Any,
    place: Place,
    sharding: Placement | tuple[Placement, ...] | None = None,
    *,
    shape: tuple[int, ...] | None = None,
    **by_axis: Placement,
) -> Tensor:
    """Return the tensor whose block on this rank is `array`.

    Local if `shape` is given, else collective over the axes that shard a dim.

    Parameters
    ----------
    array
        This rank's block, by the chunk rule (the first members hold one element more).
        It is copied. Not looked at on ranks that are no members.
    sharding, by_axis
        As for `Tensor.with_sharding`; axes not named are replicated (or hold a summand,
        if named `Partial`).
    shape
        Global shape; needed where this rank is no member.

    Raises
    ------
    ShapeError
        If the blocks are not those of the chunk rule. Without `shape` on all members,
        as where the blocks differ in dtype or other dims.
    UsageError
        If the block is no array.
    """
    inner = plain_place("from_local", place)
    if not hasattr(array, "dtype"):
        raise UsageError(
            f"from_local: the block is a {type(array).__name__}, not an array; make "
            "it one with numpy.asarray"
        )
    base = replicated(len(inner.shape))
    ndim = len(shape) if shape is not None else np.ndim(array)
    dtype = np.dtype(array.dtype).newbyteorder("=")
    layout = requested_layout("from_local", inner, ndim, base, sharding, by_axis)
    if shape is None:
        remedy = "give the global shape with shape=..."
        shape = shape_of_blocks("from_local", inner, array, layout, remedy)
    spec = spec_of(inner, tuple(shape), dtype, layout)
    if not inner.is_member:
        return Tensor(spec, MetaArray(spec.local_shape, dtype), place, cell=[0])
    if tuple(array.shape) != spec.local_shape:
        raise ShapeError(
            f"from_local: a tensor of shape {spec.shape} has a block of "
            f"{spec.local_shape} on this rank, but the array is {tuple(array.shape)}; "
            "the first members hold one element more where a dim does not divide"
        )
    result = Tensor(spec, None, place, cell=[0])
    if isinstance(array, np.ndarray):
        result._host = np.array(array, dtype=dtype, order="C")
    else:
        result._array = array.copy()
    return result


def _with_default_dtype(value: Any, place: Place) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    defaults = {
        "f": place.settings.float,
        "i": place.settings.int,
        "b": place.settings.bool,
    }
    return array.astype(defaults.get(array.dtype.kind, array.dtype))
