"""Operators: one record each, with rules, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tparmpi.errors import UsageError
from tparmpi.sharding import Traits
from tparmpi.tensors.dispatch import apply
from tparmpi.tensors.registry import methods, registry

Rules = str | Callable[..., str | tuple[str, Mapping[str, int | tuple[int, ...]]]]
"""A rule, or a function of the operands' shapes and the attributes that returns one,
perhaps with sizes of factors that the operands do not tell."""

Dtypes = Callable[..., np.dtype[Any] | tuple[np.dtype[Any], ...]]
"""A function of the operands' dtypes and the attributes that returns the outputs'."""

Numbers = Callable[[str, Any, np.dtype[Any]], np.ndarray[Any, Any]]
"""See `Operator.numbers`."""

_EMPTY = inspect.Parameter.empty


class Operator:
    """One operator's record; calling it applies the operator to tensors.

    Attributes
    ----------
    name
        How errors, the ledger and `Tensor` methods call it.
    rules
        See `Rules` and `tparmpi.sharding.rules`. The keyword parameters of a rule
        function are the operator's *attributes*: they are part of the plan.
    forward
        ``forward(plan, *locals, **scalars) -> (outputs, saved)``; outputs is an array,
        or a tuple of arrays where the rule has several outputs. Its keyword parameters
        are the operator's *scalars*: they change no shape and are no part of the plan.
    backward
        ``backward(plan, saved, grad, wanted) -> local gradients``, one for each
        operand, None where ``wanted`` is false. None in place of the function: not
        differentiable.
    linear
        Numbers of the operands in which the operator alone is linear, so that a pending
        sum passes; or a function of the dtypes and attributes that returns them.
    additive
        Whether pending sums pass if all operands are pending.
    dtype
        Function of the operands' dtypes and the attributes that returns the outputs'
        dtype, or a tuple with one for each; by default NumPy's promotion.
    cast
        Whether operands of another dtype are cast to the (first) output's first.
    view
        Whether outputs may share the memory of the only operand.
    numbers
        Function of the operator's name, a number and the other operands' dtype that
        returns the array without dims which the number stands for, or None where
        numbers may not stand for operands; see `tparmpi.tensors.numbers`.
    fresh
        Whether every gradient that the backward returns is an array of its own, which
        nothing else holds: the tape adds into such, and copies others first.
    """

    def __init__(
        self,
        name: str,
        rules: Rules,
        forward: Callable[..., Any],
        *,
        linear: tuple[int, ...] | Callable[..., tuple[int, ...]] = (),
        additive: bool = False,
        dtype: Dtypes | None = None,
        cast: bool = True,
        view: bool = False,
        numbers: Numbers | None = None,
        fresh: bool = False,
    ) -> None:
        self.name = name
        self.rules = rules
        self.forward = forward
        self.backward: Callable[..., Sequence[Any]] | None = None
        self.linear = linear
        self.additive = additive
        self.dtype = dtype
        self.cast = cast
        self.view = view
        self.numbers = numbers
        self.fresh = fresh
        self.scalars = _keyword_defaults(forward)
        self.attributes = {} if isinstance(rules, str) else _keyword_defaults(rules)
        self.__doc__ = forward.__doc__
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Apply the operator; collective over the operands' place where it "
        "communicates.
        """
        scalars: dict[str, Any] = {}
        attributes: tuple[Any, ...] = ()
        if keywords or self.scalars or self.attributes:
            scalars, attributes = self._sort(keywords)
        return apply(self, operands, attributes, scalars)

    def define_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make `function` the backward; usable as a decorator."""
        self.backward = function
        return function

    def traits(
        self, dtypes: Sequence[np.dtype[Any]], attributes: Mapping[str, Any]
    ) -> Traits:
        """Return how pending sums pass for operands of `dtypes`."""
        linear = self.linear
        if callable(linear):
            linear = linear(dtypes, attributes)
        return Traits(linear, self.additive)

    def _sort(self, keywords: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        scalars = {}
        for key, default in self.scalars.items():
            scalars[key] = keywords.pop(key, default)
        attributes = []
        for key, default in self.attributes.items():
            attributes.append((key, keywords.pop(key, default)))
        if keywords:
            known = ", ".join([*self.scalars, *self.attributes]) or "none"
            raise UsageError(
                f"{self.name}: unknown argument '{next(iter(keywords))}'; "
                f"its keyword arguments are: {known}"
            )
        for key, value in (*scalars.items(), *attributes):
            if value is _EMPTY:
                raise UsageError(f"{self.name}: the argument '{key}' is missing")
        return scalars, tuple(attributes)


def _keyword_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def operator(
    rules: Rules,
    *,
    name: str | None = None,
    linear: tuple[int, ...] | Callable[..., tuple[int, ...]] = (),
    additive: bool = False,
    dtype: Dtypes | None = None,
    cast: bool = True,
    view: bool = False,
    numbers: Numbers | None = None,
    fresh: bool = False,
) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated forward function as an operator.

    Examples
    --------
    >>> @tpm.operator("...->...")
    ... def square(plan, x):
    ...     return x * x, x
    >>> @square.define_backward
    ... def _(plan, saved, grad, wanted):
    ...     return (2 * saved * grad,)
    >>> tensor.square()
    """

    def register(forward: Callable[..., Any]) -> Operator:
        record = Operator(
            name or forward.__name__,
            rules,
            forward,
            linear=linear,
            additive=additive,
            dtype=dtype,
            cast=cast,
            view=view,
            numbers=numbers,
            fresh=fresh,
        )
        if record.name in registry:
            raise UsageError(f"operator: there is already one named '{record.name}'")
        registry[record.name] = record
        if _operand_count(forward) == 1:
            methods[record.name] = record
        return record

    return register


def _operand_count(forward: Callable[..., Any]) -> int:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return -1
    return sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
