"""Gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tparmpi.comm import Place
from tparmpi.sharding import Layout
from tparmpi.tensors import Tensor, no_grad, tensor
from tparmpi.testing.layouts import laid_out


def numerical_gradient(
    function: Callable[..., Tensor],
    arrays: Sequence[np.ndarray[Any, Any]],
    number: int,
    place: Place,
    step: float = 1e-4,
) -> np.ndarray[Any, Any]:
    """Return the gradient of ``function(*arrays).sum()`` for array `number`.

    By central differences of fourth order, with error O(step^4), on replicated tensors.
    Collective over `place`.

    Parameters
    ----------
    arrays
        Floating ones must be float64.
    """
    gradient = np.zeros_like(arrays[number])

    def value(index: tuple[int, ...], shift: float) -> float:
        moved = [array.copy() for array in arrays]
        moved[number][index] += shift
        with no_grad():
            result = function(*[tensor(array, place) for array in moved])
        return float(result.numpy().sum())

    for index in np.ndindex(gradient.shape):
        near = value(index, step) - value(index, -step)
        far = value(index, 2 * step) - value(index, -2 * step)
        gradient[index] = (8 * near - far) / (12 * step)
    return gradient


def check_gradient(
    function: Callable[..., Tensor],
    arrays: Sequence[np.ndarray[Any, Any]],
    place: Place,
    layouts: Sequence[Layout] | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Compare all gradients of ``function(*tensors).sum()`` with finite differences.

    Collective over `place`.

    Parameters
    ----------
    function
        Takes tensors, returns one; must be smooth at `arrays`.
    arrays
        Values of the operands; those that are float64 are differentiated.
    layouts
        How the operands lie on `place`; replicated by default.
    tolerance
        Largest permitted difference, relative to the largest element of the gradient.

    Raises
    ------
    AssertionError
        Naming the operand whose gradient differs.
    """
    autodiff = place.autodiff()
    tensors = [
        laid_out(array, autodiff, layouts[number] if layouts else None)
        for number, array in enumerate(arrays)
    ]
    wanted = [number for number, a in enumerate(arrays) if a.dtype == np.float64]
    for number in wanted:
        tensors[number].require_grad()
    function(*tensors).sum().backward()
    for number in wanted:
        expected = numerical_gradient(function, arrays, number, place)
        grad = tensors[number].grad
        found = np.zeros_like(expected) if grad is None else grad.numpy()
        error = np.abs(found - expected).max(initial=0.0)
        scale = np.abs(expected).max(initial=1e-12)
        if not error <= tolerance * scale:
            raise AssertionError(
                f"the gradient of operand {number} differs by {error / scale:.3g} of "
                f"its largest element from finite differences (at most {tolerance:g})"
            )
