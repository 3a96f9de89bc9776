"""Modules and parameters: names, kinds, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi import nn
from tparmpi.nn import init
from tparmpi.sharding import Partial, Shard


class Pair(nn.Module):
    """Two linear maps, and one of them again in a list."""

    def __init__(self, place: tpm.Device) -> None:
        self.first = nn.Linear(2, 3, place)
        self.rest = [nn.LayerNorm(3, place), self.first, nn.Linear(3, 2, place)]
        self.thin = nn.Dropout(0.5)
        self.scale = self.first.weight

    def forward(self, x: tpm.Tensor) -> tpm.Tensor:
        """Return what all layers but the list's second make of `x`."""
        return self.rest[2](self.rest[0](self.first(self.thin(x))))


class Collections(nn.Module):
    """Everything that can hold parameters and modules."""

    def __init__(self, place: tpm.Device) -> None:
        def one() -> nn.Parameter:
            return nn.Parameter((2,), place)

        self.md = {"x": nn.Linear(1, 1, place, bias=False), "n": 3, "p": one()}
        self.ps = (one(), "text", one())
        self.nested = [[one()], {"a": ([nn.LayerNorm(1, place)], {1: 2})}]
        self.nested.append(self.nested)
        self.plain = {1: [2], None: "three"}
        self.again = [self.ps[0], self.md["x"]]


@pytest.fixture
def place() -> tpm.Device:
    return tpm.device()


def test_names_are_paths_and_shared_ones_count_once(place):
    model = Pair(place)
    assert list(model.state_dict()) == [
        "scale",
        "first.bias",
        "rest.0.gain",
        "rest.0.bias",
        "rest.2.weight",
        "rest.2.bias",
    ]
    assert [path for path, _ in model.named_modules()] == [
        "",
        "first",
        "rest.0",
        "rest.2",
        "thin",
    ]
    assert len(list(model.parameters())) == 6
    assert model.initialize(0) is model
    assert model.first.path == "first" and model.first.weight.name == "scale"
    assert all(model.state_dict()[p.name] is p for p in model.parameters())


def test_all_collections_are_walked(place):
    model = Collections(place).initialize(0)
    assert list(model.state_dict()) == [
        "md.p",
        "ps.0",
        "ps.2",
        "nested.0.0",
        "md.x.weight",
        "nested.1.a.0.0.gain",
        "nested.1.a.0.0.bias",
    ]
    paths = [path for path, _ in model.named_modules()]
    assert paths == ["", "md.x", "nested.1.a.0.0"]
    assert all(p.name == name for name, p in model.named_parameters())
    assert not model.eval().md["x"].training


@pytest.mark.parametrize("key", [1, "", "a.b", "a/b", ("a",)])
def test_a_key_that_cannot_be_part_of_a_name_is_refused(place, key):
    model = nn.Module()
    model.layers = [{key: [nn.Linear(1, 1, place)]}]
    with pytest.raises(tpm.UsageError, match=r"of the dict at 'layers.0' cannot be"):
        model.initialize(0)


def test_kinds_and_initial_values(place):
    model = Pair(place).initialize(0)
    kinds = {name: p.kind for name, p in model.named_parameters()}
    assert kinds == {
        "scale": "weight",
        "first.bias": "bias",
        "rest.0.gain": "norm",
        "rest.0.bias": "norm",
        "rest.2.weight": "weight",
        "rest.2.bias": "bias",
    }
    assert not model.first.bias.local.any() and (model.rest[0].gain.local == 1).all()
    assert model.first.weight.local.all()


def test_initial_values_depend_on_seed_and_name_only(place):
    def draw(seed: int, name: str) -> bytes:
        parameter = nn.Parameter((40, 30), place, initializer=init.normal(0.5))
        parameter.initialize(seed, name)
        assert parameter.local.std() == pytest.approx(0.5, rel=0.05)
        return parameter.local.tobytes()

    np.random.seed(0)
    first = draw(1, "a")
    np.random.seed(1)
    assert draw(1, "a") == first
    assert len({first, draw(2, "a"), draw(1, "b")}) == 3


def test_a_parameter_has_no_values_before_it_is_given_some(place):
    model = Pair(place)
    with pytest.raises(tpm.UsageError, match=r"parameter of shape \(2,\) has no val"):
        _ = model.rest[2].bias.local
    model.assign_paths()
    with pytest.raises(tpm.UsageError, match=r"'rest.2.bias' has no values yet"):
        _ = model.rest[2].bias.local
    with pytest.raises(tpm.ShapeError, match=r"\(2,\)"):
        model.rest[2].bias.write_local(np.zeros(3))
    with pytest.raises(tpm.UsageError, match="has no values yet"):
        _ = model.rest[2].bias.local
    model.rest[2].bias.write_local(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(model.rest[2].bias.numpy(), [1, 2])


def test_dtypes(place):
    assert nn.Parameter((2,), place).dtype == place.settings.float
    assert nn.Linear(2, 3, place, dtype="float64").bias.dtype == np.float64


def test_parameters_require_gradients_on_an_autodiff_place(place):
    assert not any(p.requires_grad for p in Pair(place).parameters())
    model = Pair(place.autodiff()).initialize(0).eval()
    model(tpm.tensor(np.ones((4, 2), model.scale.dtype), place)).sum().backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_dropout_is_active_while_training_only(place):
    model = Pair(place)
    x = tpm.tensor(np.ones((50, 2)), place)
    with pytest.raises(tpm.UsageError, match="no path"):
        model.thin(x)
    model.assign_paths()
    with tpm.random.scope(1):
        thinned = model.thin(x).numpy()
    assert set(np.unique(thinned)) == {0.0, 2.0}
    assert model.eval().thin(x) is x and not model.rest[0].training
    assert model.train().thin(x) is not x
    assert nn.Dropout(0.0)(x) is x


def test_no_bias(place):
    layer = nn.Linear(2, 3, place, bias=False, dtype="float64").initialize(0)
    x = np.arange(8.0).reshape(4, 2)
    y = layer(tpm.tensor(x, place)).numpy()
    np.testing.assert_allclose(y, x @ layer.weight.numpy(), rtol=1e-15)
    assert list(layer.state_dict()) == ["weight"]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda p: nn.Parameter((2,), p, kind="head"), tpm.UsageError, "'head'"),
        (lambda p: nn.Parameter((2,), p, Partial()), tpm.ShardingError, "be Partial"),
        (lambda p: nn.Parameter((2,), p, Shard(1)), tpm.ShardingError, "Shard\\(1\\)"),
        (lambda p: nn.Parameter((2,), p, tp=Shard(0)), tpm.ShardingError, "axis 'tp'"),
        (lambda p: nn.Linear(2, 2, p, split="heads"), tpm.UsageError, "'heads'"),
        (lambda p: nn.Embedding(2, 2, p, split="rows"), tpm.UsageError, "'rows'"),
        (lambda p: nn.MLP(2, 2, p, split="rows"), tpm.UsageError, "'hidden' or None"),
        (lambda p: nn.CausalSelfAttention(5, 2, p), tpm.UsageError, r"\(5\).*\(2\)"),
        (lambda p: nn.Dropout(1.0), tpm.UsageError, "below 1"),
    ],
)
def test_refused(place, make, error, match):
    with pytest.raises(error, match=match):
        make(place)


def test_the_input_must_fit(place):
    layer = nn.Linear((2, 3), 4, place).initialize(0)
    with pytest.raises(tpm.ShapeError, match="linear: dim 1 of operand 1"):
        layer(tpm.tensor(np.ones((5, 2, 4), "float32"), place))


def test_a_parameter_is_not_lost_to_a_result():
    module = nn.Linear(2, 3, tpm.device().autodiff()).initialize(seed=0)
    weight = module.weight
    with pytest.raises(tpm.UsageError, match="neither trained nor saved"):
        module.weight += 1
    assert module.weight is weight and len(list(module.parameters())) == 2
    module.weight = nn.Parameter((2, 3), tpm.device())
    assert module.weight is not weight
    del module.bias
    module.bias = tpm.tensor(np.zeros(3), tpm.device())
    assert len(list(module.parameters())) == 1
