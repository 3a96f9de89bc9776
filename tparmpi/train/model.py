"""From the `model` section of a configuration to a model on a mesh."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import cast

import tparmpi as tpm
from tparmpi import models
from tparmpi.comm import Place
from tparmpi.errors import DeviceError, UsageError
from tparmpi.nn import Module
from tparmpi.parallel import (
    DistributedLayeredModel,
    LayerParallelism,
    LayerPlacement,
)
from tparmpi.train.config import RunConfig
from tparmpi.train.layout import Layout


class TokenLoss:
    """The cross-entropy of tokens, which all weigh the same."""

    def __call__(
        self, logits: tpm.Tensor, targets: tpm.Tensor
    ) -> tuple[tpm.Tensor, int]:
        """The sum of the losses of a microbatch, and its number of tokens."""
        return tpm.cross_entropy(logits, targets).sum(), self.weight(targets)

    def weight(self, targets: tpm.Tensor) -> int:
        """The number of tokens. Local."""
        return targets.size


def place_model(
    config: RunConfig, layout: Layout
) -> tuple[Module, DistributedLayeredModel]:
    """The model that `config` describes on all ranks, and the same with its placement.

    Collective over all ranks.

    Raises
    ------
    UsageError
        There are fewer layers than stages, or the model is not possible.
    """
    parallel, n_layer = config.parallel, config.model.n_layer
    chunks = parallel.chunks if parallel.schedule == "interleaved" else 1
    if layout.pp * chunks > n_layer:
        parts = f"pp ({layout.pp})"
        if chunks > 1:
            parts = f"pp * chunks ({layout.pp} * {chunks})"
        raise UsageError(
            f"model.n_layer ({n_layer}) is fewer than {parts}, and each part needs a "
            "layer: give a smaller --pp or parallel.chunks, or more layers"
        )
    mesh = tpm.mesh(pp=layout.pp, dp=layout.dp, tp=layout.tp).autodiff()
    placement = LayerPlacement.interleaved(mesh.split("pp"), n_layer, chunks)
    model = build_model(config, placement)
    return model, DistributedLayeredModel(cast(LayerParallelism, model), placement)


def build_model(config: RunConfig, place: Place | LayerPlacement) -> Module:
    """The model that `config` describes, without values yet. Local.

    Raises
    ------
    UsageError
        The kind is unknown, or its sizes do not fit each other.
    """
    sizes = asdict(config.model)
    kind = sizes.pop("kind")
    layout = {
        "sequence": config.parallel.sequence,
        "fully_sharded": "dp" if config.parallel.fully_sharded else None,
    }
    return models.build(kind, sizes, place, dtype=config.train.precision, layout=layout)


@contextlib.contextmanager
def memory_for(model: Module, copies: int, what: str) -> Iterator[None]:
    """Tell in a sentence where the memory does not suffice for a model. Local.

    Parameters
    ----------
    copies
        How often each value is held: 1 to use the model, 4 with the gradient and the
        two moments of AdamW.
    what
        What takes that memory, for the message.

    Raises
    ------
    DeviceError
        Before anything is done where the machine has less in all, or when something in
        the block asks for more than there is.
    """
    parameters = list(model.parameters())
    by_place: dict[Place, int] = {}
    for parameter in parameters:
        place = parameter.spec.place
        _, block = parameter.spec.block((0,) * len(place.shape))
        held = copies * math.prod(block) * parameter.dtype.itemsize
        by_place[place] = by_place.get(place, 0) + held
    needed = max(by_place.values())
    refusal = DeviceError(
        f"not enough memory: {what} takes {needed:,} bytes on each rank, and its "
        "activations come on top; make the model (model.d_model, model.n_layer, "
        "model.vocab_size, model.seq_len) or train.batch_size smaller, or start more "
        "ranks and split over them (--tp, --pp, or --dp with "
        "parallel.fully_sharded=true)"
    )
    kinds = {place.kind for place in by_place}
    # No device has more than its address space, and a CPU not more than the machine.
    most = _machine_bytes() if kinds == {"cpu"} else 2**47
    if needed > most:
        raise refusal
    try:
        yield
    except MemoryError as error:
        raise refusal from error


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
