"""Attention round a ring: the gathered result, what travels, and what is skipped."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases.attention import attention
from tparmpi.sharding import Replicate, Shard, chunk

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture
def group():
    return tpm.group(tpm.devices())


def arrays(queries, keys, *, batch=2, heads=3, kv_heads=3, size=4, dtype=float):
    rng = np.random.default_rng([queries, keys])
    q = rng.normal(size=(batch, queries, heads, size))
    k, v = (rng.normal(size=(batch, keys, kv_heads, size)) for _ in range(2))
    return [3 * q.astype(dtype), 3 * k.astype(dtype), v.astype(dtype)]


def run(given, place, placements, **options):
    """The result and the gradients of its weighted sum, as NumPy arrays."""
    tensors = [
        tpm.tensor(a, place.autodiff())
        .with_sharding(placement, allow_empty=True)
        .require_grad()
        for a, placement in zip(given, placements, strict=True)
    ]
    y = tpm.attention(*tensors, **options)
    weight = np.cos(np.arange(y.size)).reshape(y.shape)
    (y * tpm.tensor(weight.astype(given[0].dtype), place)).sum().backward()
    return y, [y.numpy(), *(t.grad.numpy() for t in tensors)]


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (37, 37, {}),
        (37, 50, {}),
        (2, 3, {}),
        (37, 37, {"window": 9}),
        (30, 41, {"causal": False}),
        (50, 7, {"causal": False}),
        (3, 40, {"window": 2, "causal": False, "scale": 0.3}),
    ],
)
def test_the_ring_gives_what_gathered_keys_give(group, queries, keys, options):
    given = arrays(queries, keys)
    _, serial = run(given, tpm.device(), [Replicate()] * 3, **options)
    split, gathered = run(given, group, [Shard(1), *[Replicate()] * 2], **options)
    around, ring = run(given, group, [Shard(1)] * 3, ring=True, **options)
    assert split.sharding == around.sharding == Shard(1)
    np.testing.assert_allclose(serial[0], attention(*given, **options), atol=1e-12)
    for number, expected in enumerate(serial):
        scale = np.abs(expected).max()
        for found in (gathered[number], ring[number]):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * scale)


def test_a_ring_of_one_and_of_groups_on_a_mesh():
    mesh = tpm.mesh(sp=2, tp=2)
    given = arrays(9, 9, heads=4, kv_heads=2)
    _, serial = run(given, tpm.device(), [Replicate()] * 3)
    _, found = run(given, mesh, [(Shard(1), Shard(2))] * 3, ring=True)
    for one, expected in zip(found, serial, strict=True):
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-12)
    alone = tpm.group([tpm.device()])
    _, found = run(given, alone, [Shard(1)] * 3, ring=True)
    for one, expected in zip(found, serial, strict=True):
        np.testing.assert_array_equal(one, expected)


def bytes_of(length: int, members: int, owner: int) -> int:
    """Bytes of the keys and values that `owner` has of those of `arrays`."""
    return 2 * 2 * chunk(length, members, owner)[1] * 3 * 4 * 8


@pytest.mark.parametrize(
    ("options", "reach"),
    [
        ({"causal": False}, [3, 3, 3, 3]),
        ({}, [3, 2, 1, 0]),
        ({"window": 6}, [1, 1, 1, 0]),
        ({"window": 1}, [0, 0, 0, 0]),
    ],
)
def test_a_block_travels_only_as_far_as_it_is_seen(group, options, reach):
    """Forward: the blocks, once a hop. Backward: the same, and as many gradients."""
    length, rank, members = 22, group.rank, group.size
    given = arrays(length, length)
    tensors = [
        tpm.tensor(a, group.autodiff()).with_sharding(Shard(1)).require_grad()
        for a in given
    ]
    with tpm.ledger() as forward:
        y = tpm.attention(*tensors, ring=True, **options)
    loss = y.sum()
    with tpm.ledger() as backward:
        loss.backward()
    sent = received = grown = 0
    for hop in range(members):
        owner = (rank - hop) % members
        if hop < reach[owner]:
            sent += bytes_of(length, members, owner)
        if 1 <= hop <= reach[owner]:
            received += 1
            grown += bytes_of(length, members, owner)
    assert forward.bytes("send", operator="attention") == sent == forward.bytes()
    assert forward.count("recv") == 2 * received
    assert forward.count() == forward.count("send") + forward.count("recv")
    assert backward.bytes("send") == sent + grown == backward.bytes()


def test_blocks_that_are_not_seen_are_not_computed(group, monkeypatch):
    given = arrays(22, 22)
    tensors = [tpm.tensor(a, group).with_sharding(Shard(1)) for a in given]
    calls = []
    kernel = group.backend.attention
    monkeypatch.setattr(
        group.backend, "attention", lambda *a: calls.append(a) or kernel(*a)
    )
    tpm.attention(*tensors, ring=True)
    assert len(calls) == group.rank + 1
    calls.clear()
    tpm.attention(*tensors, ring=True, causal=False)
    assert len(calls) == group.size


def test_no_member_holds_all_keys(group, monkeypatch):
    """When a block is computed with, of those before it only the own one is left."""
    given = arrays(22, 22)
    tensors = [tpm.tensor(a, group).with_sharding(Shard(1)) for a in given]
    kernel = group.backend.attention
    met: list[weakref.ref] = []
    held = []

    def watched(q, k, v, *rest):
        met.extend((weakref.ref(k), weakref.ref(v)))
        alive = (block() for block in met)
        held.append([block.shape[1] for block in alive if block is not None])
        return kernel(q, k, v, *rest)

    monkeypatch.setattr(group.backend, "attention", watched)
    tpm.attention(*tensors, ring=True, causal=False)
    lengths = [chunk(22, 4, (group.rank - hop) % 4)[1] for hop in range(4)]
    expected = [[lengths[0]] * 2 + [n] * 2 for n in lengths[1:]]
    assert held == [[lengths[0]] * 2, *expected]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)]
)
def test_narrow_dtypes_travel_as_they_are(group, dtype, tolerance):
    given = [a.astype(tpm.backend.dtypes.dtype(dtype)) for a in arrays(22, 22)]
    tensors = [
        tpm.tensor(a, group.autodiff()).with_sharding(Shard(1)).require_grad()
        for a in given
    ]
    with tpm.ledger() as ledger:
        y = tpm.attention(*tensors, ring=True)
    size = given[0].dtype.itemsize
    reach = [3, 2, 1, 0]
    owners = [(group.rank - hop) % 4 for hop in range(4)]
    assert ledger.bytes() * 8 == size * sum(
        bytes_of(22, 4, owner) for hop, owner in enumerate(owners) if hop < reach[owner]
    )
    assert y.dtype == given[0].dtype
    expected = attention(*(a.astype(float) for a in given))
    np.testing.assert_allclose(y.numpy().astype(float), expected, atol=tolerance)
    y.cast(float).sum().backward()
    assert tensors[1].grad.dtype == given[0].dtype
