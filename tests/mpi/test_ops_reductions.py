"""Reductions over split dims: what travels, and that members' parts meet rightly."""

from __future__ import annotations

from math import inf

import ml_dtypes
import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.sharding import Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# What members exchange for each element of the result: call, how many numbers, dtype
# (of a float64 operand), in the forward and in the backward.
OWN = ("all_reduce", 1, "f8")
TIES = ("all_reduce", 1, "i8")
WHERE = ("all_reduce", 1, "i8")
TRUTH = ("all_reduce", 1, "?")
ONE = ("all_gather", 1, "f8")
MOMENTS = ("all_gather", 2, "f8")
STATISTICS = {
    "sum": ([], []),
    "mean": ([], []),
    "max": ([OWN], [TIES]),
    "min": ([OWN], [TIES]),
    "argmax": ([OWN, WHERE], None),
    "argmin": ([OWN, WHERE], None),
    "any": ([TRUTH], None),
    "all": ([TRUTH], None),
    "prod": ([ONE], []),
    "var": ([MOMENTS], []),
    "std": ([MOMENTS], []),
    "logsumexp": ([OWN, OWN], []),
    "norm": ([ONE], []),
    "norm 1": ([OWN], []),
    "norm inf": ([OWN], [TIES]),
    "cumsum": ([ONE], [ONE]),
}


@pytest.fixture
def group():
    return tpm.group(tpm.devices())


def values(*shape: int) -> np.ndarray:
    return np.sin(np.arange(1.0, np.prod(shape) + 1) * 1.7).reshape(shape)


def apply(name: str, x, dim):
    name, _, order = name.partition(" ")
    keywords = {"ord": float(order)} if order else {}
    return getattr(x, name)(dim, **keywords)


def split(array, place, dim: int = 0):
    return tpm.tensor(array, place).with_sharding(Shard(dim), allow_empty=True)


def traffic(ledger) -> list[tuple[str, int]]:
    return [(record.kind, record.bytes) for record in ledger.records]


def expected_traffic(group, statistics, size: int) -> list[tuple[str, int]]:
    with tpm.ledger() as ledger:
        for kind, count, dtype in statistics:
            array = np.zeros(size * count, dtype)
            if kind == "all_reduce":
                group.all_reduce(array, "max")
            else:
                group.all_gather(array)
    return traffic(ledger)


@pytest.mark.parametrize("name", STATISTICS)
def test_only_statistics_travel(name, group):
    """However long the split dim, and nothing where the reduced one is whole."""
    forward, backward = STATISTICS[name]
    for length in (9, 90):
        x = split(values(length, 8), group.autodiff()).require_grad()
        with tpm.ledger() as ledger:
            y = apply(name, x, 0)
        assert traffic(ledger) == expected_traffic(group, forward, 8)
        if backward is not None:
            with tpm.ledger() as ledger:
                y.backward()
            assert traffic(ledger) == expected_traffic(group, backward, 8)
            assert x.grad.sharding == Shard(0)
        with tpm.ledger() as ledger:
            y = apply(name, x, 1)
            if backward is not None:
                y.backward()
        assert ledger.count() == 0
        assert y.sharding == Shard(0)


@pytest.mark.parametrize("name", sorted(set(STATISTICS) - {"sum", "mean", "cumsum"}))
@pytest.mark.parametrize("kind", ["f8", "f4", "f2", BFLOAT16], ids=str)
def test_the_same_bits_on_every_member(name, kind, group):
    x = split(values(11, 5).astype(kind), group)
    y = apply(name, x, 0)
    assert y.sharding == Replicate()
    found = group.all_gather(y.local[None])
    assert len({row.tobytes() for row in found}) == 1


@pytest.mark.parametrize("kind", ["f2", BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "name", ["max", "argmax", "prod", "var", "std", "logsumexp", "norm", "cumsum"]
)
def test_halves_are_combined_in_float32(name, kind, group):
    """Members' parts are not rounded before they meet."""
    array = (1 + values(12, 50) / 4).astype(kind)
    found = apply(name, split(array, group), 0)
    wide = apply(name, split(array.astype("f4"), group), 0)
    assert found.dtype == (np.int64 if name == "argmax" else kind)
    np.testing.assert_array_equal(found.numpy(), wide.numpy().astype(found.dtype))


def test_ties_on_several_members(group):
    """They share the gradient; the first of them is where the extreme is."""
    array = np.zeros((6, 3))
    array[[1, 2, 5], 1] = 4
    array[4, 2] = 4
    for operator, sign in (("max", 1), ("min", -1)):
        x = split(sign * array, group.autodiff()).require_grad()
        apply(operator, x, 0).backward()
        extreme = array == array.max(0)
        np.testing.assert_array_equal(x.grad.numpy(), extreme / extreme.sum(0))
        where = apply(f"arg{operator}", x, 0)
        assert where.numpy().tolist() == [0, 1, 4]
        assert apply(f"arg{operator}", x, None).item() == 4
        for dim in (0, 1):
            flat = apply(f"arg{operator}", split(sign * array.T, group, dim), None)
            assert flat.item() == 7


@pytest.mark.parametrize("row", range(5))
def test_not_a_number_on_any_member(row, group):
    array = values(5, 3)
    array[row, 1] = array[4, 1] = np.nan
    x = split(array, group)
    for name in ("max", "min", "prod", "var", "logsumexp", "norm", "norm inf"):
        found = apply(name, x, 0).numpy()
        assert np.isnan(found).tolist() == [False, True, False], name
    assert apply("argmax", x, 0).numpy()[1] == row
    assert apply("argmin", x, 0).numpy()[1] == row


def test_infinities_on_any_member(group):
    array = np.full((5, 2), -inf)
    array[3, 1] = 2
    x = split(array, group.autodiff()).require_grad()
    y = x.logsumexp(0)
    assert y.numpy().tolist() == [-inf, 2]
    y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), array == 2)
    assert split(-array, group).logsumexp(0).numpy().tolist() == [inf, inf]
    assert x.max(0).numpy().tolist() == [-inf, 2]
    assert x.argmax(0).numpy().tolist() == [0, 3]


def test_more_members_than_elements(group):
    """Pieces that are empty have no say."""
    array = np.array([[3.0, -5.0], [4.0, -12.0]])
    x = split(array, group)
    assert x.max(0).numpy().tolist() == [4, -5]
    assert x.min(0).numpy().tolist() == [3, -12]
    assert x.argmax(0).numpy().tolist() == [1, 0]
    assert x.prod(0).numpy().tolist() == [12, 60]
    assert x.var(0).numpy().tolist() == [0.25, 12.25]
    assert x.norm(0).numpy().tolist() == [5, 13]
    assert x.all(0).numpy().tolist() == [True, True]
    whole = tpm.tensor(np.array([[-128, 127]], np.int8), group).with_sharding(
        Shard(0), allow_empty=True
    )
    for dim in (0, None):
        assert whole.argmax(dim).numpy().max() <= 1
    assert whole.max(0).numpy().tolist() == [-128, 127]
    assert whole.argmax(0).numpy().tolist() == [0, 0]
    assert whole.argmin(0).numpy().tolist() == [0, 0]


def test_nothing_split_over_members(group):
    x = split(np.zeros((0, 2)), group)
    assert x.sum(0).numpy().tolist() == [0, 0]
    assert x.prod(0).numpy().tolist() == [1, 1]
    assert x.any(0).numpy().tolist() == [False, False]
    assert x.all(0).numpy().tolist() == [True, True]
    assert x.norm(0).numpy().tolist() == [0, 0]
    assert x.logsumexp(0).numpy().tolist() == [-inf, -inf]
    assert x.cumsum(0).shape == (0, 2)
    for name in ("max", "argmin", "var", "mean"):
        with pytest.raises(tpm.ShapeError, match="at least one is needed"):
            apply(name, x, 0)


def test_variance_far_from_zero_and_on_uneven_pieces(group):
    array = 1e8 + np.arange(10.0)
    for parts in (2, 3, 4):
        place = tpm.group(tpm.devices()[:parts])
        if place.is_member:
            found = split(array, place).var().item()
            np.testing.assert_allclose(found, 8.25, rtol=1e-12)


def test_members_norms_do_not_overflow(group):
    for scale in (1e-300, 1e300):
        found = split(np.array([2.0, 4.0, 5.0, 6.0]) * scale, group).norm().item()
        np.testing.assert_allclose(found, 9 * scale, rtol=1e-15)
