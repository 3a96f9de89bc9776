"""AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tparmpi.errors import UsageError
from tparmpi.nn import Parameter
from tparmpi.optim.optimizer import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay.

    Kingma and Ba, "Adam" (2015); Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization" (2019).

    Parameters
    ----------
    named_parameters, lr, weight_decay
        See `Optimizer`.
    betas
        Decay of the running means of the gradient and of its square.
    eps
        Added to the root of the latter.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(named_parameters, lr, weight_decay, ("m", "v"))
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"AdamW: betas must be at least 0 and below 1: {betas}")
        self.betas = betas
        self.eps = eps

    def _update(
        self,
        parameter: Parameter,
        gradient: Any,
        moments: list[Any],
        lr: float,
        decay: float,
        scale: float,
    ) -> None:
        parameter.spec.place.backend.adamw(
            parameter.array,
            gradient,
            *moments,
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=decay,
            step=self.steps,
            scale=scale,
        )
