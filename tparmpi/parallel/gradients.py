"""Reduction of parameters' gradients in buckets.

A backward pass leaves gradients as pending sums along the axes over which a parameter
is whole and the batch is split. Small ones are packed into flat arrays and reduced
together, since many small collectives cost more than a few large ones; large ones are
reduced where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tparmpi.comm import Place
from tparmpi.sharding import Layout, Partial, Replicate
from tparmpi.tensors import Tensor, redistribute

BUCKET_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class _Pending:
    """A gradient to be summed over `axes`, along which its parameter is whole."""

    parameter: Tensor
    array: Any
    axes: tuple[int, ...]

    @property
    def key(self) -> tuple[Place, tuple[int, ...], np.dtype[Any]]:
        return self.parameter.spec.place, self.axes, self.parameter.dtype


def reduce_gradients(
    parameters: Iterable[Tensor], *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Bring every gradient to its parameter's layout.

    Gradients that are sums pending over the same axes are packed into buckets: one
    all_reduce for each bucket and axis. Large ones are summed in their own memory, so
    that what `grad` gave before holds the sum too. One pending over an axis that shards
    the parameter is reduce-scattered alone. Gradients that need nothing stay as they
    are.

    Collective over the parameters' places. Members decide by the layouts alone, which
    are the same on all of them; give the same parameters in the same order everywhere.

    Parameters
    ----------
    parameters
        Those without a gradient are passed over.
    bucket_bytes
        Most bytes in a bucket; a gradient of as many has one of its own.
    """
    buckets: dict[Any, list[_Pending]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        axes = _pending_axes(parameter, gradient.layout)
        if axes is None:
            array = redistribute(gradient.array, gradient.spec, parameter.layout)
            parameter.take_grad(array, parameter.layout)
        elif axes:
            pending = _Pending(parameter, gradient.array, axes)
            buckets.setdefault(pending.key, []).append(pending)
        else:
            parameter.take_grad(gradient.array, parameter.layout)
    for (place, axes, _), members in buckets.items():
        for bucket in _cut(members, bucket_bytes):
            _reduce(bucket, place, axes)


def _pending_axes(parameter: Tensor, layout: Layout) -> tuple[int, ...] | None:
    """The axes to sum over; None where more than sums is needed."""
    axes = []
    for axis, size in enumerate(parameter.spec.place.shape):
        have, want = layout[axis], parameter.layout[axis]
        if have == want or size == 1:
            continue
        if not (isinstance(have, Partial) and isinstance(want, Replicate)):
            return None
        axes.append(axis)
    return tuple(axes)


def _cut(members: list[_Pending], most: int) -> Iterator[list[_Pending]]:
    """Buckets of `members`, in order but for large ones, which come when met."""
    bucket: list[_Pending] = []
    held = 0
    for pending in members:
        nbytes = pending.parameter.spec.local_nbytes
        if nbytes >= most:
            yield [pending]
            continue
        if bucket and held + nbytes > most:
            yield bucket
            bucket, held = [], 0
        bucket.append(pending)
        held += nbytes
    if bucket:
        yield bucket


def _reduce(bucket: list[_Pending], place: Place, axes: tuple[int, ...]) -> None:
    """Sum a bucket over `axes`; the gradients become views of the one result."""
    flat = _packed(bucket, place)
    for axis in axes:
        flat = place.axis_group(axis).all_reduce(flat, out=flat)
    first = 0
    for pending in bucket:
        array = pending.array
        summed = flat[first : first + array.size].reshape(array.shape)
        pending.parameter.take_grad(summed, pending.parameter.layout)
        first += array.size


def _packed(bucket: list[_Pending], place: Place) -> Any:
    """The gradients of a bucket as one flat array; a single one where it lies."""
    if len(bucket) == 1:
        return bucket[0].array.reshape(-1)
    arrays = [pending.array for pending in bucket]
    dtype = bucket[0].parameter.dtype
    flat = place.backend.empty((sum(array.size for array in arrays),), dtype)
    first = 0
    for array in arrays:
        flat[first : first + array.size].reshape(array.shape)[...] = array
        first += array.size
    return flat
