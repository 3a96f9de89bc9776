"""From the `model` section of a configuration to a model on a mesh."""

from __future__ import annotations

from dataclasses import asdict

from tparmpi import models
from tparmpi.comm import Place
from tparmpi.nn import Module
from tparmpi.train.config import RunConfig


def build_model(config: RunConfig, place: Place) -> Module:
    """The model that `config` describes, without values yet. Local.

    Raises
    ------
    UsageError
        The kind is unknown, or its sizes do not fit each other.
    """
    sizes = asdict(config.model)
    kind = sizes.pop("kind")
    return models.build(kind, sizes, place, dtype=config.train.precision)
