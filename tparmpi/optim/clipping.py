"""Clipping by the norm of all gradients together."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import numpy as np

from tparmpi.backend import has_values
from tparmpi.comm import together
from tparmpi.errors import UsageError
from tparmpi.nn import Parameter
from tparmpi.optim.optimizer import settled_gradient
from tparmpi.sharding import Shard


def clip_norm(parameters: Iterable[Parameter], max_norm: float) -> tuple[float, float]:
    """Return the norm of all gradients and what to scale them by.

    Every element counts once, however many members hold it; squares are added in
    float64. Collective over the members of the parameters' places: one all_reduce of
    one number. The same bits on every member. No gradient is changed: give the scale to
    `Optimizer.step`.

    Parameters
    ----------
    parameters
        Of one place or several, tied ones once; those without a gradient count nothing.
    max_norm
        Largest norm that is left as it is; ``inf`` for no clipping.

    Returns
    -------
    norm, scale
        The scale is ``max_norm / norm`` where the norm is larger, else 1. Where a
        gradient is not finite, neither is the norm.

    Raises
    ------
    UsageError
        If there are no parameters.
    AutodiffError
        If a gradient is still a pending sum.
    """
    counted = list(parameters)
    if not counted:
        raise UsageError("clip_norm: there are no parameters")
    places = list({parameter.spec.place: None for parameter in counted})
    gradients = [settled_gradient(parameter) for parameter in counted]
    total = 0.0
    for parameter, gradient in zip(counted, gradients, strict=True):
        if gradient is not None and _counts_here(parameter):
            total += parameter.spec.place.backend.sum_of_squares(gradient)
    members = together(places)
    if members.is_member:
        summed = members.all_reduce(np.asarray(total, np.float64))
        # Simulated members' gradients count as zeros.
        total = float(summed) if has_values(summed) else 0.0
    norm = sqrt(total)
    return norm, max_norm / norm if norm > max_norm else 1.0


def _counts_here(parameter: Parameter) -> bool:
    """Say whether this rank is the one that counts its block among the replicas."""
    coordinates = parameter.spec.place.coordinates
    return all(
        isinstance(placement, Shard) or coordinate == 0
        for placement, coordinate in zip(parameter.layout, coordinates, strict=True)
    )
