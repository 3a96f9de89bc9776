"""What a member says of its call, so that others can compare it with theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tparmpi.comm.ledger import call_site


@dataclass(frozen=True)
class Header:
    """What a member says that it calls.

    Parameters
    ----------
    compared : tuple
        Equal on all members of a call that is right.
    text : str
        The call with its arguments.
    site : str
        Its source line.
    """

    compared: tuple[Any, ...]
    text: str
    site: str


# For each call the names of its arguments, as `operations` takes them. "array" and
# "value" differ between members by right where a root has one of its own.
_ARGUMENTS: dict[str, Sequence[str]] = {
    "all_reduce": ("array", "op"),
    "reduce_scatter": ("array", "dim", "op"),
    "all_gather": ("array", "dim", "sizes"),
    "all_to_all": ("array", "split_dim", "concat_dim", "sizes"),
    "broadcast": ("value", "root"),
    "gather": ("array", "root", "dim"),
    "scatter": ("value", "root", "dim"),
    "send": ("value", "to"),
    "recv": ("source",),
    "barrier": (),
    "broadcast_object": ("value", "root"),
    "all_gather_object": ("value",),
}
# The dim whose length is each member's own.
_OWN_LENGTH = {"all_gather": "dim", "gather": "dim", "all_to_all": "concat_dim"}
# The two sides of a message are one call.
_MESSAGES = frozenset({"send", "recv"})


def header_of(kind: str, arguments: Sequence[Any]) -> Header:
    """Return what a member says of its call. Local.

    Parameters
    ----------
    kind
        The call.
    arguments
        As the operation of this name takes them.
    """
    names = _ARGUMENTS[kind]
    given = dict(zip(names, arguments, strict=False))
    compared: list[Any] = ["message" if kind in _MESSAGES else kind]
    shown = []
    for name, value in given.items():
        if name == "array":
            array = value if hasattr(value, "dtype") else np.asarray(value)
            shape = tuple(array.shape)
            shown.append(f"{array.dtype.name} {shape}")
            compared.append((array.dtype.name, _without(shape, given, kind)))
        elif name == "value":
            if hasattr(value, "dtype"):
                shown.append(f"{value.dtype.name} {tuple(value.shape)}")
        else:
            if name == "sizes" and value is not None:
                value = tuple(value)
            shown.append(f"{name}={value}")
            if kind not in _MESSAGES:
                compared.append(value)
    text = f"{kind}({', '.join(shown)})"
    return Header(tuple(compared), text, call_site())


def _without(
    shape: tuple[int, ...], given: dict[str, Any], kind: str
) -> tuple[int, ...]:
    """`shape` without the length that is each member's own."""
    own = given.get(_OWN_LENGTH.get(kind, ""))
    return tuple(-1 if dim == own else size for dim, size in enumerate(shape))
