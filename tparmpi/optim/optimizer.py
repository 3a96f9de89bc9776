"""What all optimizers share: parameters, their state, and the walk over both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from tparmpi.backend import MetaArray
from tparmpi.errors import AutodiffError, UsageError
from tparmpi.nn import Parameter
from tparmpi.tensors import Tensor

DECAYED = frozenset({"weight", "embedding"})
"""Kinds of parameters that weight decay applies to."""


class Optimizer(ABC):
    """Changes parameters by their gradients, in place.

    Parameters
    ----------
    named_parameters
        Pairs of name and parameter, as `Module.named_parameters` yields them.
    lr
        Learning rate, unless `step` is given another.
    weight_decay
        Of parameters whose kind is a weight or an embedding; none on biases and norms.
    moments
        Names of the state tensors that each parameter has.

    Attributes
    ----------
    steps
        How many steps were made.

    Raises
    ------
    UsageError
        If a parameter comes without a name, a name or a parameter stands twice, or a
        rate is negative.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        lr: float,
        weight_decay: float,
        moments: tuple[str, ...],
    ) -> None:
        named = list(named_parameters)
        if any(isinstance(item, Parameter) for item in named):
            raise UsageError(
                "optimizer: each parameter must come with its name, since the state is "
                "saved under it; give model.named_parameters(), not model.parameters()"
            )
        self.parameters = dict(named)
        distinct = {id(parameter) for _, parameter in named}
        if not len(named) == len(self.parameters) == len(distinct):
            raise UsageError("optimizer: a name or a parameter is given twice")
        for what, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value < 0:
                raise UsageError(
                    f"optimizer: {what} must not be negative, it is {value}"
                )
        self.lr = lr
        self.weight_decay = weight_decay
        self.steps = 0
        self.state = {
            name: {moment: _zeros_like(parameter) for moment in moments}
            for name, parameter in named
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state, ``"<parameter>/<moment>"`` to tensor, not copied. Local.

        The tensors have their parameter's layout.
        """
        return {
            f"{name}/{moment}": tensor
            for name, moments in self.state.items()
            for moment, tensor in moments.items()
        }

    def step(self, *, lr: float | None = None, scale: float = 1.0) -> None:
        """Change all parameters that have a gradient. Local.

        Parameters
        ----------
        lr
            Learning rate of this step.
        scale
            Multiplies all gradients; from `clip_norm`.

        Raises
        ------
        AutodiffError
            If a gradient is not laid out as its parameter; nothing is changed then.
        """
        gradients = {
            name: settled_gradient(parameter)
            for name, parameter in self.parameters.items()
        }
        self.steps += 1
        rate = self.lr if lr is None else lr
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            parameter = self.parameters[name]
            decay = self.weight_decay if parameter.kind in DECAYED else 0.0
            moments = [tensor.array for tensor in self.state[name].values()]
            self._update(parameter, gradient, moments, rate, decay, scale)
            parameter.mark_written()

    @abstractmethod
    def _update(
        self,
        parameter: Parameter,
        gradient: Any,
        moments: list[Any],
        lr: float,
        decay: float,
        scale: float,
    ) -> None:
        """Change this rank's block of one parameter and of its moments, in place."""


def settled_gradient(parameter: Parameter) -> Any:
    """Return this rank's block of the gradient, or None where there is none. Local.

    Raises
    ------
    AutodiffError
        If its layout is not the parameter's: a sum is still pending.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    place = parameter.spec.place
    for axis, size in enumerate(place.shape):
        if size > 1 and gradient.layout[axis] != parameter.layout[axis]:
            raise AutodiffError(
                f"the gradient of {parameter.described} is "
                f"{gradient.layout[axis]!r} on axis '{place.axes[axis]}', where the "
                f"parameter is {parameter.layout[axis]!r}; call "
                "tpm.parallel.reduce_gradients(model.parameters()) between backward() "
                "and this"
            )
    return gradient.array


def _zeros_like(parameter: Parameter) -> Tensor:
    spec = parameter.spec
    if parameter.is_shell:
        return Tensor(
            spec, MetaArray(spec.local_shape, spec.dtype), spec.place, cell=[0]
        )
    array = spec.place.backend.zeros(spec.local_shape, spec.dtype)
    return Tensor(spec, array, spec.place, cell=[0])
