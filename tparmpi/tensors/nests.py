"""Tensors in tuples, lists, dicts and dataclasses, nested as one likes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from tparmpi.tensors.tensor import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a nest, in order; one that occurs twice, twice. Local."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replace(value, note)
    return found


def replace(value: Any, change: Callable[[Any], Any], leaf: type = Tensor) -> Any:
    """Return a nest of the same form with every tensor changed. Local.

    What is neither tensor nor container is kept as it is.

    Parameters
    ----------
    leaf
        What is changed in place of tensors.
    """
    if isinstance(value, leaf):
        return change(value)
    if isinstance(value, tuple):
        items = [replace(item, change, leaf) for item in value]
        named = hasattr(value, "_fields")
        return type(value)(*items) if named else tuple(items)
    if isinstance(value, list):
        return [replace(item, change, leaf) for item in value]
    if isinstance(value, dict):
        return {key: replace(item, change, leaf) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _replace_fields(value, change, leaf)
    return value


def _replace_fields(value: Any, change: Callable[[Any], Any], leaf: type) -> Any:
    """A dataclass with every tensor changed, not made anew: what checks its fields
    when it is made shall not see what stands for a tensor.
    """
    names = [field.name for field in dataclasses.fields(value)]
    changed = {name: replace(getattr(value, name), change, leaf) for name in names}
    if all(changed[name] is getattr(value, name) for name in names):
        return value
    made = copy.copy(value)
    for name in names:
        object.__setattr__(made, name, changed[name])
    return made
