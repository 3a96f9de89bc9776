"""What a member says of its call, so that others can compare it with theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tparmpi.comm.ledger import call_site


class Header(NamedTuple):
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
    "send_arrays": ("arrays", "to"),
    "recv_arrays": ("source",),
    "send_blocks": ("arrays", "to"),
    "recv_blocks": ("source",),
    "barrier": (),
    "broadcast_object": ("value", "root"),
    "all_gather_object": ("value",),
}
# The dim whose length is each member's own.
_OWN_LENGTH = {"all_gather": "dim", "gather": "dim", "all_to_all": "concat_dim"}
# The two sides of a message are one call.
_SIDES = {
    "send": "message",
    "recv": "message",
    "send_arrays": "messages",
    "recv_arrays": "messages",
    "send_blocks": "blocks",
    "recv_blocks": "blocks",
}


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
    given = tuple(_plain(n, a) for n, a in zip(names, arguments, strict=False))
    try:
        compared, text = _described(kind, given)
    except TypeError:
        # An argument of a kind that the operation will refuse.
        compared, text = _described.__wrapped__(kind, given)
    return Header(compared, text, call_site())


def _plain(name: str, value: Any) -> Any:
    """An argument, or what is compared of an array."""
    if name == "array" and not hasattr(value, "dtype"):
        value = np.asarray(value)
    if name == "arrays":
        return len(value)
    if name in ("array", "value"):
        return (value.dtype, value.shape) if hasattr(value, "dtype") else None
    return tuple(value) if name == "sizes" and value is not None else value


@lru_cache(maxsize=1024)
def _described(kind: str, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], str]:
    """What is compared of a call, and its text."""
    given = dict(zip(_ARGUMENTS[kind], arguments, strict=False))
    compared: list[Any] = [_SIDES.get(kind, kind)]
    shown = []
    for name, value in given.items():
        if name in ("array", "value"):
            if value is not None:
                dtype = value[0].name if value[0].isnative else value[0].str
                shape = tuple(value[1])
                shown.append(f"{dtype} {shape}")
                if name == "array":
                    compared.append((dtype, _without(shape, given, kind)))
        else:
            shown.append(f"{name}={value}")
            if kind not in _SIDES:
                compared.append(value)
    return tuple(compared), f"{kind}({', '.join(shown)})"


def _without(
    shape: tuple[int, ...], given: dict[str, Any], kind: str
) -> tuple[int, ...]:
    """`shape` without the length that is each member's own."""
    own = given.get(_OWN_LENGTH.get(kind, ""))
    return tuple(-1 if dim == own else size for dim, size in enumerate(shape))
