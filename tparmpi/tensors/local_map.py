"""Plain array code on shards, with gradients where it says how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tparmpi.backend import MetaArray
from tparmpi.comm import Place
from tparmpi.comm.ledger import current
from tparmpi.errors import AutodiffError, ShardingError, UsageError
from tparmpi.sharding import (
    PARTIAL,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    replicated,
)
from tparmpi.tensors import tape
from tparmpi.tensors.blocks import shape_of_blocks
from tparmpi.tensors.contract import check_backward, check_forward
from tparmpi.tensors.passes import Pass
from tparmpi.tensors.request import requested_layout
from tparmpi.tensors.spec import Spec, spec_of
from tparmpi.tensors.tensor import Tensor

LayoutRequest = Placement | Layout | Mapping[str, Placement] | None
Shape = tuple[int, ...]


def local_map(
    function: Callable[..., Any],
    in_layouts: LayoutRequest | list[LayoutRequest],
    out_layouts: LayoutRequest | list[LayoutRequest],
    *,
    backward: Callable[..., Any] | None = None,
    shapes: Callable[..., Any] | None = None,
    dtype: Any = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Return `function`, which works on this rank's arrays, as a function of tensors.

    The way out of the operators: whatever NumPy, CuPy or another library computes from
    the blocks. It may communicate too, by the groups' own methods.

    Parameters
    ----------
    function
        ``function(*arrays, **options) -> array``, or a tuple of arrays where there are
        several layouts out. The arrays are this rank's blocks, read-only on NumPy. With
        a `backward` it returns ``(array or arrays, saved)``.
    in_layouts
        The layout that the only operand is brought to, or a list with one for each: a
        placement on a group; on a mesh a tuple in axis order or a dict by axis, with
        the others replicated; None for the layout that the operand has.
    out_layouts
        How the blocks that `function` returns lie, in the same forms (replicated if
        None); a list where there are several outputs. `Partial` says that they are to
        be summed.
    backward
        ``backward(saved, *grads) -> gradients``, a tuple with one for each operand, or
        None: this rank's parts. ``grads`` are the gradients of the outputs, sharded as
        they are, whole where they are replicated or pending. The gradient of an operand
        that is sharded is that of its block; of a pending operand it is whole. That of
        a replicated operand is summed over the axes along which any operand or output
        is not replicated. Without it the results have no gradient.
    shapes
        ``shapes(*global shapes of the operands) -> global shape``, a list of them for
        several outputs. By default they are found out by one small exchange for each
        dim and axis; needed where not all ranks are members of the place.
    dtype
        Dtype of the output, or a list; by default NumPy's promotion of the operands'.
    name
        What errors and the ledger call it; by default the function's own name.

    Returns
    -------
    Callable
        Takes one tensor for each layout in, all on one place, and `function`'s keyword
        arguments. Collective over the place where operands change their layout, shapes
        are found out, or `function` communicates.

    Raises
    ------
    ShardingError
        If a layout does not fit, or operands live on different places.
    ShapeError
        If the blocks are not those of the chunk rule.
    UsageError
        If `function` or `backward` returns something else.
    AutodiffError
        In the backward pass, if there is no `backward`.

    Examples
    --------
    >>> def sort_rows(x):
    ...     order = np.argsort(x, axis=1)
    ...     return np.take_along_axis(x, order, 1), order
    >>> def unsort(order, grad):
    ...     out = np.empty_like(grad)
    ...     np.put_along_axis(out, order, grad, 1)
    ...     return (out,)
    >>> rows = tpm.Shard(0)
    >>> sort = tpm.local_map(
    ...     sort_rows, rows, rows, backward=unsort, shapes=lambda x: x
    ... )
    >>> y = sort(x)
    """
    called = name or str(getattr(function, "__name__", "local_map"))
    record = _Record(called, function, backward, shapes, dtype)
    ins = in_layouts if isinstance(in_layouts, list) else [in_layouts]
    outs = out_layouts if isinstance(out_layouts, list) else [out_layouts]

    def mapped(*operands: Any, **options: Any) -> Any:
        _check_operands(called, operands, len(ins))
        place = operands[0].spec.place
        moved = [
            _brought(called, operand, request)
            for operand, request in zip(operands, ins, strict=True)
        ]
        made, saved, specs = _run(record, place, moved, outs, options)
        call = _Mapping(record, tuple(t.spec for t in moved), specs)
        node = _recorded(call, moved, saved)
        device = _device(moved)
        results = tuple(
            Tensor(spec, array, device, _node_for(spec, node), number)
            for number, (spec, array) in enumerate(zip(specs, made, strict=True))
        )
        return results if isinstance(out_layouts, list) else results[0]

    mapped.__name__ = called
    mapped.__doc__ = function.__doc__
    return mapped


class _Record(NamedTuple):
    """What was asked for."""

    name: str
    function: Callable[..., Any]
    backward: Callable[..., Any] | None
    shapes: Callable[..., Any] | None
    dtype: Any


class _Mapping(NamedTuple):
    """One call: what the checks of an operator's plan look at."""

    operator: _Record
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]

    def gradient_layout(self, number: int) -> Layout:
        """Layout of the gradient that the backward gives for an operand."""
        everything = [spec.layout for spec in (*self.inputs, *self.outputs)]
        layout: list[Placement] = []
        for axis, placement in enumerate(self.inputs[number].layout):
            alike = all(isinstance(other[axis], Replicate) for other in everything)
            if isinstance(placement, Shard):
                layout.append(placement)
            elif isinstance(placement, Partial) or alike:
                layout.append(REPLICATE)
            else:
                layout.append(PARTIAL)
        return tuple(layout)


class _Call(tape.Node):
    """A mapped call on the tape."""

    __slots__ = ("mapping", "saved")

    def __init__(self, mapping: _Mapping, operands: list[Tensor], saved: Any) -> None:
        super().__init__(
            tuple(None if o.node is None else (o.node, o.slot) for o in operands),
            mapping.outputs,
            [(o.cell, o.cell[0]) for o in operands if o.cell is not None],
        )
        self.mapping: _Mapping | None = mapping
        self.saved = saved

    def check(self) -> None:
        """Raise `AutodiffError` unless the backward of this call can run. Local."""
        if self.mapping is None:
            raise tape.used_already()
        name = self.mapping.operator.name
        if self.mapping.operator.backward is None:
            raise AutodiffError(
                f"backward: {name} is not differentiable; tell local_map how with "
                "backward=..., or call detach() on its operands"
            )
        self.check_versions(name)

    def run_backward(self, run: Pass) -> None:
        """Consume the gradients of the outputs; hand gradients to the parents."""
        mapping, saved = self.mapping, self.saved
        assert mapping is not None
        self.mapping = self.saved = None
        if not self.slots[0].spec.place.is_member:
            for parent in self.parents:
                if parent is not None:
                    tape.reach(parent)
            return
        backward = mapping.operator.backward
        assert backward is not None
        current.operator = mapping.operator.name
        try:
            grads = [self._gradient(number) for number in range(len(self.slots))]
            made = backward(saved, *grads)
        finally:
            current.operator = ""
        wanted = [p is not None and run.wants(p[0]) for p in self.parents]
        check_backward(mapping, made, wanted)
        for number, parent in enumerate(self.parents):
            if parent is not None and wanted[number]:
                node, slot = parent
                node.slots[slot].add(made[number], mapping.gradient_layout(number))

    def _gradient(self, number: int) -> Any:
        slot = self.slots[number]
        needed = tuple(
            p if isinstance(p, Shard) else REPLICATE for p in slot.spec.layout
        )
        slot.pool(needed)
        if slot.sums:
            return slot.take(needed)
        spec = slot.spec.with_layout(needed)
        return spec.place.backend.zeros(spec.local_shape, spec.dtype)


def _check_operands(name: str, operands: Sequence[Any], count: int) -> None:
    if len(operands) != count:
        raise UsageError(
            f"{name}: there are {count} layouts in and {len(operands)} operands; "
            "give a layout for each"
        )
    for number, operand in enumerate(operands):
        if not isinstance(operand, Tensor):
            raise UsageError(
                f"{name}: operand {number} is a {type(operand).__name__}, not a "
                "tensor; make it one with tpm.tensor(array, group), or pass it by name"
            )
        if operand.spec.place is not operands[0].spec.place:
            raise ShardingError(
                f"{name}: operand 0 lives on {operands[0].spec.place}, operand "
                f"{number} on {operand.spec.place}; bring it there with .to(place)"
            )


def _layout(name: str, place: Place, ndim: int, request: LayoutRequest) -> Layout:
    start = replicated(len(place.shape))
    if isinstance(request, Mapping):
        return requested_layout(name, place, ndim, start, None, dict(request))
    return requested_layout(name, place, ndim, start, request, {})


def _brought(name: str, operand: Tensor, request: LayoutRequest) -> Tensor:
    if request is None:
        return operand
    layout = _layout(name, operand.spec.place, operand.ndim, request)
    current.operator = name
    try:
        return operand.to_layout(layout)
    finally:
        current.operator = ""


def _run(
    record: _Record,
    place: Place,
    operands: list[Tensor],
    outs: list[LayoutRequest],
    options: dict[str, Any],
) -> tuple[list[Any], Any, tuple[Spec, ...]]:
    """Return the outputs, what was saved, and the outputs' specs."""
    name, count = record.name, len(outs)
    shapes = _told_shapes(record, operands, count)
    if not place.is_member:
        if shapes is None:
            raise UsageError(
                f"{name}: this rank is no member of {place} and cannot see the "
                "outputs; tell local_map their shapes with shapes=..."
            )
        specs = _specs(record, place, operands, outs, shapes)
        return [MetaArray(s.local_shape, s.dtype) for s in specs], None, specs
    current.operator = name
    try:
        made = record.function(*[operand.local for operand in operands], **options)
        saved = None
        if record.backward is not None:
            if not isinstance(made, tuple) or len(made) != 2:
                raise UsageError(
                    f"{name}: a function with a backward must return (outputs, saved)"
                )
            made, saved = made
        arrays = _arrays(name, made, count)
        if shapes is None:
            remedy = "tell local_map the outputs' shapes with shapes=..."
            shapes = [
                shape_of_blocks(
                    name, place, array, _layout(name, place, array.ndim, out), remedy
                )
                for array, out in zip(arrays, outs, strict=True)
            ]
    finally:
        current.operator = ""
    specs = _specs(record, place, operands, outs, shapes)
    mapping = _Mapping(record, tuple(o.spec for o in operands), specs)
    check_forward(mapping, (arrays[0] if count == 1 else tuple(arrays), saved))
    own = [_apart(array, operands) for array in arrays]
    return own, saved, specs


def _arrays(name: str, made: Any, count: int) -> list[Any]:
    arrays = [made] if count == 1 else made
    if not isinstance(arrays, tuple | list) or len(arrays) != count:
        raise UsageError(
            f"{name}: there are {count} layouts out, so the function must return a "
            f"tuple of {count} arrays; it returned a {type(made).__name__}"
        )
    for array in arrays:
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise UsageError(
                f"{name}: the function must return arrays, it returned a "
                f"{type(array).__name__}"
            )
    return [np.asarray(a) if isinstance(a, np.generic) else a for a in arrays]


def _apart(array: Any, operands: list[Tensor]) -> Any:
    """The array, or a copy where it shares memory with an operand."""
    if isinstance(array, np.ndarray) and any(
        np.may_share_memory(array, operand.array) for operand in operands
    ):
        return array.copy()
    return array


def _told_shapes(
    record: _Record, operands: list[Tensor], count: int
) -> list[Shape] | None:
    if record.shapes is None:
        return None
    told = record.shapes(*[operand.shape for operand in operands])
    many = told if isinstance(told, list) else [told]
    if len(many) != count:
        raise UsageError(
            f"{record.name}: there are {count} layouts out, so shapes must return a "
            f"list of {count} shapes; it returned {told!r}"
        )
    return [tuple(int(length) for length in shape) for shape in many]


def _specs(
    record: _Record,
    place: Place,
    operands: list[Tensor],
    outs: list[LayoutRequest],
    shapes: list[Shape],
) -> tuple[Spec, ...]:
    given = record.dtype if isinstance(record.dtype, list) else [record.dtype]
    if len(given) == 1:
        given = given * len(outs)
    if len(given) != len(outs):
        raise UsageError(
            f"{record.name}: there are {len(outs)} layouts out and {len(given)} dtypes"
        )
    common = np.result_type(*[operand.dtype for operand in operands])
    return tuple(
        spec_of(
            place,
            shape,
            common if dtype is None else np.dtype(dtype),
            _layout(record.name, place, len(shape), out),
        )
        for shape, out, dtype in zip(shapes, outs, given, strict=True)
    )


def _recorded(
    mapping: _Mapping, operands: list[Tensor], saved: Any
) -> tape.Node | None:
    mode = tape.mode
    if not mode.recording or all(operand.node is None for operand in operands):
        return None
    if mode.watching is not None:
        return mode.watching.see(operands)  # type: ignore[no-any-return]
    return _Call(mapping, operands, saved)


def _node_for(spec: Spec, node: tape.Node | None) -> tape.Node | None:
    return None if spec.dtype.kind in "biu" else node


def _device(operands: list[Tensor]) -> Place:
    for operand in operands:
        if operand.device.is_autodiff:
            return operand.device
    return operands[0].device
