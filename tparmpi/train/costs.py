"""What the layers of a GPT cost where they are, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import tparmpi as tpm
from tparmpi import comm
from tparmpi.comm import Place
from tparmpi.models import GPT, GPTConfig
from tparmpi.parallel import DistributedLayeredModel
from tparmpi.parallel.schedules import BACKWARD, FORWARD
from tparmpi.tensors import Tensor, backward
from tparmpi.train.model import TokenLoss

_TIMES = 5


def layers(
    model: GPTConfig, place: Place, samples: np.ndarray[Any, Any], dtype: str
) -> tuple[float, float, float]:
    """Return the seconds of the input layer, a hidden one, and the output and loss.

    A forward and a backward each, on this rank's stage, all stages at the same time;
    the mean over all ranks, which get the same. Collective over all ranks.

    Parameters
    ----------
    samples : ndarray of int, shape (rows, seq_len + 1)
        The tokens of a microbatch.
    """
    one = GPT(replace(model, n_layer=1), place, dtype=dtype).initialize(0)
    own = []
    for layer, is_last in (
        (one.layer_input, False),
        (one.layers_hidden[0], False),
        (one.layer_output, True),
    ):
        takes_tokens = layer is one.layer_input
        seconds = _seconds(
            layer, _signal(model, place, samples, dtype, takes_tokens), samples, is_last
        )
        own.append(sum(seconds.values()))
    everyone = comm.world().all_gather_object(own)
    first, hidden, last = map(float, np.mean(everyone, axis=0))
    return first, hidden, last


def stage(
    model: GPTConfig,
    placed: DistributedLayeredModel,
    samples: np.ndarray[Any, Any],
    dtype: str,
) -> list[Mapping[str, float]]:
    """Return the seconds of a forward and of a backward of each stage.

    Without any messages, all stages at the same time. Gradients are left in the
    parameters. Collective over all ranks.

    Parameters
    ----------
    samples : ndarray of int, shape (rows, seq_len + 1)
        The tokens of a microbatch.
    """
    stages = placed.stages
    mine = next(n for n, stage in enumerate(stages) if stage.place.is_member)
    own = stages[mine]
    seconds = _seconds(
        lambda signal: placed.run(own, signal),
        _signal(model, own.place, samples, dtype, takes_tokens=mine == 0),
        samples,
        is_last=mine == len(stages) - 1,
    )
    found = dict(comm.world().all_gather_object((mine, seconds)))
    return [found[number] for number in range(len(stages))]


def _signal(
    model: GPTConfig,
    place: Place,
    samples: np.ndarray[Any, Any],
    dtype: str,
    takes_tokens: bool,
) -> Tensor:
    """What a layer takes: tokens, or a hidden layer's output that owes a gradient."""
    rows, width = samples[:, :-1], model.d_model
    if takes_tokens:
        return tpm.tensor(rows, place.inner()).with_sharding(dp=tpm.Shard(0))
    values = np.random.default_rng(0).standard_normal((*rows.shape, width))
    split = tpm.tensor(values, place, dtype).with_sharding(dp=tpm.Shard(0))
    return split.detach().require_grad()


def _seconds(
    layer: Callable[[Tensor], Any],
    signal: Tensor,
    samples: np.ndarray[Any, Any],
    is_last: bool,
) -> dict[str, float]:
    """Median seconds of a layer's forward and backward."""
    loss = TokenLoss()
    times: dict[str, list[float]] = {FORWARD: [], BACKWARD: []}
    place = signal.device
    targets = tpm.tensor(samples[:, 1:], place.inner()).with_sharding(dp=tpm.Shard(0))
    seed = None
    for _ in range(_TIMES + 1):
        comm.world().comm.Barrier()
        begin = time.perf_counter()
        output = layer(signal)
        if is_last:
            output, _ = loss(output, targets)
        place.backend.synchronize()
        middle = time.perf_counter()
        if not is_last and seed is None:
            seed = output.detach()
        begin_backward = time.perf_counter()
        backward(output, seed)
        place.backend.synchronize()
        times[FORWARD].append(middle - begin)
        times[BACKWARD].append(time.perf_counter() - begin_backward)
        signal.zero_grad()
    return {kind: float(np.median(found[1:])) for kind, found in times.items()}
