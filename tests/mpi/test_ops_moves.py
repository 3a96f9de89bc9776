"""What operators that shift indices along a split dim send: what changes its owner."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases.case import values
from tparmpi.sharding import Shard, chunk_sizes
from tparmpi.testing import laid_out

pytestmark = pytest.mark.mpi(min_size=4)

ROWS, WIDTH, ITEM = 11, 3, 8


@pytest.fixture(params=[2, 3, 4])
def group(request):
    return tpm.group(tpm.devices()[: request.param])


def owners(length: int, members: int) -> np.ndarray:
    """The member that holds each index."""
    return np.repeat(np.arange(members), chunk_sizes(length, members))


def changed(members: int, pairs) -> int:
    """How many rows another member holds afterwards.

    Each pair: the numbers of an operand's rows, for each row of an output (-1: none).
    """
    count = 0
    for length, sources in pairs:
        before = owners(length, members)
        after = owners(len(sources), members)
        came = np.asarray(sources) >= 0
        count += int((before[sources] != after)[came].sum())
    return count


def joined(*lengths):
    """Pairs of a join: for each operand its rows and where they come to stand."""
    stops = np.cumsum(lengths)
    pairs = []
    for length, stop in zip(lengths, stops, strict=True):
        sources = np.full(stops[-1], -1)
        sources[stop - length : stop] = np.arange(length)
        pairs.append((length, sources))
    return pairs


ALL = np.arange(ROWS)
CASES = {
    "slice": (lambda x: x[2:-1], [(ROWS, ALL[2:-1])]),
    "strided": (lambda x: x[1::3], [(ROWS, ALL[1::3])]),
    "flip": (lambda x: x.flip(0), [(ROWS, ALL[::-1])]),
    "roll": (lambda x: x.roll(4), [(ROWS, np.roll(ALL, 4))]),
    "pad": (lambda x: x.pad(((3, 1), (0, 0))), [(ROWS, np.r_[[-1] * 3, ALL, -1])]),
    "concat": (lambda x: tpm.concat([x, x]), joined(ROWS, ROWS)),
    "split": (
        lambda x: tpm.add(*x.split((5, 5, 1))[:2]),
        [(ROWS, ALL[:5]), (ROWS, ALL[5:10]), (ROWS, ALL[10:])],
    ),
    "nothing": (lambda x: x[0:0], []),
    "all in place": (lambda x: x[:, 1:] * 2.0, []),
}


@pytest.mark.parametrize("name", CASES)
def test_only_rows_that_change_their_owner_are_sent(group, name):
    """Forward, and backward what has a gradient."""
    if not group.is_member:
        return
    apply, pairs = CASES[name]
    x = laid_out(values(ROWS, WIDTH), group.autodiff(), (Shard(0),)).require_grad()
    with tpm.ledger() as forward, tpm.no_implicit_gather():
        y = apply(x)
    expected = changed(group.size, pairs) * WIDTH * ITEM
    sent = group.all_reduce(np.array(forward.bytes()))
    assert sent == expected
    assert forward.count() == forward.count("send") + forward.count("recv")
    assert forward.count() <= 2 * (group.size - 1)
    loss = y.sum()
    with tpm.ledger() as backward:
        loss.backward()
    back = group.all_reduce(np.array(backward.bytes()))
    assert back == expected
    assert x.grad.sharding == Shard(0)


def test_no_gradient_is_sent_to_an_operand_that_wants_none(group):
    if not group.is_member:
        return
    place = group.autodiff()
    x = laid_out(values(ROWS, WIDTH), place, (Shard(0),)).require_grad()
    fixed = laid_out(values(ROWS, WIDTH, seed=1), place, (Shard(0),))
    loss = tpm.concat([fixed, x]).sum()
    with tpm.ledger() as ledger:
        loss.backward()
    sent = group.all_reduce(np.array(ledger.bytes()))
    assert sent == changed(group.size, joined(ROWS, ROWS)[1:]) * WIDTH * ITEM
    np.testing.assert_array_equal(x.grad.numpy(), np.ones((ROWS, WIDTH)))


def test_a_row_is_a_pending_sum_and_nothing_is_sent(group):
    if not group.is_member:
        return
    x = laid_out(values(ROWS, WIDTH), group.autodiff(), (Shard(0),)).require_grad()
    ids = tpm.tensor(np.array([3, 3, -1]), group)
    with tpm.ledger() as ledger, tpm.no_implicit_gather():
        results = x[7], x[ids], x.gather(ids.expand_dims(1)), x[0, 1]
        assert all(y.sharding == tpm.Partial() for y in results)
        added = x.scatter_add(ids.expand_dims(1).expand((3, WIDTH)), results[1])
    assert ledger.count("all_reduce") == ledger.count() == 1  # the pending values
    assert added.sharding == Shard(0)
    np.testing.assert_array_equal(results[0].numpy(), values(ROWS, WIDTH)[7])


def test_repeat_fetches_what_it_repeats(group):
    """Each member needs at most a row more than it makes whole ones of."""
    if not group.is_member:
        return
    x = laid_out(values(ROWS, WIDTH), group.autodiff(), (Shard(0),)).require_grad()
    with tpm.ledger() as ledger, tpm.no_implicit_gather():
        y = x.repeat(3)
    sent = group.all_reduce(np.array(ledger.bytes())) // (WIDTH * ITEM)
    before = owners(ROWS, group.size)
    after = owners(3 * ROWS, group.size)
    needed = {(row, after[3 * row + i]) for row in range(ROWS) for i in range(3)}
    assert sent == sum(before[row] != member for row, member in needed)
    np.testing.assert_array_equal(y.numpy(), np.repeat(values(ROWS, WIDTH), 3, 0))


def test_topk_sends_k_of_each_member(group):
    if not group.is_member:
        return
    k = 2
    x = laid_out(values(ROWS, WIDTH), group.autodiff(), (Shard(0),)).require_grad()
    with tpm.ledger() as ledger, tpm.no_implicit_gather():
        largest, indices = x.topk(k, 0)
    assert ledger.bytes() == (group.size - 1) * 2 * k * WIDTH * ITEM
    with tpm.ledger() as ledger:
        largest.sum().backward()
    assert ledger.count() == 0
    assert x.grad.sharding == Shard(0)
    order = np.argsort(-values(ROWS, WIDTH), 0)[:k]
    np.testing.assert_array_equal(indices.numpy(), order)


def test_a_reshape_that_keeps_no_dim_exchanges_rows(group):
    if not group.is_member:
        return
    x = laid_out(values(ROWS, WIDTH), group.autodiff(), (Shard(0),)).require_grad()
    with tpm.ledger() as ledger, tpm.no_implicit_gather():
        y = x.reshape((WIDTH, ROWS))
        flat = x.reshape((-1,))
    assert y.sharding == flat.sharding == Shard(0)
    before = np.repeat(owners(ROWS, group.size), WIDTH)
    sent = group.all_reduce(np.array(ledger.bytes()))
    expected = (before != np.repeat(owners(WIDTH, group.size), ROWS)).sum()
    expected += (before != owners(ROWS * WIDTH, group.size)).sum()
    assert sent == expected * ITEM


def test_two_dims_are_moved_over_two_axes():
    mesh = tpm.mesh(a=2, b=2)
    x = laid_out(values(5, 7), mesh, (Shard(0), Shard(1)))
    with tpm.ledger() as ledger, tpm.no_implicit_gather():
        y = x[1:, ::-2]
    np.testing.assert_array_equal(y.numpy(), values(5, 7)[1:, ::-2])
    assert y.layout == (Shard(0), Shard(1))
    assert {record.axis for record in ledger.records} <= {"a", "b"}


def test_a_bad_index_is_refused_on_all_ranks_alike(group):
    if not group.is_member:
        return
    x = laid_out(values(ROWS, WIDTH), group, (Shard(0),))
    ids = tpm.tensor(np.array([3, 11]), group)
    for call in (lambda: x[ids], lambda: x[11], lambda: ids.one_hot(11)):
        with pytest.raises(tpm.TparmpiError, match=r"the (index|id) 11 is outside"):
            call()
