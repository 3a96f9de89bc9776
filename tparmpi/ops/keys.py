"""Reading the keys of ``x[key]``, as NumPy does."""

from __future__ import annotations

from operator import index
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops.slicing import Cut
from tparmpi.tensors import Tensor


class Key(NamedTuple):
    """What a key asks for.

    Attributes
    ----------
    cuts, new
        The basic part; see `slice_of`.
    ids
        Indices along one dim of what the basic part leaves, or None.
    dim
        That dim.
    in_front
        Whether the dims of `ids` come first in the result, rather than in place of it:
        where integers stand apart from the array.
    """

    cuts: tuple[Cut, ...]
    new: tuple[int, ...]
    ids: Any
    dim: int
    in_front: bool


def read_key(shape: tuple[int, ...], key: Any) -> Key:
    """Return what `key` asks of a tensor of `shape`.

    Raises
    ------
    ShapeError
        If there are too many indices, or an integer is out of range.
    UsageError
        If an item is none that may stand in a key.
    """
    items = _expanded(shape, key if isinstance(key, tuple) else (key,))
    cuts: list[Cut] = []
    new: list[int] = []
    ids, at, kept = None, 0, 0
    chosen = []  # places in the key of what picks single indices
    for place, item in enumerate(items):
        dim = len(cuts)
        if item is None:
            new.append(kept)
            kept += 1
        elif isinstance(item, slice):
            cuts.append(_cut(item, shape[dim]))
            kept += 1
        elif _is_array(item):
            ids, at = item, kept
            chosen.append(place)
            cuts.append(None)
            kept += 1
        elif not isinstance(item, EllipsisType):
            chosen.append(place)
            cuts.append(_picked(item, dim, shape[dim]))
    in_front = bool(chosen) and chosen[-1] - chosen[0] >= len(chosen)
    return Key(tuple(cuts), tuple(new), ids, at, in_front)


def _expanded(shape: tuple[int, ...], key: tuple[Any, ...]) -> list[Any]:
    """The items of a key, checked, with a slice for each dim that it leaves out.

    An ellipsis stays in front of its slices.
    """
    items = [_checked(item) for item in key]
    arrays = sum(map(_is_array, items))
    if arrays > 1:
        raise UsageError(
            f"getitem: the key has {arrays} arrays of indices, at most one is taken; "
            "use take(x, ids, dim) for each, or gather(x, ids, dim) to pick elements"
        )
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise UsageError("getitem: a key has one ellipsis ('...') at most")
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > len(shape):
        raise ShapeError(
            f"getitem: {used} indices are given, but a tensor of shape {shape} has "
            f"{len(shape)} dims"
        )
    at = dots[0] + 1 if dots else len(items)
    return [*items[:at], *[slice(None)] * (len(shape) - used), *items[at:]]


def _checked(item: Any) -> Any:
    """An item as an int, slice, None, Ellipsis, or array of integers."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, list | tuple | range):
        item = np.asarray(item)
        if item.size == 0:
            item = item.astype(np.int64)
    kind = getattr(getattr(item, "dtype", None), "kind", "")
    if isinstance(item, bool) or kind == "b":
        raise UsageError(
            "getitem: truth values select a number of elements that is not known "
            "beforehand; use where(mask, x, other), or numpy() and NumPy"
        )
    if isinstance(item, Tensor) or (kind in "iu" and kind and item.ndim):
        return item
    try:
        return index(item)
    except TypeError:
        raise UsageError(
            f"getitem: a key is made of integers, slices, None, '...' and an array of "
            f"integers; it has a {type(item).__name__}"
        ) from None


def _is_array(item: Any) -> bool:
    return hasattr(item, "dtype")


def _picked(item: int, dim: int, size: int) -> int:
    if not -size <= item < size:
        raise ShapeError(
            f"getitem: the index {item} is outside dim {dim} of size {size}; "
            f"indices go from {-size} to {size - 1}"
        )
    return item % size


def _cut(item: slice, size: int) -> tuple[int, int, int]:
    try:
        start, stop, step = item.indices(size)
    except (TypeError, ValueError) as error:
        raise UsageError(f"getitem: {item} is no slice: {error}") from None
    length = len(range(start, stop, step))
    if length == 0:
        return 0, 1, 0
    return start, step if length > 1 else 1, length
