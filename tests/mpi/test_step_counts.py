"""What a step of training a GPT communicates along each axis, exactly."""

from __future__ import annotations

import pytest

import tparmpi as tpm
from tparmpi.comm.ledger import Ledger
from tparmpi.models import GPTConfig
from tparmpi.sharding.chunks import chunk
from tparmpi.train.layout import Layout
from tparmpi.train.measure import Job, Steps

LAYERS, ROWS, POSITIONS, WIDTH = 4, 8, 5, 12
CONFIG = GPTConfig(LAYERS, WIDTH, 4, POSITIONS, 30, tied=False)
TOKENS = ROWS * POSITIONS
ITEM = 4


def stepped(layout: Layout, microbatches: int = 1) -> tuple[Steps, Ledger]:
    """Return the work, and the ledger of its third step."""
    work = Steps(Job(CONFIG, ROWS, layout, microbatches), (0.0, 1.0, 0.0))
    for _ in range(2):
        work.step()
    with tpm.ledger() as ledger:
        work.step()
    return work, ledger


def sent(numbers: int) -> int:
    """Bytes that this rank sends in an all_reduce of so many numbers."""
    n, rank = tpm.world().size, tpm.world().rank
    _, own = chunk(numbers, n, rank)
    return ITEM * (numbers - own + (n - 1) * own)


@pytest.mark.mpi(min_size=1)
def test_tensor_parallel_sums_one_array_a_half_of_each_layer_and_way():
    world = tpm.world()
    _, ledger = stepped(Layout(dp=1, tp=world.size))
    if world.size == 1:
        assert ledger.count() == 0
        return
    # Forward the embedding and both halves of each layer, backward both halves and the
    # output; of the loss the largest logits, and with each row's sum the target's.
    vectors, loss = 2 * (2 * LAYERS + 1), 2
    assert ledger.count("all_reduce", axis="tp") == vectors + loss
    wanted = vectors * sent(TOKENS * WIDTH) + sent(TOKENS) + sent(2 * TOKENS)
    assert ledger.bytes("all_reduce", axis="tp") == wanted
    # The loss is told to all.
    assert ledger.count() == ledger.count("all_reduce", axis="tp") + 1


@pytest.mark.mpi(min_size=1)
def test_data_parallel_sums_each_gradient_once():
    world = tpm.world()
    work, ledger = stepped(Layout(dp=world.size, tp=1))
    size = sum(parameter.size for parameter in work.parameters)
    if world.size == 1:
        assert ledger.count() == 0
        return
    # All in one bucket, and the loss.
    assert ledger.count("all_reduce", axis="dp") == 2
    loss, bucket = sent(1), sent(size)
    assert ledger.bytes("all_reduce", axis="dp") == bucket + loss


@pytest.mark.mpi(min_size=2)
def test_pipelines_send_each_microbatch_once_each_way():
    world = tpm.world()
    microbatches = 4
    _, ledger = stepped(Layout(dp=1, tp=1, pp=world.size), microbatches)
    ways = (world.rank < world.size - 1) + (world.rank > 0)
    calls = ways * microbatches
    assert ledger.count("send_blocks") == ledger.count("recv_blocks") == calls
    assert ledger.bytes("send_blocks") == ways * ITEM * TOKENS * WIDTH
    # The loss is told to all.
    assert ledger.count() == 2 * calls + 1
