"""What a layout cannot do is said with the operand, its name and the remedy."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi import nn
from tparmpi.sharding import Partial, Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)


class Weights(nn.Module):
    """Parameters whose layouts the tests choose."""

    def __init__(self, place, **layouts):
        for name, sharding in layouts.items():
            parameter = nn.Parameter((8, 8), place, sharding, dtype="float64")
            setattr(self, name, parameter)


def refused(call, *tensors) -> str:
    """The message that all ranks get alike; nothing was sent, nothing changed."""
    before = [tensor.layout for tensor in tensors]
    with tpm.ledger() as ledger, pytest.raises(tpm.ShardingError) as caught:
        call()
    text = str(caught.value)
    assert ledger.count() == 0
    assert [tensor.layout for tensor in tensors] == before
    assert set(tpm.world().all_gather_object(text)) == {text}
    return text


@pytest.fixture(scope="module")
def mesh():
    return tpm.mesh(dp=2, tp=2)


@pytest.fixture(scope="module")
def group():
    return tpm.group(tpm.devices())


def ones(place, *shape, **by_axis):
    tensor = tpm.tensor(np.ones(shape), place)
    return tensor.with_sharding(**by_axis) if by_axis else tensor


def test_a_parameter_that_would_be_gathered_is_named(mesh):
    weights = Weights(mesh, w=(Replicate(), Shard(1)), v=(Replicate(), Shard(0)))
    weights.initialize(0)
    text = refused(lambda: weights.w.sort(1), weights.w)
    assert text.startswith("sort: operand 0, parameter 'w' of shape (8, 8), is ")
    assert "Shard(1) on axis 'tp' but needed as Replicate() there" in text
    assert text.endswith("call .with_sharding(tp=Replicate()) on it")
    whole = weights.w.with_sharding(tp=Replicate())
    assert whole.sort(1) is not None


def test_the_parameter_to_blame_is_not_the_first_that_is_split(mesh):
    """`w` fits as it is; the second operand does not."""
    weights = Weights(mesh, w=(Replicate(), Shard(0)), v=(Replicate(), Shard(1)))
    weights.initialize(0)
    text = refused(lambda: weights.w + weights.v, weights.w, weights.v)
    assert re.match(r"add: operand [01], parameter '[wv]' of shape", text)
    found = re.search(r"'([wv])'.* call .with_sharding\(tp=Shard\((.)\)\)", text)
    name, dim = found.group(1, 2)
    operands = {"w": weights.w, "v": weights.v}
    operands[name] = operands[name].with_sharding(tp=Shard(int(dim)))
    assert (operands["w"] + operands["v"]).shape == (8, 8)


def test_two_axes_are_named_where_both_must_change(mesh):
    weights = Weights(mesh, w=(Shard(1), Shard(1))).initialize(0)
    text = refused(lambda: weights.w.sort(1), weights.w)
    assert "Shard(1) on axis 'dp' but needed as Replicate() there and Shard(1)" in text
    assert ".with_sharding(dp=Replicate(), tp=Replicate())" in text


def test_a_parameter_without_a_name_is_told_by_its_shape(group):
    weight = nn.Parameter((8, 8), group, Shard(1), dtype="float64")
    weight.initialize(0, "")
    text = refused(lambda: weight.sort(1), weight)
    assert "operand 0, parameter of shape (8, 8), is Shard(1)" in text
    assert text.endswith("call .with_sharding(Replicate()) on it")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: x + x.with_sharding(tp=Shard(1)).with_sharding(dp=Shard(1)),
            r"add: operand [01], of shape \(8, 8\), is dp=.*, tp=.* but must become",
        ),
        (
            lambda x: x.sort(0),
            r"sort: operand 0, .* is dp=Replicate\(\), tp=Shard\(0\) but must become "
            r"dp=Replicate\(\), tp=Replicate\(\); call "
            r"\.with_sharding\(tp=Replicate\(\)\) on it",
        ),
        (
            lambda x: x.with_sharding(tp=Shard(1)).reshape((4, 16)),
            r"reshape: operand 0, .* call \.with_sharding\(tp=Replicate\(\)\) on it",
        ),
    ],
)
def test_an_implicit_gather_says_which_operand_and_the_call(mesh, call, words):
    x = ones(mesh, 8, 8, tp=Shard(0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(x)
    # The first member says it for all.
    assert len(seen) == (tpm.world().rank == 0)
    with tpm.no_implicit_gather(), pytest.raises(tpm.ShardingError) as caught:
        call(x)
    assert re.match(words, str(caught.value))
    assert all(str(warning.message) == str(caught.value) for warning in seen)


def test_the_remedy_of_an_implicit_gather_works(group):
    x = ones(group, 8, 8).with_sharding(Shard(1))
    with tpm.no_implicit_gather():
        text = refused(lambda: x.sort(1), x)
        assert text.endswith(
            "is Shard(1) but must become Replicate(); call .with_sharding(Replicate()) "
            "on it where you mean to gather"
        )
        assert x.with_sharding(Replicate()).sort(1) is not None


def test_a_pending_sum_cannot_be_asked_for(mesh):
    weights = Weights(mesh, w=(Replicate(), Shard(1))).initialize(0)
    text = refused(lambda: weights.w.with_sharding(tp=Partial()), weights.w)
    assert "tp=Shard(1) cannot become dp=Replicate(), tp=Partial()" in text
    assert "ask for Replicate() or Shard(dim)" in text
    with pytest.raises(tpm.ShardingError, match="a parameter cannot be Partial; use"):
        nn.Parameter((4,), mesh, tp=Partial())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"tq": Shard(0)}, "there is no axis 'tq'; the axes are dp, tp"),
        ({"tp": Shard(2)}, "Shard(2) names no dim of a tensor of 2 dims"),
        ({"tp": Shard(-3)}, "Shard(-3) names no dim of a tensor of 2 dims"),
        ({"tp": "rows"}, "'rows' is no sharding; use Replicate() or Shard(dim)"),
    ],
)
def test_an_unknown_axis_or_dim_is_told_with_those_there_are(mesh, how, words):
    weights = Weights(mesh, w=None).initialize(0)
    text = refused(lambda: weights.w.with_sharding(**how), weights.w)
    assert text == f"with_sharding of 'w': {words}"
    text = refused(lambda: ones(mesh, 3, 4).with_sharding(**how))
    assert text == f"with_sharding: {words}"


def test_too_many_shardings_for_the_axes(mesh):
    weights = Weights(mesh, w=None).initialize(0)
    text = refused(lambda: weights.w.with_sharding(Shard(0)), weights.w)
    assert text == (
        "with_sharding of 'w': 1 shardings for 2 axes (dp, tp); name the axis: "
        "with_sharding(tp=Shard(0))"
    )


def test_operands_on_different_places(mesh, group):
    weights = Weights(mesh, w=None).initialize(0)
    text = refused(lambda: ones(group, 8, 8) @ weights.w, weights.w)
    assert re.match(r"einsum: operand 0 lives on .*, operand 1 \('w'\) on .*mesh", text)
    assert "make all operands on one and the same place" in text
    assert text.endswith("or move one with .to(place)")


def test_a_member_that_would_be_left_empty(mesh, group):
    text = refused(lambda: ones(group, 3, 8).with_sharding(Shard(0)))
    assert text == (
        "with_sharding: dim 0 of size 3 over 4 members of axis 'group' would leave a "
        "member empty; pass allow_empty=True to permit it"
    )
    x = ones(mesh, 3, 8).with_sharding(dp=Shard(0))
    text = refused(lambda: x.with_sharding(tp=Shard(0)), x)
    assert "dim 0 of size 3 over 2 members of axis 'tp'" in text
    assert x.with_sharding(tp=Shard(0), allow_empty=True).shape == (3, 8)
