"""Plans: all of an operator call that does not depend on the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tparmpi.backend.dtypes import promote
from tparmpi.sharding import (
    FREE,
    PARTIAL,
    Choice,
    Layout,
    Operand,
    Route,
    Rule,
    bind,
    choose,
    chunk,
)
from tparmpi.tensors.spec import Spec, spec_of

if TYPE_CHECKING:
    from tparmpi.tensors.operator import Operator


class FactorShard(NamedTuple):
    """This rank's part of one factor of a rule.

    Attributes
    ----------
    size
        The factor's whole length.
    offset, length
        First index and number of indices that this rank holds.
    axes
        The axes that split it, outermost first.
    """

    size: int
    offset: int
    length: int
    axes: tuple[int, ...]


class Plan:
    """How one operator runs on operands of given specs, for this rank.

    Parameters
    ----------
    parameters
        For each operand its name if it is a parameter, else None.

    Attributes
    ----------
    operator, attributes
        The record and its attributes by name.
    place, backend, xp
        Where it runs; the arrays' backend and its NumPy-like module.
    inputs
        Specs that the operands are brought to.
    routes
        For each operand how it gets there, or None where it is there.
    outputs
        Specs of the outputs.
    output_gradients, operand_gradients
        Layouts of the gradients that the backward takes and gives.
    may_pass
        For each axis, whether a pending gradient passes through the backward.
    nothing_pending
        False for each axis.
    gathered
        Numbers of the operands that are gathered although nobody asked.
    casts
        Whether operands are cast to the first output's dtype before the forward.
    differentiable
        For each output whether its dtype can have a gradient.
    forward_checked, backward_checked
        Whether what the operator's functions return was found to fit.
    """

    def __init__(
        self,
        operator: Operator,
        attributes: tuple[tuple[str, Any], ...],
        specs: Sequence[Spec],
        parameters: Sequence[str | None],
    ) -> None:
        place = specs[0].place
        self.operator = operator
        self.attributes = dict(attributes)
        self.place = place
        self.backend = place.backend
        self.xp: Any = place.backend.xp
        self.rule = _bind(operator, self.attributes, specs)
        dtypes = [spec.dtype for spec in specs]
        self.choice: Choice = choose(
            operator.name,
            self.rule,
            operator.traits(dtypes, self.attributes),
            [
                Operand(s.shape, s.layout, s.dtype.itemsize, n is not None, n or "")
                for s, n in zip(specs, parameters, strict=True)
            ],
            place.axes,
            place.shape,
        )
        choice = self.choice
        self.inputs = tuple(
            spec.with_layout(layout)
            for spec, layout in zip(specs, choice.operands, strict=True)
        )
        self.routes: tuple[Route | None, ...] = tuple(
            route if route.steps else None for route in choice.routes
        )
        self.moves = any(self.routes)
        shapes = self.rule.output_shapes
        made = _output_dtypes(operator, dtypes, self.attributes, len(shapes))
        self.casts = operator.cast and any(dtype != made[0] for dtype in dtypes)
        self.outputs = tuple(
            spec_of(place, shape, dtype, layout)
            for shape, dtype, layout in zip(shapes, made, choice.outputs, strict=True)
        )
        self.differentiable = tuple(dtype.kind not in "biu" for dtype in made)
        self.has_scalars = any(not spec.shape for spec in self.outputs)
        self.forward_checked = self.backward_checked = False
        self.output_gradients = choice.output_gradients
        self.operand_gradients = choice.operand_gradients
        self.may_pass = choice.may_pass
        self.nothing_pending = (False,) * len(choice.may_pass)
        self.gathered = choice.gathered
        self.factors = {f: self._factor_shard(f) for f in self.rule.sizes}
        self._leads = tuple(self._is_added_here(n) for n in range(len(specs)))

    def leads(self, operand: int) -> bool:
        """Return whether this rank adds the term of `operand` to a pending sum."""
        return self._leads[operand]

    def combine(self, factor: str, array: Any, op: str = "sum") -> Any:
        """Return `array` reduced by `op` over the members that split `factor`.

        Collective over the axes that split `factor`; `array` itself where none does.
        """
        for axis in reversed(self.factors[factor].axes):
            group = self.place.axis_group(axis)
            if group.size > 1:
                array = group.all_reduce(array, op)
        return array

    def collect(self, factor: str, array: Any) -> tuple[Any, int]:
        """Return the `array` of each member that splits `factor`, and our number.

        Collective over the axes that split `factor`.

        Returns
        -------
        pieces : (members, *array.shape)
            In the order of the members' chunks.
        number
            Which of them is this rank's.
        """
        pieces = array[None]
        number = 0
        for axis in self.factors[factor].axes:
            number = number * self.place.shape[axis] + self.place.coordinates[axis]
        for axis in reversed(self.factors[factor].axes):
            group = self.place.axis_group(axis)
            if group.size > 1:
                sizes = (len(pieces),) * group.size
                pieces = group.all_gather(pieces, 0, sizes)
        return pieces, number

    def gradient_layout(self, operand: int, pending: tuple[bool, ...]) -> Layout:
        """Layout of the gradient of `operand`.

        Parameters
        ----------
        pending
            For each axis, whether the outputs' gradients are pending there.
        """
        layout = self.operand_gradients[operand]
        if True not in pending:
            return layout
        return tuple(
            PARTIAL if waits else placement
            for placement, waits in zip(layout, pending, strict=True)
        )

    def _factor_shard(self, factor: str) -> FactorShard:
        size = self.rule.sizes[factor]
        axes = tuple(
            axis
            for axis, candidate in enumerate(self.choice.candidates)
            if candidate.factor == factor
        )
        offset, length = 0, size
        for axis in axes:
            start, length = chunk(
                length, self.place.shape[axis], self.place.coordinates[axis]
            )
            offset += start
        return FactorShard(size, offset, length, axes)

    def _is_added_here(self, operand: int) -> bool:
        term = self.rule.terms[operand]
        for axis, candidate in enumerate(self.choice.candidates):
            if candidate.kind == "factor":
                factor = candidate.factor
                pending = self.rule.kinds[factor] == FREE and not any(
                    self.rule.has(dims, factor) for dims in self.rule.outputs
                )
                once = pending and not self.rule.term_has(term, factor)
            else:
                once = (
                    candidate.kind == "linear"
                    and self.rule.terms[candidate.operand] != term
                )
            if once and self.place.coordinates[axis] != 0:
                return False
        return True


def _bind(
    operator: Operator, attributes: dict[str, Any], specs: Sequence[Spec]
) -> Rule:
    shapes = [spec.shape for spec in specs]
    rules = operator.rules
    if isinstance(rules, str):
        return bind(rules, shapes, operator.name)
    made = rules(*shapes, **attributes)
    if isinstance(made, str):
        return bind(made, shapes, operator.name)
    text, sizes = made
    return bind(text, shapes, operator.name, sizes)


def _output_dtypes(
    operator: Operator,
    dtypes: Sequence[np.dtype[Any]],
    attributes: dict[str, Any],
    count: int,
) -> tuple[np.dtype[Any], ...]:
    if operator.dtype is None:
        return (promote(*dtypes),) * count
    made = operator.dtype(dtypes, attributes)
    return made if isinstance(made, tuple) else (made,) * count
