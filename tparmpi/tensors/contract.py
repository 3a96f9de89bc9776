"""What an operator's functions must return, checked at the first use of each plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tparmpi.errors import UsageError
from tparmpi.tensors.spec import Spec


class Named(Protocol):
    """What has a name for errors."""

    @property
    def name(self) -> str:
        """How errors call it."""


class Promise(Protocol):
    """What a call's functions are to return: a plan, or what stands for one."""

    @property
    def operator(self) -> Named:
        """Whose functions they are."""

    @property
    def inputs(self) -> Sequence[Spec]:
        """Specs of the operands."""

    @property
    def outputs(self) -> Sequence[Spec]:
        """Specs of the outputs."""


def check_forward(plan: Promise, made: Any) -> None:
    """Raise unless `made` is outputs as the rule says, and what was saved. Local.

    Raises
    ------
    UsageError
        Naming the operator and what it should have returned.
    """
    name, count = plan.operator.name, len(plan.outputs)
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageError(
            f"{name}: forward must return (outputs, saved), it returned {_kind(made)}"
        )
    outputs = (made[0],) if count == 1 else made[0]
    if not isinstance(outputs, tuple | list) or len(outputs) != count:
        raise UsageError(
            f"{name}: the rule has {count} outputs, so forward must return a tuple of "
            f"{count} arrays and what to save; it returned {_kind(made[0])}"
        )
    for number, (array, spec) in enumerate(zip(outputs, plan.outputs, strict=True)):
        if getattr(array, "shape", None) != spec.local_shape:
            raise UsageError(
                f"{name}: by its rule output {number} has the shape {spec.local_shape} "
                f"on this rank; forward returned {_kind(array)}"
            )
        if array.dtype != spec.dtype:
            raise UsageError(
                f"{name}: output {number} is to be {spec.dtype}, forward returned "
                f"{array.dtype}; cast it, or say with dtype=... that it is another"
            )


def check_backward(plan: Promise, made: Any, wanted: Sequence[bool]) -> None:
    """Raise unless `made` is one gradient for each operand. Local.

    Raises
    ------
    UsageError
        Naming the operator and what it should have returned.
    """
    name, count = plan.operator.name, len(plan.inputs)
    if not isinstance(made, tuple | list) or len(made) != count:
        raise UsageError(
            f"{name}: backward must return a tuple of {count} gradients, one for each "
            f"operand, None where not wanted; it returned {_kind(made)}"
        )
    for number, (grad, spec) in enumerate(zip(made, plan.inputs, strict=True)):
        if wanted[number] and getattr(grad, "shape", None) != spec.local_shape:
            raise UsageError(
                f"{name}: the gradient of operand {number} must have its shape on this "
                f"rank, {spec.local_shape}; backward returned {_kind(grad)}"
            )


def _kind(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"an array of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
