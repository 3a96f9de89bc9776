"""Applying an operator: find the plan, move the operands, run, record."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tparmpi.backend import MetaArray
from tparmpi.backend.dtypes import promote
from tparmpi.comm import progress
from tparmpi.comm.ledger import current
from tparmpi.errors import ImplicitGatherWarning, ShardingError
from tparmpi.sharding import written_change
from tparmpi.tensors.contract import check_forward
from tparmpi.tensors.plan import Plan
from tparmpi.tensors.redistribute import follow
from tparmpi.tensors.regather import Kept
from tparmpi.tensors.spec import MOST_PLANS, describe_layout, remember
from tparmpi.tensors.tape import Leaf, Node, OperatorCall, ShellCall, mode
from tparmpi.tensors.tensor import Tensor

if TYPE_CHECKING:
    from tparmpi.tensors.operator import Operator


def apply(
    operator: Operator,
    operands: Sequence[Any],
    attributes: tuple[tuple[str, Any], ...],
    scalars: dict[str, Any],
) -> Any:
    """Apply `operator` to tensors; see `Operator`.

    Returns
    -------
    Tensor or tuple of Tensor
        As the operator's rule has one output or several.

    Raises
    ------
    ShapeError
        If the shapes do not fit the operator's rule.
    ShardingError
        If the operands live on different places, or only gathering a parameter (or,
        under `no_implicit_gather`, any operand) would let the operator run.
    """
    try:
        first = operands[0].spec
        key = (operator, attributes, *[operand.spec for operand in operands[1:]])
        plan = first.plans[key]
    except (AttributeError, IndexError, KeyError):
        operands, plan = _prepare(operator, operands, attributes)
    if plan.gathered:
        if any(operand.is_parameter for operand in operands):
            plan = _make_plan(operator, operands, attributes)
        _report_gathering(plan, operands)
    if plan.place.is_member:
        return _run(operator, plan, operands, scalars)
    return _shells(plan, operands)


def _run(
    operator: Operator, plan: Plan, operands: Sequence[Tensor], scalars: dict[str, Any]
) -> Any:
    if progress.active:
        progress.poll()
    current.operator = operator.name
    try:
        arrays = [operand.array for operand in operands]
        if plan.moves:
            for number, route in enumerate(plan.routes):
                if route is not None:
                    arrays[number] = follow(
                        arrays[number], operands[number].spec, route
                    )
        if plan.casts:
            arrays = [
                array.astype(plan.outputs[0].dtype, copy=False) for array in arrays
            ]
        made = operator.forward(plan, *arrays, **scalars)
    finally:
        current.operator = ""
    if not plan.forward_checked:
        check_forward(plan, made)
        plan.forward_checked = True
    outputs, saved = made
    if plan.has_scalars:
        outputs = _as_arrays(plan, outputs)
    device = operands[0].device
    node = None
    for operand in operands:
        if operand.device.is_autodiff:
            device = operand.device
        if operand.node is not None and mode.recording:
            if True in plan.differentiable:
                node = _record(plan, saved, operands, arrays)
            break
    else:
        if not device.is_autodiff:
            device = _device_of(operands)
    cell = operands[0].cell if operator.view else None
    if len(plan.outputs) == 1:
        return Tensor(plan.outputs[0], outputs, device, node, 0, cell)
    nodes = [node if has_gradient else None for has_gradient in plan.differentiable]
    return tuple(
        Tensor(spec, array, device, nodes[number], number, cell)
        for number, (spec, array) in enumerate(zip(plan.outputs, outputs, strict=True))
    )


def _as_arrays(plan: Plan, outputs: Any) -> Any:
    """Arrays without dims in place of the scalars that NumPy makes of them."""
    if len(plan.outputs) == 1:
        return plan.xp.asarray(outputs)
    return tuple(map(plan.xp.asarray, outputs))


def _device_of(operands: Sequence[Tensor]) -> Any:
    for operand in operands:
        if operand.device.is_autodiff:
            return operand.device
    return operands[0].device


def _record(
    plan: Plan, saved: Any, operands: Sequence[Tensor], arrays: list[Any]
) -> Node:
    if mode.watching is not None:
        return mode.watching.see(operands)  # type: ignore[no-any-return]
    versions = [(o.cell, o.cell[0]) for o in operands if o.cell is not None]
    for number, (operand, array) in enumerate(zip(operands, arrays, strict=True)):
        if operand.regather is not None:
            layout = plan.inputs[number].layout
            kept = Kept(operand.regather.bound_for(layout, array.dtype), number)
            saved = _without(saved, array, kept)
    parents: tuple[tuple[Node | Leaf, int] | None, ...] = tuple(
        None if o.node is None else (o.node, o.slot) for o in operands
    )
    return OperatorCall(plan, saved, parents, versions)


def _without(saved: Any, array: Any, instead: Kept) -> Any:
    """`saved` with `array` replaced by what gathers it again."""
    if saved is array:
        instead.regather.readers += 1
        return instead
    if type(saved) is tuple:
        return tuple(_without(item, array, instead) for item in saved)
    return saved


def _shells(plan: Plan, operands: Sequence[Tensor]) -> Any:
    device = _device_of(operands)
    node: Node | None = None
    if (
        mode.recording
        and True in plan.differentiable
        and any(operand.node is not None for operand in operands)
    ):
        if mode.watching is not None:
            node = mode.watching.see(operands)
        else:
            parents = tuple(
                None if o.node is None else (o.node, o.slot) for o in operands
            )
            node = ShellCall(plan, None, parents, [])
    shells = tuple(
        Tensor(
            spec,
            MetaArray(spec.local_shape, spec.dtype),
            device,
            node if plan.differentiable[number] else None,
            number,
        )
        for number, spec in enumerate(plan.outputs)
    )
    return shells[0] if len(shells) == 1 else shells


def _prepare(
    operator: Operator,
    operands: Sequence[Any],
    attributes: tuple[tuple[str, Any], ...],
) -> tuple[Sequence[Tensor], Plan]:
    """The operands as tensors, and the plan for them, found or made."""
    if operator.numbers is not None:
        operands = _with_numbers(operator, operands)
        if all(isinstance(operand, Tensor) for operand in operands):
            key = (operator, attributes, *[operand.spec for operand in operands[1:]])
            plan = operands[0].spec.plans.get(key)
            if plan is not None:
                return operands, plan
    return operands, _make_plan(operator, operands, attributes)


def _with_numbers(operator: Operator, operands: Sequence[Any]) -> Sequence[Any]:
    """`operands` with tensors in place of the numbers."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if not tensors or len(tensors) == len(operands):
        return operands
    assert operator.numbers is not None
    dtype = promote(*[tensor.dtype for tensor in tensors])
    return [
        operand
        if isinstance(operand, Tensor)
        else tensors[0].constant(operator.numbers(operator.name, operand, dtype))
        for operand in operands
    ]


def _make_plan(
    operator: Operator,
    operands: Sequence[Any],
    attributes: tuple[tuple[str, Any], ...],
) -> Plan:
    for number, operand in enumerate(operands):
        if not isinstance(operand, Tensor):
            raise TypeError(
                f"{operator.name}: operand {number} is a {type(operand).__name__}, not "
                "a tensor; make it one with tpm.tensor(array, group)"
            )
    if not operands:
        raise TypeError(f"{operator.name}: no operands were given")
    specs = [operand.spec for operand in operands]
    for number, spec in enumerate(specs):
        if spec.place is not specs[0].place:
            raise ShardingError(
                f"{operator.name}: {_called(0, operands[0])} lives on "
                f"{specs[0].place}, {_called(number, operands[number])} on "
                f"{spec.place}; make all operands on one and the same place (every "
                "call of group() or mesh() makes another), or move one with "
                ".to(place)"
            )
    names = [operand.name if operand.is_parameter else None for operand in operands]
    plan = Plan(operator, attributes, specs, names)
    if not plan.gathered or all(name is None for name in names):
        key = (operator, attributes, *specs[1:])
        remember(specs[0].plans, key, plan, MOST_PLANS)
    return plan


def _called(number: int, operand: Tensor) -> str:
    named = f" ('{operand.name}')" if operand.name else ""
    return f"operand {number}{named}"


def _report_gathering(plan: Plan, operands: Sequence[Tensor]) -> None:
    if not plan.gathered:
        return
    number = plan.gathered[0]
    spec, needed = operands[number].spec, plan.inputs[number]
    change = written_change(spec.place.axes, spec.layout, needed.layout)
    text = (
        f"{plan.operator.name}: operand {number}, of shape {spec.shape}, is "
        f"{describe_layout(spec)} but must become {describe_layout(needed)}; call "
        f"{change} on it where you mean to gather"
    )
    if not mode.gathering:
        raise ShardingError(text)
    if mode.gathers is not None:
        mode.gathers.append(text)
        return
    if any(plan.place.coordinates):
        return  # the first member says it for all
    warnings.warn(text, ImplicitGatherWarning, stacklevel=_users_frame())


def _users_frame() -> int:
    """Distance in frames from a warning to the nearest caller outside the package."""
    level = 1
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        "tparmpi."
    ):
        level += 1
        frame = frame.f_back  # type: ignore[assignment]
    return level
