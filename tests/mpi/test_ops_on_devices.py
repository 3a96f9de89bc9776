"""Operators of networks on groups of devices, whose arrays are not NumPy's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tparmpi as tpm
from tests import ways
from tests.cases import Case, attention, contraction, network
from tests.ways import Way
from tparmpi.sharding import Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

# Products and exponentials of another order of summation.
TOLERANCE = 1e-12

CASES = (*attention.CASES, *contraction.CASES, *network.CASES)


@pytest.fixture(params=[name for name in ways.NAMES if name != "host"])
def way(request, monkeypatch) -> Iterator[Way]:
    made = Way(request.param, monkeypatch)
    yield made
    made.check()
    made.close()


def on_device(case: Case, place, way, dim):
    """The results, with every operand split along `dim` where it may be."""
    tensors = []
    for number, array in enumerate(case.arrays):
        tensor = tpm.tensor(way.put(array), place)
        if array.ndim > dim and dim not in case.whole.get(number, ()):
            tensor = tensor.with_sharding(Shard(dim), allow_empty=True)
        tensors.append(tensor)
    return case.apply(*tensors)


@pytest.mark.filterwarnings("ignore::tparmpi.ImplicitGatherWarning")
def test_operators_on_devices(way):
    trio = way.group([2, 0, 1])
    if not trio.is_member:
        return
    for case in CASES:
        for dim in (0, 1):
            results = on_device(case, trio.autodiff(), way, dim)
            expected = case.reference(*case.arrays)
            if not isinstance(results, tuple):
                results, expected = (results,), (expected,)
            for found, wanted in zip(results, expected, strict=True):
                assert np.allclose(found.numpy(), wanted, rtol=0, atol=TOLERANCE)


def test_a_ring_and_its_gradients(way):
    trio = way.group([2, 0, 1])
    if not trio.is_member:
        return
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(2, 10, 3, 4)) for _ in range(3)]
    place = trio.autodiff()
    found = []
    for ring in (True, False):
        tensors = [
            tpm.tensor(way.put(a), place).with_sharding(Shard(1)).require_grad()
            for a in given
        ]
        q, k, v = tensors
        if not ring:
            k, v = (x.with_sharding(Replicate()) for x in (k, v))
        y = tpm.attention(q, k, v, ring=ring)
        (y * y).sum().backward()
        found.append([y.numpy(), *(t.grad.numpy() for t in tensors)])
    for one, other in zip(*found, strict=True):
        assert np.allclose(one, other, rtol=0, atol=TOLERANCE)
    expected = attention.attention(*given)
    assert np.allclose(found[0][0], expected, rtol=0, atol=TOLERANCE)
