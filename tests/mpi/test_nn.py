"""Layers on 1 to 4 ranks, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi import nn
from tparmpi.sharding import Partial, Replicate, Shard

pytestmark = pytest.mark.mpi(min_size=4)

each_size = pytest.mark.parametrize("members", [1, 2, 3, 4])


def group(members: int) -> tpm.Group:
    return tpm.group(tpm.devices()[:members])


def values(*shape: int) -> np.ndarray:
    """Distinct numbers of order one, so that no permuted result can pass."""
    return np.sin(np.arange(1.0, np.prod(shape) + 1) * 1.7).reshape(shape)


def fill(module: nn.Module) -> dict[str, np.ndarray]:
    """Give each parameter distinct values; return them by name."""
    made = {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        made[name] = values(*parameter.shape) + 0.1 * number
        if not parameter.is_shell:
            parameter.write_local(made[name][parameter.spec.local_slices])
    return made


@each_size
def test_the_bias_is_added_once(members):
    """Weights of zero and a bias of one give one, not the number of members."""
    place = group(members).autodiff()
    layer = nn.Linear(7, 5, place, split="rows", dtype="float64").initialize(0)
    if not place.is_member:
        return
    layer.weight.write_local(np.zeros(layer.weight.spec.local_shape))
    layer.bias.write_local(np.ones(5))
    x = tpm.tensor(values(4, 7), place).with_sharding(Shard(1))
    y = layer(x)
    assert y.sharding == Partial()
    np.testing.assert_array_equal(y.numpy(), np.ones((4, 5)))
    scattered = y.with_sharding(Shard(0))
    np.testing.assert_array_equal(scattered.numpy(), np.ones((4, 5)))
    y.sum().backward()
    assert layer.bias.grad.sharding == Replicate()
    np.testing.assert_array_equal(layer.bias.grad.numpy(), np.full(5, 4.0))


@each_size
@pytest.mark.parametrize("split", ["columns", "rows", None])
def test_linear(members, split):
    """Several feature dims, of sizes that do not divide."""
    place = group(members).autodiff()
    layer = nn.Linear((5, 2), (7, 3), place, split=split, dtype="float64")
    made = fill(layer)
    if not place.is_member:
        return
    array = values(2, 4, 5, 2)
    x = tpm.tensor(array, place).require_grad()
    used = x.with_sharding(Shard(2)) if split == "rows" else x
    with tpm.ledger() as ledger:
        y = layer(used)
    assert ledger.count() == 0
    expected = np.einsum("btij,ijkl->btkl", array, made["weight"]) + made["bias"]
    if split == "columns":
        assert y.sharding == Shard(2)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-12, atol=1e-13)
    (y * y).sum().backward()
    grad = 2 * expected
    for tensor, rule in ((x, "btkl,ijkl->btij"), (layer.weight, "btkl,btij->ijkl")):
        other = made["weight"] if tensor is x else array
        wanted = np.einsum(rule, grad, other)
        np.testing.assert_allclose(tensor.grad.numpy(), wanted, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(
        layer.bias.grad.numpy(), grad.sum((0, 1)), rtol=1e-11, atol=1e-12
    )


@each_size
@pytest.mark.parametrize("vocab_size", [53, 5, 3, 50257, 151851])
def test_a_split_vocabulary_is_summed_once(members, vocab_size):
    place = group(members).autodiff()
    layer = nn.Embedding(vocab_size, 6, place, split="vocabulary", dtype="float64")
    made = fill(layer)
    if not place.is_member:
        return
    ids = np.arange(12).reshape(3, 4) * 7919 * 17 % vocab_size
    with tpm.ledger() as ledger:
        y = layer(tpm.tensor(ids, place))
        whole = y.with_sharding(Replicate())
    assert y.sharding == Partial()
    assert ledger.count() == ledger.count("all_reduce") == (members > 1)
    np.testing.assert_array_equal(whole.numpy(), made["weight"][ids])
    (whole * whole).sum().backward()
    expected = np.zeros((vocab_size, 6))
    np.add.at(expected, ids, 2 * made["weight"][ids])
    assert layer.weight.grad.layout == layer.weight.layout
    np.testing.assert_allclose(layer.weight.grad.numpy(), expected, rtol=1e-14)


@each_size
def test_gradients_of_a_norm_over_split_positions(members):
    """Each member's part is pending, and reduced once when it is read."""
    place = group(members).autodiff()
    layer = nn.LayerNorm(6, place, dtype="float64")
    made = fill(layer)
    if not place.is_member:
        return
    array, weight = values(2, 8, 6), values(2, 8, 6) + 0.3
    x = tpm.tensor(array, place).with_sharding(Shard(1))
    (layer(x) * tpm.tensor(weight, place)).sum().backward()
    centred = array - array.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    with tpm.ledger() as ledger:
        gain, bias = layer.gain.grad.numpy(), layer.bias.grad.numpy()
    assert ledger.count() == (2 if members > 1 else 0)
    np.testing.assert_allclose(gain, (weight * normed).sum((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(bias, weight.sum((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(
        layer(x).numpy(), normed * made["gain"] + made["bias"], rtol=1e-12, atol=1e-13
    )


@each_size
def test_attention_and_mlp_against_numpy(members):
    """5 heads and 10 inner features over 1 to 4 members."""
    place = group(members)
    attn = nn.CausalSelfAttention(10, 5, place, split="heads", dtype="float64")
    mlp = nn.MLP(10, 10, place, split="hidden", dtype="float64")
    a, m = fill(attn), fill(mlp)
    if not place.is_member:
        return
    array = values(2, 4, 10)
    x = tpm.tensor(array, place)
    q, k, v = (
        np.einsum("btd,dhe->bhte", array, a[f"{n}.weight"]) + a[f"{n}.bias"][:, None]
        for n in "qkv"
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(2)
    weights = np.exp(np.where(np.tri(4, dtype=bool), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhte,hed->btd", weights @ v, a["out.weight"]) + a["out.bias"]
    np.testing.assert_allclose(attn(x).numpy(), expected, rtol=1e-11, atol=1e-12)
    h = array @ m["up.weight"] + m["up.bias"]
    h = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    expected = h @ m["down.weight"] + m["down.bias"]
    np.testing.assert_allclose(mlp(x).numpy(), expected, rtol=1e-11, atol=1e-12)


def test_dropout_masks_do_not_depend_on_the_layout():
    mesh = tpm.mesh(dp=2, tp=2)
    model = nn.Module()
    model.thin = nn.Dropout(0.5)
    model.assign_paths()
    ones = np.ones((6, 8))
    with tpm.random.scope(seed=5, step=9):
        serial = model.thin(tpm.tensor(ones, tpm.device())).numpy()
    assert 0.2 < (serial == 0).mean() < 0.8
    for layout in (
        {},
        {"dp": Shard(0)},
        {"dp": Shard(0), "tp": Shard(1)},
        {"tp": Shard(0)},
        {"dp": Shard(1), "tp": Shard(1)},
    ):
        x = tpm.tensor(ones, mesh)
        x = x.with_sharding(**layout) if layout else x
        with tpm.random.scope(seed=5, step=9):
            thinned = model.thin(x)
            again = model.thin(x)
        assert thinned.layout == x.layout
        assert thinned.numpy().tobytes() == serial.tobytes()
        assert again.numpy().tobytes() != serial.tobytes()


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_dropout_masks_do_not_depend_on_microbatches(microbatches):
    """The rows that a rank holds of each microbatch are those of the global batch."""
    mesh = tpm.mesh(dp=4)
    model = nn.Module()
    model.thin = nn.Dropout(0.5)
    model.assign_paths()
    ones = np.ones((24, 5))
    with tpm.random.scope(seed=1):
        serial = model.thin(tpm.tensor(ones, tpm.device())).numpy()
    own = 6 // microbatches
    for number in range(microbatches):
        runs = [(6 * rank + own * number, own) for rank in range(4)]
        first, _ = runs[mesh.rank]
        part = tpm.from_local(ones[:own], mesh, dp=Shard(0))
        with tpm.random.scope(seed=1, rows=runs):
            thinned = model.thin(part).local
        assert thinned.tobytes() == serial[first : first + own].tobytes()


def test_masks_differ_between_shards_streams_and_steps():
    mesh = tpm.mesh(dp=2, tp=2)
    model = nn.Module()
    model.one, model.two = nn.Dropout(0.5), nn.Dropout(0.5)
    model.assign_paths()
    x = tpm.tensor(np.ones((8, 8)), mesh).with_sharding(dp=Shard(0))
    masks = []
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        with tpm.random.scope(seed, step):
            masks += [model.one(x).local.tobytes(), model.two(x).local.tobytes()]
    assert len(set(masks)) == len(masks)
    held = mesh.all_gather_object(masks[0])
    assert held[0] == held[1] != held[2] == held[3]


@each_size
def test_initial_weights_of_any_width_are_the_same(members):
    place = group(members)
    parameters = [
        nn.Parameter((512, 512), place, sharding, dtype="float32")
        for sharding in (None, Shard(0), Shard(1))
    ]
    for parameter in parameters:
        parameter.initialize(11, "some.weight")
    if not place.is_member:
        return
    first, *others = (parameter.numpy() for parameter in parameters)
    assert all(other.tobytes() == first.tobytes() for other in others)
    assert abs(first.mean()) < 1e-4 and first.std() == pytest.approx(0.02, rel=0.01)
    if members == 4:
        assert len(set(place.all_gather_object(parameters[1].local.tobytes()))) == 4


def test_fewer_heads_than_members():
    for members, heads in ((4, 3), (2, 1)):
        with pytest.raises(
            tpm.ShardingError, match=rf"{heads} heads .* {members} members of axis"
        ):
            nn.CausalSelfAttention(12, heads, group(members), split="heads")
    nn.CausalSelfAttention(12, 3, group(4))
    nn.CausalSelfAttention(12, 3, tpm.mesh(dp=4), split="heads")


def test_ranks_that_are_no_members_hold_shells():
    place = group(2).autodiff()
    layer = nn.Linear(4, 6, place, split="columns").initialize(0)
    if place.is_member:
        return
    assert layer.weight.is_shell and layer.weight.array.shape == (4, 3)
    assert layer(tpm.tensor(np.zeros((2, 4), "float32"), place)).is_shell
    with pytest.raises(tpm.ShardingError, match="no member"):
        _ = layer.weight.local
