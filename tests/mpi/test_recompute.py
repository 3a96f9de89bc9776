"""Running again instead of keeping: the same bits, less memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.models.gpt import GPTBlock, GPTConfig
from tparmpi.models.gpt_layout import TENSOR_PARALLEL
from tparmpi.sharding import REPLICATE, Partial, Shard
from tparmpi.tensors import registry
from tparmpi.testing import laid_out

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture
def group():
    return tpm.group(tpm.devices())


def columns(*shape: int) -> np.ndarray:
    return np.sin(np.arange(1.0, np.prod(shape) + 1)).reshape(shape)


def same(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def results_of(make, arrays, place, layouts):
    """Values and gradients of ``make(*tensors)``, used twice and beside its input."""
    tensors = [
        laid_out(array, place.autodiff(), layout).require_grad()
        for array, layout in zip(arrays, layouts, strict=True)
    ]
    with tpm.random.scope(seed=3, step=2):
        before = (tensors[0] * 3.0).gelu()
        y = make(before, *tensors[1:])
        z = make(y + before, *tensors[1:])
        after = tpm.dropout(z, 0.3, "after")
        loss = (after * after).sum() + (before * y).sum()
        value = loss.item()
    loss.backward()
    return [np.array(value), *(tensor.grad.numpy() for tensor in tensors)]


def layer(x, w):
    y = (x @ w).gelu()
    y = tpm.dropout(y, 0.25, "stream")
    return x + y.softmax(1) * x + y


@pytest.mark.parametrize(
    "layouts",
    [
        [(REPLICATE,), (REPLICATE,)],
        [(Shard(0),), (REPLICATE,)],
        [(REPLICATE,), (Shard(1),)],
        [(Shard(1),), (Shard(0),)],
        [(Partial(),), (Partial(),)],
    ],
)
@pytest.mark.filterwarnings("ignore::tparmpi.ImplicitGatherWarning")
def test_nothing_changes_a_bit(group, layouts):
    arrays = [columns(5, 6), columns(6, 6)]
    kept = results_of(layer, arrays, group, layouts)
    same(kept, results_of(tpm.recompute(layer), arrays, group, layouts))

    def nested(x, w):
        return tpm.recompute(layer)(x, w)

    same(kept, results_of(tpm.recompute(nested), arrays, group, layouts))


def block_results(recomputes: bool, mesh) -> list[np.ndarray]:
    config = GPTConfig(
        n_layer=2, d_model=8, n_head=2, seq_len=6, vocab_size=11, dropout=0.2
    )
    block = GPTBlock(config, mesh.autodiff(), TENSOR_PARALLEL, np.float64)
    names = [name for name, _ in block.named_parameters()]
    if recomputes:
        assert tpm.recompute(block) is block
        assert tpm.recompute(block) is block
        assert [name for name, _ in block.named_parameters()] == names
    block.initialize(4)
    x = tpm.tensor(columns(4, 6, 8), mesh.autodiff()).with_sharding(dp=Shard(0))
    x.require_grad()
    with tpm.random.scope(seed=1):
        y = block(block(x))
    with tpm.ledger() as ledger:
        (y * y).sum().backward()
    results = [x.grad.numpy(), *(p.grad.numpy() for p in block.parameters())]
    return [*results, np.array(ledger.count())]


def test_a_module_keeps_its_names_and_its_parameters_get_gradients():
    mesh = tpm.mesh(dp=2, tp=2)
    *kept, calls = block_results(False, mesh)
    *again, more_calls = block_results(True, mesh)
    same(kept, again)
    # two all_reduce of the forward once more, for each of the two calls
    assert more_calls == calls + 4


def test_several_results_and_nests(group):
    def function(pair, *, factor):
        left, right = pair["left"], pair["right"]
        return {"sum": (left + right) * factor, "rest": [left.gelu(), 7, right]}

    def gradients(made):
        left = tpm.tensor(columns(4, 4), group.autodiff()).require_grad()
        right = tpm.tensor(columns(4, 4) + 1, group.autodiff()).require_grad()
        out = made({"left": left, "right": right}, factor=2.0)
        gelu, seven, same_right = out["rest"]
        assert seven == 7
        assert same_right is right
        (out["sum"] * gelu * same_right).sum().backward()
        return [left.grad.numpy(), right.grad.numpy()]

    same(gradients(function), gradients(tpm.recompute(function)))


def test_a_result_that_nobody_uses_costs_nothing(group):
    x = tpm.tensor(columns(4, 4), group.autodiff()).require_grad()
    w = tpm.tensor(columns(4, 8), group.autodiff()).with_sharding(Shard(1))
    w.require_grad()
    used, _ = tpm.recompute(lambda x: (x.gelu(), x.gelu() @ w))(x)
    with tpm.ledger() as ledger:
        used.sum().backward()
    assert ledger.count() == 0
    assert w.grad is None


def test_what_a_function_uses_besides_its_arguments_gets_gradients(group):
    def gradients(wrap):
        x = tpm.tensor(columns(4, 4), group.autodiff()).require_grad()
        hidden = x.gelu()
        y = wrap(lambda h: (h * hidden).gelu() + x)(x * 2.0)
        (y * hidden).sum().backward()
        return [x.grad.numpy()]

    same(gradients(lambda f: f), gradients(tpm.recompute))


def test_without_gradients_the_function_is_just_called(group):
    calls = []

    def function(x):
        calls.append(1)
        return x.gelu()

    x = tpm.tensor(columns(4), group)
    assert not tpm.recompute(function)(x).requires_grad
    y = tpm.tensor(columns(4), group.autodiff()).require_grad()
    with tpm.no_grad():
        assert not tpm.recompute(function)(y).requires_grad
    assert len(calls) == 2


def test_less_is_kept(group):
    """The peak of a chain of layers falls to that of one layer and the inputs."""

    def layers(x):
        for _ in range(6):
            x = x.gelu()
        return x

    def peak(function) -> int:
        x = tpm.tensor(columns(128, 128), group.autodiff()).require_grad()
        hidden = x
        tracemalloc.start()
        for _ in range(6):
            hidden = function(hidden)
        loss = hidden.sum()
        del hidden
        loss.backward()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(layers)
    array = 128 * 128 * 8
    assert peak(layers) > 36 * array
    # six inputs, six layers of one, and what the kernels work in
    assert peak(tpm.recompute(layers)) < 20 * array


def test_a_gathered_argument_is_kept_as_its_shard(group):
    w = tpm.tensor(columns(8, 8), group.autodiff()).with_sharding(Shard(0))
    w.require_grad()
    x = tpm.tensor(columns(4, 8), group.autodiff()).require_grad()
    whole = w.with_sharding(tpm.Replicate(), regather=True)
    y = tpm.recompute(lambda x, w: (x @ w).gelu())(x, whole)
    del whole
    with tpm.ledger() as ledger:
        y.sum().backward()
    assert ledger.count("all_gather") >= 1
    found = [x.grad.numpy(), w.grad.numpy()]
    x.zero_grad()
    w.zero_grad()
    (x @ w.with_sharding(tpm.Replicate())).gelu().sum().backward()
    same(found, [x.grad.numpy(), w.grad.numpy()])


def test_a_fully_sharded_weight_is_gathered_once_each_way(group):
    """What runs again gathers for its own backward too."""
    w = tpm.tensor(columns(8, 8), group.autodiff()).with_sharding(Shard(0))
    w.require_grad()
    x = tpm.tensor(columns(4, 8), group.autodiff()).require_grad()

    def layer(x):
        return (x @ w.with_sharding(tpm.Replicate(), regather=True)).gelu()

    y = tpm.recompute(layer)(tpm.recompute(layer)(x))
    with tpm.ledger() as ledger:
        y.sum().backward()
    assert ledger.count("all_gather") == 2
    found = [x.grad.numpy(), w.grad.numpy()]
    x.zero_grad()
    w.zero_grad()
    layer(layer(x)).sum().backward()
    same(found, [x.grad.numpy(), w.grad.numpy()])


def test_what_cannot_be_repeated_is_refused(group):
    x = tpm.tensor(columns(4), group.autodiff()).require_grad()
    w = tpm.tensor(columns(4), group.autodiff()).require_grad()
    loss = tpm.recompute(lambda x: x.gelu() * w)(x).sum()
    w.write_local(np.zeros(4))
    with pytest.raises(tpm.AutodiffError, match="recomputed function was written to"):
        loss.backward()
    assert x.grad is None

    loss = tpm.recompute(lambda x: x.gelu())(x).sum()
    loss.backward()
    with pytest.raises(tpm.AutodiffError, match="used by an earlier backward"):
        loss.backward()

    kept = []
    tpm.recompute(lambda x: kept.append(x.gelu()) or x.gelu())(x)
    with pytest.raises(tpm.AutodiffError, match="let the function return it"):
        kept[0].sum().backward()

    runs = []

    def fickle(x):
        runs.append(1)
        return x.gelu() if len(runs) == 1 else x.sum()

    loss = tpm.recompute(fickle)(x).sum()
    with pytest.raises(tpm.AutodiffError, match="gave other results"):
        loss.backward()


def test_the_users_random_numbers_go_on(group):
    """The replay leaves the numbering of later calls alone."""
    x = tpm.tensor(columns(8, 8), group.autodiff()).require_grad()

    def draws(wrap):
        with tpm.random.scope(seed=5):
            y = wrap(lambda x: tpm.dropout(x, 0.5, "s"))(x)
            y.sum().backward()
            return [tpm.dropout(x, 0.5, "s").numpy(), y.numpy()]

    same(draws(lambda f: f), draws(tpm.recompute))
    assert "dropout" in registry
