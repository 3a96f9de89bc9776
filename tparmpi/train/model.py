"""From the `model` section of a configuration to a model on a mesh."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import asdict

from tparmpi import models
from tparmpi.comm import Place
from tparmpi.errors import DeviceError
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
    needed = copies * sum(
        math.prod(block) * parameter.dtype.itemsize
        for parameter in parameters
        for _, block in [parameter.spec.block((0,) * len(parameter.spec.place.shape))]
    )
    refusal = DeviceError(
        f"not enough memory: {what} takes {needed:,} bytes on each rank, and its "
        "activations come on top; make the model (model.d_model, model.n_layer, "
        "model.vocab_size, model.seq_len) or train.batch_size smaller, or start more "
        "ranks and split over them (--tp, or --dp with parallel.fully_sharded=true)"
    )
    kinds = {parameter.spec.place.kind for parameter in parameters}
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
