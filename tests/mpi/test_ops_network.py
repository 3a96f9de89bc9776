"""What operators of networks send where their dims are split: a few numbers a row."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases.case import values
from tparmpi.sharding import Partial, Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

ROWS, WIDTH = 6, 64


@pytest.fixture
def group():
    return tpm.group(tpm.devices())


def laid(array, group, sharding):
    tensor = tpm.tensor(array, group.autodiff()).with_sharding(sharding)
    return tensor.require_grad() if array.dtype.kind == "f" else tensor


def sent(function) -> dict[str, int]:
    """The calls by kind, and the largest number of elements in any of them."""
    with tpm.no_implicit_gather(), tpm.ledger() as ledger:
        function()
    kinds = {record.kind: ledger.count(record.kind) for record in ledger.records}
    largest = max((record.bytes // 8 for record in ledger.records), default=0)
    # Of an all_reduce each member sends some 2 (n - 1) / n times its elements.
    return {**kinds, "elements": largest}


@pytest.mark.parametrize(
    ("apply", "forward", "backward"),
    [
        (tpm.softmax, {"all_reduce": 2}, {"all_reduce": 1}),
        (tpm.log_softmax, {"all_reduce": 2}, {"all_reduce": 1}),
        (tpm.layer_norm, {"all_gather": 1}, {"all_reduce": 1}),
        (tpm.rms_norm, {"all_reduce": 1}, {"all_reduce": 1}),
    ],
)
def test_rows_that_are_split_exchange_statistics(group, apply, forward, backward):
    x = laid(values(ROWS, WIDTH), group, Shard(1))
    results = []
    found = sent(lambda: results.append(apply(x)))
    assert found.pop("elements") <= 6 * ROWS
    assert found == forward
    assert results[0].sharding == Shard(1)
    loss = (results[0] * 2.0).sum()
    found = sent(loss.backward)
    assert found.pop("elements") <= 4 * ROWS
    assert found == backward


def test_gains_of_split_rows_stay_with_their_columns(group):
    x = laid(values(ROWS, WIDTH), group, Shard(1))
    gain, bias = (laid(values(WIDTH, seed=i), group, Shard(0)) for i in (1, 2))
    tpm.layer_norm(x, gain, bias).sum().backward()
    assert gain.grad.sharding == bias.grad.sharding == Shard(0)


def test_channels_split_in_whole_groups_send_nothing(group):
    x = laid(values(2, 8, 5), group, Shard(1))
    gain = laid(values(8, seed=1), group, Shard(0))
    results = []
    assert sent(lambda: results.append(tpm.group_norm(x, 4, gain))) == {"elements": 0}
    loss = results[0].sum()
    assert sent(loss.backward) == {"elements": 0}
    assert gain.grad.sharding == Shard(0)
    with pytest.raises(tpm.ShardingError), tpm.no_implicit_gather():
        tpm.group_norm(x, 2, gain)


def test_split_positions_of_groups_exchange_statistics(group):
    x = laid(values(2, 8, 50), group, Shard(2))
    found = sent(lambda: tpm.group_norm(x, 4))
    assert found.pop("elements") <= 6 * 2 * 4
    assert found == {"all_gather": 1}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rotary_sends_nothing_on_any_layout(group, dim):
    x = laid(values(4, 5, 6, 4), group, Shard(dim))
    positions = laid(np.arange(20).reshape(4, 5), group, Replicate())
    results = []
    for given in ((x,), (x, positions)):
        found = sent(lambda given=given: results.append(tpm.rotary(*given)))
        assert found == {"elements": 0}
    assert [y.sharding for y in results] == [Shard(dim)] * 2
    pending = (x * 2.0).sum(dim)
    if dim == 2:
        assert tpm.rotary(pending).sharding == Partial()


def test_gates_send_nothing(group):
    gate, up = (laid(values(3, 8, seed=i), group, Shard(1)) for i in (0, 1))
    for unit in (tpm.swiglu, tpm.geglu):
        found = sent(lambda unit=unit: unit(gate, up).sum().backward())
        assert found == {"elements": 0}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [({}, 2), ({"ignore_index": 3}, 2), ({"label_smoothing": 0.1}, 3)],
)
def test_a_split_vocabulary_exchanges_numbers_of_positions(group, options, numbers):
    logits = laid(values(ROWS, WIDTH), group, Shard(1))
    targets = laid(np.arange(ROWS), group, Replicate())
    results = []
    found = sent(lambda: results.append(tpm.cross_entropy(logits, targets, **options)))
    assert found.pop("elements") <= 2 * numbers * ROWS
    assert found == {"all_reduce": 2}
    loss = results[0].sum()
    assert sent(loss.backward) == {"elements": 0}


def test_weights_are_of_all_members_and_pending(group):
    """The mean over uneven pieces divides by the global count."""
    targets = np.array([3, -1, 0, 2, -1, -1, 1])
    logits = laid(values(7, 5), group, Shard(0))
    ids = laid(targets, group, Shard(0))
    results = []
    found = sent(
        lambda: results.extend(tpm.cross_entropy_sum(logits, ids, ignore_index=-1))
    )
    assert found == {"elements": 0}
    total, weight = results
    assert total.sharding == weight.sharding == Partial()
    expected = tpm.cross_entropy(
        tpm.tensor(values(7, 5)[targets >= 0], tpm.device()),
        tpm.tensor(targets[targets >= 0], tpm.device()),
    ).numpy()
    assert weight.item() == 4
    assert total.item() / weight.item() == pytest.approx(expected.mean(), rel=1e-12)
    for sums in (tpm.mse_sum, tpm.bce_sum):
        assert sums(logits, logits)[1].item() == 35
