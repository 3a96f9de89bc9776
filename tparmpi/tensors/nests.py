"""Tensors in tuples, lists, dicts and dataclasses, nested as one likes."""

from __future__ import annotations

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
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: replace(getattr(value, name), change, leaf) for name in fields}
        if all(changed[name] is getattr(value, name) for name in fields):
            return value
        return dataclasses.replace(value, **changed)
    return value
