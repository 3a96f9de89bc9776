"""Gated units: one half of a layer's hidden values opens or closes the other."""

from __future__ import annotations

from typing import Any

from tparmpi.errors import ShapeError
from tparmpi.ops.arithmetic import floating
from tparmpi.ops.combiners import widened
from tparmpi.tensors import Plan, Tensor, operator


def same_shapes(name: str, names: str, a: Tensor, b: Tensor) -> None:
    """Raise ShapeError unless two tensors, called `names`, have one shape."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape:
        raise ShapeError(
            f"{name}: {names} must have one shape, they are {a.shape} and {b.shape}"
        )


def _narrow(plan: Plan, grads: Any) -> tuple[Any, ...]:
    return tuple(
        g if g is None else g.astype(spec.dtype, copy=False)
        for spec, g in zip(plan.inputs, grads, strict=True)
    )


@operator("...,...->...", name="swiglu", linear=(1,), dtype=floating)
def _swiglu(plan: Plan, gate: Any, up: Any) -> Any:
    """Return ``silu(gate) * up``."""
    y = plan.backend.swiglu(widened(gate), widened(up))
    return y.astype(gate.dtype, copy=False), (gate, up)


@_swiglu.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, bool]) -> Any:
    gate, up = map(widened, saved)
    return _narrow(plan, plan.backend.swiglu_backward(gate, up, widened(grad), wanted))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` for two tensors of one shape. Local.

    Shazeer, "GLU Variants Improve Transformer" (2020). A pending `up` stays pending.

    Raises
    ------
    ShapeError
        If the shapes differ.
    """
    same_shapes("swiglu", "'gate' and 'up'", gate, up)
    result: Tensor = _swiglu(gate, up)
    return result


@operator("...,...->...", name="geglu", linear=(1,), dtype=floating)
def _geglu(plan: Plan, gate: Any, up: Any) -> Any:
    """Return ``gelu(gate) * up``."""
    y = plan.backend.gelu(widened(gate))
    y *= widened(up)
    return y.astype(gate.dtype, copy=False), (gate, up)


@_geglu.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, bool]) -> Any:
    gate, up = map(widened, saved)
    grad = widened(grad)
    dgate = plan.backend.gelu_backward(gate, grad * up) if wanted[0] else None
    dup = plan.backend.gelu(gate) * grad if wanted[1] else None
    return _narrow(plan, (dgate, dup))


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up``, gelu in its tanh form, for two tensors of one shape.

    Local. Shazeer, "GLU Variants Improve Transformer" (2020). A pending `up` stays
    pending.

    Raises
    ------
    ShapeError
        If the shapes differ.
    """
    same_shapes("geglu", "'gate' and 'up'", gate, up)
    result: Tensor = _geglu(gate, up)
    return result
