"""Modules: trees of parameters with a forward function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tparmpi.errors import UsageError
from tparmpi.nn.parameter import Parameter
from tparmpi.tensors import Tensor

_Self = TypeVar("_Self", bound="Module")


class _Watched:
    """Who makes the calls of modules, for looking at them; nobody by default."""

    by: Callable[[Module, tuple[Any, ...], dict[str, Any]], Any] | None = None


watched = _Watched()


class Module:
    """A part of a model: attributes hold parameters, modules, and collections of both.

    Collections are lists, tuples, and dicts with text for keys, nested as you like.
    Subclasses define ``forward``; calling the module calls it. Names are dotted paths
    of attributes, positions and keys, such as ``"blocks.0.attn.q.weight"``. A module or
    parameter that is reached on several paths counts once, under the first, in the
    order of assignment.

    Attributes
    ----------
    training
        Whether dropout is active; see `train` and `eval`.
    path
        Dotted path from the model's root; None until `assign_paths`.
    """

    training: bool = True
    path: str | None = None
    forward: Callable[..., Any]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises
        ------
        UsageError
            If a parameter would be lost to an operator's result, as by ``self.w += 1``.
        """
        plain = isinstance(value, Tensor) and not isinstance(value, Parameter)
        if plain and isinstance(self.__dict__.get(name), Parameter):
            raise UsageError(
                f"'{name}' is a parameter, and a tensor in its place would be neither "
                "trained nor saved; overwrite its values with write_local(array), or "
                "delete the attribute first"
            )
        object.__setattr__(self, name, value)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Return ``forward(...)``."""
        if watched.by is not None:
            return watched.by(self, inputs, keywords)
        return self.forward(*inputs, **keywords)

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield (path, module) for this module, path ``""``, and all below. Local."""
        seen: set[int] = set()
        yield from _walk(self, "", seen)

    def named_parameters(
        self, *, with_copies: bool = False
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield the path of each parameter and the parameter. Local.

        Parameters
        ----------
        with_copies
            Also those that have the values of another one on another place.
        """
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, value in _held(vars(module), path):
                if not isinstance(value, Parameter) or id(value) in seen:
                    continue
                if value.copy_of is None or with_copies:
                    seen.add(id(value))
                    yield name, value

    def parameters(self) -> Iterator[Parameter]:
        """Yield each parameter once. Local."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Parameter]:
        """Return the parameters by name: the tensors themselves, not copies. Local."""
        return dict(self.named_parameters())

    def assign_paths(self) -> None:
        """Tell all modules and parameters below what they are called. Local."""
        for path, module in self.named_modules():
            module.path = path
        for name, parameter in self.named_parameters():
            parameter.name = name

    def initialize(self: _Self, seed: int) -> _Self:
        """Name all parameters and draw their initial values; return the module. Local.

        Values depend on (seed, name, global index) only: the same bytes on every
        layout.
        """
        self.assign_paths()
        for name, parameter in self.named_parameters():
            parameter.initialize(seed, name)
        return self

    def train(self: _Self) -> _Self:
        """Make dropout active here and in all below; return the module. Local."""
        for _, module in self.named_modules():
            module.training = True
        return self

    def eval(self: _Self) -> _Self:
        """Make dropout inactive here and in all below; return the module. Local."""
        for _, module in self.named_modules():
            module.training = False
        return self

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters. Local."""
        for parameter in self.parameters():
            parameter.zero_grad()


def _walk(module: Module, path: str, seen: set[int]) -> Iterator[tuple[str, Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, value in _held(vars(module), path):
        if isinstance(value, Module):
            yield from _walk(value, name, seen)


def _held(
    collection: Any, path: str, around: tuple[int, ...] = ()
) -> Iterator[tuple[str, Module | Parameter]]:
    """The modules and parameters in a collection and in those that it holds.

    Raises
    ------
    UsageError
        One has a key that cannot be part of a name.
    """
    if id(collection) in around:
        return
    around = (*around, id(collection))
    items = collection.items() if isinstance(collection, dict) else None
    for key, value in enumerate(collection) if items is None else items:
        found: Iterable[tuple[str, Module | Parameter]]
        if isinstance(value, Module | Parameter):
            found = [(_join(path, key), value)]
        elif isinstance(value, list | tuple | dict):
            found = _held(value, _join(path, key), around)
        else:
            continue
        for name, held in found:
            if items is not None and not _is_part(key):
                raise UsageError(
                    f"the key {key!r} of the dict at '{path}' cannot be part of a "
                    "parameter's name: give text without '.' and '/'"
                )
            yield name, held


def _is_part(key: Any) -> bool:
    return isinstance(key, str) and key != "" and not {".", "/"} & set(key)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
