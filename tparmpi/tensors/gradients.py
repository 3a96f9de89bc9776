"""Asking for gradients: `backward` of tensors, `grad` of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tparmpi.backend import MetaArray
from tparmpi.errors import AutodiffError, ShapeError, ShardingError, UsageError
from tparmpi.sharding import REPLICATE, Layout, Shard
from tparmpi.tensors import nests, tape
from tparmpi.tensors.passes import Deferred, Pass, Seed
from tparmpi.tensors.redistribute import redistribute
from tparmpi.tensors.registry import method
from tparmpi.tensors.tensor import Tensor


@method
def backward(
    tensors: Tensor | Sequence[Tensor],
    seeds: Tensor | Sequence[Tensor | None] | None = None,
    *,
    later: Deferred | None = None,
) -> None:
    """Add to `grad` of all tensors that the given ones were made from.

    Collective over the places of all tensors on the tape, which is freed on the way.
    Ranks that are no members of a place call it too.

    Parameters
    ----------
    tensors
        One, or several that were made together; one pass goes through what they share.
    seeds
        Gradient of each tensor: of its shape, on its place, in any layout, not
        changed. Ones where None.
    later
        Takes the gradients of parameters; see `Deferred`.

    Raises
    ------
    AutodiffError
        If nothing was recorded, the tape was used before, a tensor that it needs was
        written to since, or a gradient of a gradient is asked for. No gradient is
        changed then.
    ShapeError, ShardingError
        If a seed does not fit its tensor.
    """
    many = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given: list[Any] = [None] * len(many)
    if seeds is not None:
        given = list(seeds) if isinstance(seeds, list | tuple) else [seeds]
    if len(given) != len(many):
        raise UsageError(
            f"backward: there are {len(many)} tensors and {len(given)} seeds; give one "
            "for each, or None"
        )
    if later is not None and not isinstance(later, Deferred):
        raise UsageError(
            f"backward: later must be a tpm.Deferred(), it is a {type(later).__name__}"
        )
    found = [
        _seed(tensor, seed)
        for tensor, seed in zip(many, given, strict=True)
        if not (tensor.is_shell and tensor.node is None)
    ]
    Pass(later=later).run(found)


def value_and_grad(
    function: Callable[..., Tensor], argnums: int | Sequence[int] = 0
) -> Callable[..., tuple[Tensor, Any]]:
    """Return a function that gives the value of `function` and its gradients.

    It is called as `function` is. No `grad` of any tensor is changed: parameters that
    `function` uses besides its arguments are constants to it.

    Parameters
    ----------
    function
        Its value is a tensor of one element. It may communicate.
    argnums
        Numbers of the positional arguments to differentiate by: floating tensors, on
        places of any kind, or tuples, lists, dicts and dataclasses of some.

    Returns
    -------
    Callable
        ``(...) -> (value, gradients)``. Collective as `function` and its backward pass
        are. The gradients are in the form of the argument, in a tuple where `argnums`
        is a sequence. They lie as the arguments do; replicated where those are pending
        sums.

    Raises
    ------
    AutodiffError
        If an argument is not floating. Gradients of gradients are not supported: the
        results raise it in the backward pass of what is made from them, where
        `function` depends on tensors that record gradients outside of it.
    ShapeError
        If the value has several elements.
    UsageError
        If there is no such argument, or it holds no tensor.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def evaluate(*operands: Any, **keywords: Any) -> tuple[Tensor, Any]:
        chosen = [_argument(operands, number) for number in numbers]
        tensors = [t for argument in chosen for t in nests.tensors_in(argument)]
        twins = [_as_leaf(tensor) for tensor in tensors]
        replaced = list(operands)
        given = iter(twins)
        for number, argument in zip(numbers, chosen, strict=True):
            replaced[number] = nests.replace(argument, lambda t: next(given))
        outside = [] if not tape.mode.recording else _parents(tensors)
        with _recording():
            value = function(*replaced, **keywords)
            _check_value(value)
            outside += _run(value, twins)
        if not tape.mode.recording:
            outside = []
        plain = not any(t.device.is_autodiff for t in tensors) and not outside
        gradients = iter(
            [_gradient(*pair, outside) for pair in zip(tensors, twins, strict=True)]
        )
        results = [
            nests.replace(argument, lambda t: next(gradients)) for argument in chosen
        ]
        value = _without_history(value, outside, plain)
        return value, results[0] if isinstance(argnums, int) else tuple(results)

    return evaluate


def grad(
    function: Callable[..., Tensor], argnums: int | Sequence[int] = 0
) -> Callable[..., Any]:
    """Return a function that gives the gradients of `function`.

    As `value_and_grad`, without the value.

    Examples
    --------
    >>> slope = tpm.grad(lambda x: (x * x).sum())
    >>> slope(tpm.tensor([1.0, 2.0], group)).numpy()
    array([2., 4.], dtype=float32)
    """
    evaluate = value_and_grad(function, argnums)

    def gradients(*operands: Any, **keywords: Any) -> Any:
        return evaluate(*operands, **keywords)[1]

    return gradients


def whole_where_pending(layout: Layout) -> Layout:
    """Return `layout` with pending sums replicated: how gradients are seeded. Local."""
    return tuple(p if isinstance(p, Shard) else REPLICATE for p in layout)


def _seed(tensor: Tensor, seed: Tensor | None) -> Seed:
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"backward: a {type(tensor).__name__} is no tensor; give tensors"
        )
    if tensor.node is None:
        raise AutodiffError(
            "backward: nothing was recorded; call require_grad() on a tensor that "
            "lives on device.autodiff()"
        )
    spec = tensor.spec
    if seed is not None:
        _check_seed(tensor, seed)
        # A copy: what reads the gradient must not see later writes to the seed.
        array = None if seed.is_shell else seed.array.copy()
        return Seed(tensor.node, tensor.slot, {seed.layout: (array, True)})
    if tensor.is_shell:
        return Seed(tensor.node, tensor.slot, {spec.layout: (None, False)})
    layout = whole_where_pending(tensor.layout)
    ones = tape.ones_like(spec.with_layout(layout))
    return Seed(tensor.node, tensor.slot, {layout: (ones, True)})


def _check_seed(tensor: Tensor, seed: Tensor) -> None:
    if not isinstance(seed, Tensor):
        raise UsageError(
            f"backward: the seed is a {type(seed).__name__}, not a tensor; make it one "
            "with tpm.tensor(array, group)"
        )
    if seed.shape != tensor.shape:
        raise ShapeError(
            f"backward: the seed must have the shape of its tensor, {tensor.shape}; "
            f"its shape is {seed.shape}"
        )
    if seed.spec.place is not tensor.spec.place:
        raise ShardingError(
            f"backward: the seed lives on {seed.spec.place}, its tensor on "
            f"{tensor.spec.place}; make it on the same place"
        )
    if not np.can_cast(seed.dtype, tensor.dtype, "same_kind"):
        raise UsageError(
            f"backward: a seed of {seed.dtype} cannot be the gradient of a tensor of "
            f"{tensor.dtype}; cast it"
        )


class _recording:
    """Context in which calls are recorded, whatever is the case around it."""

    def __enter__(self) -> None:
        self._before = tape.mode.recording, tape.mode.watching
        tape.mode.recording, tape.mode.watching = True, None

    def __exit__(self, *_: object) -> None:
        tape.mode.recording, tape.mode.watching = self._before


def _argument(operands: Sequence[Any], number: int) -> Any:
    if not -len(operands) <= number < len(operands):
        raise UsageError(
            f"grad: there is no positional argument {number}, {len(operands)} are "
            "given; name those to differentiate by with argnums"
        )
    argument = operands[number]
    found = nests.tensors_in(argument)
    if not found:
        raise UsageError(
            f"grad: argument {number} is a {type(argument).__name__} without tensors; "
            "make it one with tpm.tensor(array, group)"
        )
    for tensor in found:
        if not np.issubdtype(tensor.dtype, np.inexact) and tensor.dtype.kind != "V":
            raise AutodiffError(
                f"grad: argument {number} holds a tensor of {tensor.dtype}, which has "
                "no gradient; use a floating dtype or leave it out of argnums"
            )
    return argument


def _as_leaf(tensor: Tensor) -> Tensor:
    """The same tensor, a parameter if it is one, with a gradient of its own."""
    if tensor.cell is None:
        tensor.cell = [0]
    twin: Tensor = object.__new__(type(tensor))
    for kind in type(tensor).__mro__:
        for name in vars(kind).get("__slots__", ()):
            if name != "__weakref__":
                setattr(twin, name, getattr(tensor, name))
    twin.node = tape.Leaf(tensor.spec)
    twin.slot = 0
    twin.device = tensor.device.autodiff()
    twin.regather = None
    return twin


def _parents(tensors: Sequence[Tensor]) -> list[tape.Parent]:
    return [(t.node, t.slot) for t in tensors if t.node is not None]


def _check_value(value: Any) -> None:
    if not isinstance(value, Tensor):
        raise UsageError(
            f"grad: the function returned a {type(value).__name__}; it must return a "
            "tensor of one element"
        )
    if value.size != 1:
        raise ShapeError(
            f"grad: the function's value has the shape {value.shape}; it must have "
            "one element: sum it, or call value.backward(seed)"
        )


def _run(value: Tensor, twins: Sequence[Tensor]) -> list[tape.Parent]:
    """Run the backward pass to `twins`; return what else the value depends on."""
    if value.node is None:
        return []
    leaves = {twin.node for twin in twins if isinstance(twin.node, tape.Leaf)}
    run = Pass(leaves)
    run.run([_seed(value, None)])
    if isinstance(value.node, tape.Leaf) and value.node not in leaves:
        return [(value.node, value.slot)]
    return run.outside


def _gradient(tensor: Tensor, twin: Tensor, outside: list[tape.Parent]) -> Tensor:
    spec = tensor.spec.with_layout(whole_where_pending(tensor.layout))
    array: Any
    assert isinstance(twin.node, tape.Leaf)
    if tensor.is_shell:
        array = MetaArray(spec.local_shape, spec.dtype)
    else:
        found = twin.node.gradient
        if found is None:
            array = spec.place.backend.zeros(spec.local_shape, spec.dtype)
        else:
            array, layout = found
            array = redistribute(array, spec.with_layout(layout), spec.layout)
    end = tape.GradientEnd(tuple(outside), (spec,)) if outside else None
    return Tensor(spec, array, tensor.device, end)


def _without_history(value: Tensor, outside: list[tape.Parent], plain: bool) -> Tensor:
    value = value.detach()
    if plain:
        value.device = value.spec.place
    if outside:
        value.node = tape.GradientEnd(tuple(outside), (value.spec,))
    return value
