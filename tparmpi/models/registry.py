"""Kinds of models by name, for configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tparmpi.comm import Place
from tparmpi.errors import UsageError
from tparmpi.models.gpt import GPT, GPTConfig
from tparmpi.models.gpt_layout import GPTLayout
from tparmpi.nn import Module
from tparmpi.parallel import LayerPlacement


@dataclass(frozen=True)
class ModelKind:
    """A kind of model: the classes of its sizes, of its layout, and its own."""

    config: type[Any]
    layout: type[Any]
    model: type[Module]


kinds: dict[str, ModelKind] = {"gpt": ModelKind(GPTConfig, GPTLayout, GPT)}
"""All kinds by name."""


def build(
    kind: str,
    sizes: Mapping[str, Any],
    place: Place | LayerPlacement,
    dtype: Any = None,
    *,
    layout: Mapping[str, Any] | None = None,
) -> Module:
    """Return a model of `kind` on `place`, or on its places, without values yet. Local.

    Parameters
    ----------
    sizes
        The fields of the kind's configuration.
    dtype
        The place's default floating dtype if None.
    layout
        Fields of the kind's layout that are not to have their defaults.

    Raises
    ------
    UsageError
        If there is no such kind, or the sizes are not valid.
    """
    if kind not in kinds:
        near = get_close_matches(kind, kinds, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"there is: {', '.join(kinds)}"
        raise UsageError(f"there is no kind of model '{kind}'; {hint}")
    found = kinds[kind]
    return found.model(
        found.config(**sizes),  # type: ignore[call-arg]
        place,
        layout=found.layout(**(layout or {})),
        dtype=dtype,
    )
