"""Gradients reduced in buckets, their norm, and optimizer steps on 1 to 4 ranks."""

from __future__ import annotations

from math import inf, sqrt

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi import nn
from tparmpi.optim import SGD, AdamW, clip_norm
from tparmpi.parallel import reduce_gradients
from tparmpi.sharding import Partial, Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

MESHES = (
    {"dp": 1, "tp": 1},
    {"dp": 2, "tp": 1},
    {"dp": 3, "tp": 1},
    {"dp": 2, "tp": 2},
)
each_mesh = pytest.mark.parametrize("axes", MESHES, ids=str)

SHAPES = ((5, 7), (3,), (), (4, 2, 3), (9, 5))
LAYOUTS = ({"tp": Shard(1)}, {}, {}, {"tp": Shard(0)}, {})


def mesh(axes: dict[str, int]) -> tpm.Mesh:
    return tpm.mesh(tpm.devices()[: axes["dp"] * axes["tp"]], **axes)


def parameters(place: tpm.Mesh, dtype: str = "float64") -> list[nn.Parameter]:
    """Parameters of several shapes and layouts, with values."""
    made = []
    for number, (shape, by_axis) in enumerate(zip(SHAPES, LAYOUTS, strict=True)):
        parameter = nn.Parameter(shape, place.autodiff(), dtype=dtype, **by_axis)
        parameter.initialize(0, f"p{number}")
        made.append(parameter)
    return made


def gradient(number: int, rank: int) -> np.ndarray:
    """What member `rank` of an axis adds to a whole gradient."""
    shape = SHAPES[number]
    return np.sin(np.arange(np.prod(shape)) + number + 10 * rank).reshape(shape)


def give_gradients(made: list[nn.Parameter], place: tpm.Mesh) -> None:
    """Gradients pending over dp, laid out as their parameter over tp."""
    for number, parameter in enumerate(made):
        whole = gradient(number, place.coordinates[0])
        layout = (Partial(), parameter.layout[1])
        parameter.take_grad(whole[parameter.spec.local_slices].copy(), layout)


@each_mesh
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 22])
def test_buckets_of_any_size_give_the_sums(axes, bucket_bytes):
    place = mesh(axes)
    if not place.is_member:
        return
    made = parameters(place)
    give_gradients(made, place)
    with tpm.ledger() as ledger:
        reduce_gradients(made, bucket_bytes=bucket_bytes)
    for number, parameter in enumerate(made):
        expected = sum(gradient(number, rank) for rank in range(axes["dp"]))
        assert parameter.grad.layout == parameter.layout
        np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=1e-14)
    if axes["dp"] == 1:
        assert ledger.count() == 0
    elif bucket_bytes == 1:
        assert ledger.count() == len(made)
    elif bucket_bytes == 1 << 22:
        assert ledger.count() == ledger.count("all_reduce", "dp") == 1


def test_each_set_of_axes_and_dtype_has_its_bucket():
    place = mesh({"dp": 2, "tp": 2})
    double, single = parameters(place), parameters(place, "float32")
    layouts = (
        (Partial(), Replicate()),
        (Replicate(), Partial()),
        (Partial(), Partial()),
        (Replicate(), Replicate()),
    )
    whole = [p for p in (*double, *single) if p.layout == (Replicate(), Replicate())]
    for number, parameter in enumerate(whole):
        array = np.full(parameter.shape, 1.0 + place.rank, parameter.dtype)
        parameter.take_grad(array, layouts[number % 3])
    with tpm.ledger() as ledger:
        reduce_gradients([*double, *single])
    # Each dtype: one over dp, one over tp, one over both.
    assert ledger.count("all_reduce", "dp") == ledger.count("all_reduce", "tp") == 4
    assert ledger.count() == 8
    rank = place.rank
    for number, parameter in enumerate(whole):
        expected = (2 + 2 * (rank % 2) + 2, 2 + 4 * (rank // 2) + 1, 10)[number % 3]
        np.testing.assert_array_equal(parameter.grad.local, expected)


def test_large_gradients_are_summed_where_they_lie():
    """Also one that is not contiguous; small ones share a bucket around them."""
    place = mesh({"dp": 2, "tp": 2})
    made = [
        nn.Parameter((n, 3), place.autodiff(), dtype="float64") for n in range(1, 6)
    ]
    given = []
    for n, parameter in enumerate(made, 1):
        array = np.arange(3.0 * n).reshape(n, 3) * (1 + place.coordinates[0])
        array = np.asfortranarray(array) if n == 4 else array
        parameter.take_grad(array, (Partial(), Replicate()))
        given.append(array)
    with tpm.ledger() as ledger:
        reduce_gradients(made, bucket_bytes=72)
    # Of 24 and 48 bytes; 72, 96 and 120.
    assert ledger.count() == ledger.count("all_reduce", "dp") == 4
    for n, (parameter, array) in enumerate(zip(made, given, strict=True), 1):
        expected = 3 * np.arange(3.0 * n).reshape(n, 3)
        np.testing.assert_array_equal(parameter.grad.array, expected)
        assert np.shares_memory(parameter.grad.array, array) == (n in (3, 5))


def test_what_needs_no_reduction_stays_in_place():
    place = mesh({"dp": 2, "tp": 2})
    (parameter, *_) = parameters(place)
    array = np.ones(parameter.spec.local_shape)
    parameter.take_grad(array, parameter.layout)
    with tpm.ledger() as ledger:
        reduce_gradients([parameter])
    assert ledger.count() == 0
    assert parameter.grad.array is array


def test_a_sharded_parameter_used_whole_is_reduce_scattered():
    """Fully sharded: gathered for the forward, the gradient pending along that axis."""
    place = mesh({"dp": 2, "tp": 2}).autodiff()
    weight = nn.Parameter((6, 8), place, dp=Shard(0), tp=Shard(1), dtype="float64")
    weight.initialize(0, "w")
    x = np.sin(np.arange(18.0)).reshape(3, 6)
    rows = tpm.tensor(x, place).with_sharding(dp=Shard(0))
    y = rows @ weight.with_sharding(dp=Replicate(), regather=True)
    (y * y).sum().backward()
    assert weight.grad.layout == (Partial(), Shard(1))
    with tpm.ledger() as ledger:
        reduce_gradients([weight])
    assert ledger.count() == ledger.count("reduce_scatter", "dp") == 1
    assert weight.grad.layout == weight.layout
    expected = 2 * x.T @ (x @ weight.numpy())
    np.testing.assert_allclose(weight.grad.numpy(), expected, rtol=1e-12, atol=1e-15)


def test_a_member_without_rows_and_a_parameter_without_gradient():
    """One row over two members: the second contributes zeros to the same buckets."""
    place = mesh({"dp": 2, "tp": 2}).autodiff()
    used = nn.Linear(4, 6, place, split="columns", dtype="float64")
    unused = nn.Linear(4, 6, place, dtype="float64")
    model = nn.Module()
    model.unused, model.used = unused, used
    model.initialize(0)
    row = np.arange(4.0).reshape(1, 4)
    x = tpm.tensor(row, place).with_sharding(dp=Shard(0), allow_empty=True)
    assert x.local.shape[0] == (1, 1, 0, 0)[place.rank]
    used(x).sum().backward()
    with tpm.ledger() as ledger:
        reduce_gradients(model.parameters())
    assert ledger.count() == ledger.count("all_reduce", "dp") == 1
    np.testing.assert_array_equal(used.weight.grad.numpy(), np.repeat(row.T, 6, axis=1))
    assert unused.weight.grad is None
    before = unused.weight.numpy()
    norm, _ = clip_norm(model.parameters(), inf)
    assert norm == pytest.approx(sqrt(6 * (row**2).sum() + 6), rel=1e-15)
    AdamW(model.named_parameters()).step()
    np.testing.assert_array_equal(unused.weight.numpy(), before)


@each_mesh
def test_every_element_counts_once_in_the_norm(axes):
    place = mesh(axes)
    if not place.is_member:
        return
    made = parameters(place)
    give_gradients(made, place)
    if axes["dp"] > 1:
        with pytest.raises(tpm.AutodiffError, match=r"'p0' is Partial.* axis 'dp'"):
            clip_norm(made, 1.0)
    reduce_gradients(made)
    with tpm.ledger() as ledger:
        norm, scale = clip_norm(made, 1.0)
    assert ledger.count() == ledger.count("all_reduce") == (place.size > 1)
    total = 0.0
    for number in range(len(made)):
        whole = sum(gradient(number, rank) for rank in range(axes["dp"]))
        total += float((whole**2).sum())
    assert norm == pytest.approx(sqrt(total), rel=1e-13)
    assert scale == 1.0 / norm
    assert clip_norm(made, inf) == (norm, 1.0)
    assert len(set(place.all_gather_object(norm))) == 1


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum"])
@each_mesh
def test_steps_are_those_of_one_rank(axes, kind):
    def optimizer(made: list[nn.Parameter]) -> AdamW | SGD:
        named = [(parameter.name, parameter) for parameter in made]
        if kind == "adamw":
            return AdamW(named, lr=0.1)
        return SGD(named, lr=0.1, momentum=0.9 * (kind == "momentum"), weight_decay=0.1)

    place = mesh(axes)
    if not place.is_member:
        return
    alone = tpm.device().autodiff()
    made, reference = parameters(place), []
    for parameter in made:
        single = nn.Parameter(parameter.shape, alone, dtype="float64")
        single.initialize(0, parameter.name)
        reference.append(single)
    ours, theirs = optimizer(made), optimizer(reference)
    for _ in range(3):
        give_gradients(made, place)
        reduce_gradients(made)
        ours.step(scale=0.5)
        for number, single in enumerate(reference):
            whole = sum(gradient(number, rank) for rank in range(axes["dp"]))
            single.take_grad(np.array(whole), single.layout)
        theirs.step(scale=0.5)
    assert ours.steps == theirs.steps == 3
    for parameter, single in zip(made, reference, strict=True):
        np.testing.assert_allclose(
            parameter.numpy(), single.numpy(), rtol=1e-12, atol=1e-14
        )
    state = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert tensor.layout == ours.parameters[name.split("/")[0]].layout
        np.testing.assert_allclose(
            tensor.numpy(), state[name].numpy(), rtol=1e-12, atol=1e-14
        )
