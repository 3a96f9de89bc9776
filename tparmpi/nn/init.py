"""Initial values of parameters.

An initializer is called with (seed, name, spec) and returns this rank's block. What it
returns depends on the seed, the parameter's dotted name and the global index only, so
that a model starts with the same bytes on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tparmpi.tensors import Spec, random

Initializer = Callable[[int, str, Spec], Any]


@dataclass(frozen=True)
class normal:
    """Normally distributed values with mean 0.

    Parameters
    ----------
    deviation
        Their standard deviation.
    """

    deviation: float

    def __call__(self, seed: int, name: str, spec: Spec) -> Any:
        """Return this rank's block. Local."""
        return random.draw("normal", seed, name, spec, scale=self.deviation)


DEFAULT = normal(0.02)
"""Of weights, unless another initializer is given."""


def zeros(seed: int, name: str, spec: Spec) -> Any:
    """Return zeros. Local."""
    return spec.place.backend.zeros(spec.local_shape, spec.dtype)


def ones(seed: int, name: str, spec: Spec) -> Any:
    """Return ones. Local."""
    array = zeros(seed, name, spec)
    array += spec.dtype.type(1)
    return array
