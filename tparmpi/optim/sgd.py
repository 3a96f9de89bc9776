"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tparmpi.errors import UsageError
from tparmpi.nn import Parameter
from tparmpi.optim.optimizer import Optimizer


class SGD(Optimizer):
    """Gradient descent, with a running sum of gradients if `momentum` is not 0.

    Parameters
    ----------
    named_parameters, lr, weight_decay
        See `Optimizer`; the decay is added to the gradient.
    momentum
        What is kept of the running sum at each step.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        lr: float = 1e-2,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(
                f"SGD: momentum must be at least 0 and below 1, it is {momentum}"
            )
        moments = ("momentum",) if momentum else ()
        super().__init__(named_parameters, lr, weight_decay, moments)
        self.momentum = momentum

    def _update(
        self,
        parameter: Parameter,
        gradient: Any,
        moments: list[Any],
        lr: float,
        decay: float,
        scale: float,
    ) -> None:
        parameter.spec.place.backend.sgd(
            parameter.array,
            gradient,
            moments[0] if moments else None,
            lr=lr,
            momentum=self.momentum,
            weight_decay=decay,
            scale=scale,
        )
