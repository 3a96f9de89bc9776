"""Asking for gradients: of functions, from seeds, of parameters later."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases.case import values
from tparmpi.models.gpt import GPT, GPTConfig
from tparmpi.nn import Parameter
from tparmpi.sharding import REPLICATE, Partial, Replicate, Shard
from tparmpi.tensors import registry
from tparmpi.testing import all_layouts, laid_out, numerical_gradient

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture
def group():
    return tpm.group(tpm.devices())


def loss_of(x, w):
    return ((x @ w).gelu() * x.sum(1, keepdims=True)).sum()


# Functions


@pytest.mark.parametrize("autodiff", [False, True])
def test_grad_of_a_function_on_every_layout(group, autodiff):
    arrays = [values(4, 3), values(3, 5, seed=1)]
    expected = [numerical_gradient(loss_of, arrays, n, group) for n in range(2)]
    value = loss_of(*[tpm.tensor(a, group) for a in arrays]).item()
    place = group.autodiff() if autodiff else group
    for layouts in [
        [(REPLICATE,), (REPLICATE,)],
        [(Shard(0),), (REPLICATE,)],
        [(Shard(1),), (Shard(0),)],
        [(Partial(),), (Shard(1),)],
    ]:
        x, w = (
            laid_out(*pair) for pair in zip(arrays, [place] * 2, layouts, strict=True)
        )
        found, (dx, dw) = tpm.value_and_grad(loss_of, (0, 1))(x, w)
        assert found.item() == pytest.approx(value, rel=1e-12)
        assert found.device is place
        for grad, tensor, wanted in zip((dx, dw), (x, w), expected, strict=True):
            assert grad.device is place
            assert not grad.requires_grad
            lies = REPLICATE if tensor.sharding == Partial() else tensor.sharding
            assert grad.sharding == lies
            np.testing.assert_allclose(grad.numpy(), wanted, rtol=1e-6, atol=1e-8)
        only = tpm.grad(loss_of, 1)(x, w)
        np.testing.assert_allclose(only.numpy(), dw.numpy(), rtol=1e-13)


def test_grad_changes_no_other_gradient(group):
    w = tpm.tensor(values(3, 3), group.autodiff()).require_grad()
    x = tpm.tensor(values(3, 3, seed=1), group.autodiff()).require_grad()
    tpm.grad(lambda x: loss_of(x.gelu(), w))(x)
    assert w.grad is None
    assert x.grad is None
    # what was recorded outside can still be used
    hidden = x.gelu()
    tpm.grad(lambda y: (y * hidden).sum())(w)
    hidden.sum().backward()
    assert x.grad is not None
    assert w.grad is None


def test_grad_spares_what_leads_elsewhere(group):
    """Products that only the constants' gradients need are not computed."""
    calls = []
    original = registry["einsum"].backward

    def spy(plan, saved, grad, wanted):
        calls.append(wanted)
        return original(plan, saved, grad, wanted)

    w = tpm.tensor(values(3, 3), group.autodiff()).require_grad()
    x = tpm.tensor(values(3, 3, seed=1), group)
    registry["einsum"].backward = spy
    try:
        tpm.grad(lambda x: ((x @ w) * (w @ w)).sum())(x)
    finally:
        registry["einsum"].backward = original
    assert calls == [(True, False)]


def test_arguments_may_be_nests_and_repeated(group):
    x = tpm.tensor(values(4), group)
    y = tpm.tensor(values(4, seed=1), group)

    def function(pair, *, factor):
        return (pair["a"] * pair["b"][0]).sum() * factor

    grads = tpm.grad(function)({"a": x, "b": [y, 3]}, factor=2.0)
    np.testing.assert_allclose(grads["a"].numpy(), 2 * values(4, seed=1))
    np.testing.assert_allclose(grads["b"][0].numpy(), 2 * values(4))
    assert grads["b"][1] == 3
    # one tensor in two places has a gradient for each
    left, right = tpm.grad(lambda a, b: (a * a * b).sum(), (0, 1))(x, x)
    np.testing.assert_allclose(left.numpy(), 2 * values(4) ** 2)
    np.testing.assert_allclose(right.numpy(), values(4) ** 2)
    nothing = tpm.grad(lambda a, b: b.sum())(x, y)
    np.testing.assert_array_equal(nothing.numpy(), np.zeros(4))


def test_steps_of_descent_keep_no_history(group):
    step = tpm.value_and_grad(lambda w: (w * w).sum())
    w = tpm.tensor(values(4), group).with_sharding(Shard(0))
    for _ in range(3):
        _, slope = step(w)
        w = w - slope * 0.25
        assert w.node is None
    np.testing.assert_allclose(w.numpy(), values(4) / 8)


def test_grad_records_under_no_grad(group):
    x = tpm.tensor(values(4), group.autodiff()).require_grad()
    with tpm.no_grad():
        slope = tpm.grad(lambda x: (x * x).sum())(x)
        assert not (slope * x).requires_grad
    np.testing.assert_allclose(slope.numpy(), 2 * values(4))


def test_gradients_of_gradients_are_refused(group):
    x = tpm.tensor(values(4), group.autodiff()).require_grad()
    words = "gradients of gradients are not supported"
    (x * x * x).sum().backward()
    with pytest.raises(tpm.AutodiffError, match=words):
        (x.grad * x).sum().backward()
    cube = tpm.grad(lambda x: (x * x * x).sum())
    with pytest.raises(tpm.AutodiffError, match=words):
        cube(x).sum().backward()
    with pytest.raises(tpm.AutodiffError, match=words):
        tpm.grad(lambda x: cube(x).sum())(tpm.tensor(values(4), group))
    with pytest.raises(tpm.AutodiffError, match=words):
        tpm.value_and_grad(lambda y: (x * y).sum())(x)[0].backward()
    # as a constant, and where nothing depends on it
    x.zero_grad()
    (cube(x).detach() * x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 3 * values(4) ** 2)
    outer = tpm.grad(lambda y: (cube(x) * y).sum())(tpm.tensor(values(4), group))
    np.testing.assert_allclose(outer.numpy(), 3 * values(4) ** 2)


def test_functions_without_a_gradient_are_refused(group):
    x = tpm.tensor(values(4), group)
    ids = tpm.tensor(np.arange(4), group)
    with pytest.raises(tpm.ShapeError, match="one element"):
        tpm.grad(lambda x: x * 2.0)(x)
    with pytest.raises(tpm.UsageError, match="returned a float"):
        tpm.grad(lambda x: 1.0)(x)
    with pytest.raises(tpm.UsageError, match="no positional argument 1"):
        tpm.grad(lambda x: x.sum(), 1)(x)
    with pytest.raises(tpm.UsageError, match="without tensors"):
        tpm.grad(lambda x: x)(2.0)
    with pytest.raises(tpm.AutodiffError, match="int64"):
        tpm.grad(lambda x: x.sum())(ids)


# Seeds


def test_seeds_in_any_layout(group):
    """A gradient of the result, where it is not ones."""
    seed = values(5, 3, seed=2)
    for source in all_layouts(2):
        for layout in all_layouts(2):
            x = laid_out(values(5, 3), group.autodiff(), source).require_grad()
            y = x.gelu()
            y.backward(laid_out(seed, group, layout))
            expected = tpm.tensor(values(5, 3), group.autodiff()).require_grad()
            (expected.gelu() * tpm.tensor(seed, group)).sum().backward()
            np.testing.assert_allclose(
                x.grad.numpy(), expected.grad.numpy(), rtol=1e-12, atol=1e-14
            )


def test_several_tensors_go_back_together(group):
    x = tpm.tensor(values(4), group.autodiff()).require_grad()
    hidden = x.gelu()
    a, b = hidden * 2.0, hidden * hidden
    tpm.backward([a, b], [tpm.tensor(values(4, seed=1), group), None])
    y = tpm.tensor(values(4), group.autodiff()).require_grad()
    hidden = y.gelu()
    ones = tpm.tensor(values(4, seed=1), group)
    (hidden * 2.0 * ones + hidden * hidden).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), y.grad.numpy(), rtol=1e-13)


def test_a_seed_is_not_shared(group):
    x = tpm.tensor(values(4), group.autodiff()).require_grad()
    y = tpm.tensor(values(4), group.autodiff()).require_grad()
    seed = tpm.tensor(values(4), group)
    (x + y).backward(seed)
    x.backward(seed)
    seed.write_local(np.zeros(4))
    np.testing.assert_array_equal(y.grad.numpy(), values(4))
    np.testing.assert_array_equal(x.grad.numpy(), 2 * values(4))


def test_seeds_that_do_not_fit_are_refused(group):
    x = tpm.tensor(values(4), group.autodiff()).require_grad()
    y = x.gelu()
    other = tpm.group(tpm.devices())
    with pytest.raises(tpm.ShapeError, match=r"shape of its tensor, \(4,\)"):
        y.backward(tpm.tensor(values(1), group))
    with pytest.raises(tpm.ShardingError, match="same place"):
        y.backward(tpm.tensor(values(4), other))
    with pytest.raises(tpm.UsageError, match="a ndarray, not a tensor"):
        y.backward(values(4))
    with pytest.raises(tpm.UsageError, match="1 tensors and 2 seeds"):
        tpm.backward([y], [None, None])
    with pytest.raises(tpm.UsageError, match=r"tpm.Deferred\(\)"):
        y.backward(later=[])
    with pytest.raises(tpm.UsageError, match="complex128"):
        y.backward(tpm.tensor(values(4) + 1j, group))
    assert x.grad is None
    y.backward()
    assert x.grad is not None


# Sharing


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x + tpm.tensor(np.zeros((4, 4)), x.spec.place),
        lambda x: x.reshape((2, 8)),
        lambda x: x.transpose(),
        lambda x: x.with_sharding(Shard(0)),
        lambda x: x.with_sharding(Shard(0)).with_sharding(Replicate()),
        lambda x: x.reshape((1, 16)).reshape((4, 4)).transpose(),
        lambda x: x * 1.0,
    ],
)
def test_gradients_share_no_memory(group, view):
    """Neither with another tensor's gradient nor with values."""
    x = tpm.tensor(values(4, 4), group.autodiff()).require_grad()
    y = tpm.tensor(values(4, 4, seed=1), group.autodiff()).require_grad()
    a, b = view(x), view(y)
    seed = tpm.tensor(values(*a.shape, seed=3), group)
    (a + b).backward(seed)
    arrays = [x.grad.array, y.grad.array, x.array, y.array, a.array, b.array]
    arrays.append(seed.array)
    for number, one in enumerate(arrays[:2]):
        for other in arrays[number + 1 :]:
            assert not np.shares_memory(one, other)
    x.zero_grad()
    x.grad = y.grad
    assert not np.shares_memory(x.grad.array, y.grad.array)
    with pytest.raises(tpm.UsageError, match="is no tensor"):
        x.grad = values(4, 4)
    with pytest.raises(tpm.ShapeError, match="must have the shape"):
        x.grad = tpm.tensor(values(4), group)
    np.testing.assert_array_equal(x.grad.numpy(), y.grad.numpy())


def test_a_view_read_in_many_layouts_is_reduced_once(group):
    """One all_reduce for what is read through views and redistributions."""
    x = tpm.tensor(values(4, 8), group.autodiff()).require_grad()
    hidden = x.gelu()
    w = tpm.tensor(values(8, 8), group).with_sharding(Shard(1))
    v = tpm.tensor(values(4, 4, seed=1), group).with_sharding(Shard(1))
    flat = hidden.reshape((8, 4))
    loss = (hidden @ w).sum() + (hidden.with_sharding(Shard(0)) * 2.0).sum()
    loss = loss + (flat @ v).sum() + (flat.transpose().transpose() @ v).sum()
    with tpm.ledger() as ledger:
        loss.backward()
    assert ledger.count() == ledger.count("all_reduce") == 1
    y = tpm.tensor(values(4, 8), tpm.device().autodiff()).require_grad()
    hidden = y.gelu()
    w, v = (tpm.tensor(t.numpy(), tpm.device()) for t in (w, v))
    loss = (hidden @ w).sum() + (hidden * 2.0).sum()
    (loss + (hidden.reshape((8, 4)) @ v).sum() * 2.0).backward()
    np.testing.assert_allclose(x.grad.numpy(), y.grad.numpy(), rtol=1e-12)


# Weights later


def parameter(place, *shape: int, sharding=None, seed: int = 0) -> Parameter:
    made = Parameter(shape, place.autodiff(), sharding, dtype=np.float64)
    made.write_local(values(*shape, seed=seed)[made.spec.local_slices])
    return made


def test_weight_gradients_come_later(group):
    w = parameter(group, 6, 8, sharding=Shard(1))
    bias = parameter(group, 8, sharding=Shard(0))
    gain = parameter(group, 6)
    x = tpm.tensor(values(4, 6), group.autodiff()).require_grad()

    def forward():
        y = tpm.linear(x.gelu() * gain, w.cast("float64"), bias, "td,df->tf")
        return (y.gelu() * y).sum()

    forward().backward()
    parameters = (w, bias, gain)
    expected = [t.grad.numpy() for t in (x, *parameters)]
    for t in (x, *parameters):
        t.zero_grad()
    deferred = tpm.Deferred()
    forward().backward(later=deferred)
    np.testing.assert_array_equal(x.grad.numpy(), expected[0])
    assert [p.grad for p in parameters] == [None] * 3
    assert len(deferred) > 0
    deferred.run()
    assert len(deferred) == 0
    deferred.run()
    for p, wanted in zip(parameters, expected[1:], strict=True):
        np.testing.assert_array_equal(p.grad.numpy(), wanted)


def model_gradients(split: bool, mesh) -> tuple[list[np.ndarray], int]:
    config = GPTConfig(
        n_layer=2, d_model=8, n_head=2, seq_len=6, vocab_size=11, dropout=0.1
    )
    model = GPT(config, mesh.autodiff(), dtype=np.float64).initialize(2)
    tokens = tpm.tensor(np.arange(24).reshape(4, 6) % 11, mesh.autodiff())
    tokens = tokens.with_sharding(dp=Shard(0))
    waiting = []
    with tpm.ledger() as ledger:
        for step in range(2):
            with tpm.random.scope(seed=1, step=step):
                loss = tpm.cross_entropy(model(tokens), tokens).mean()
            if split:
                waiting.append(tpm.Deferred())
                loss.backward(later=waiting[-1])
                assert all(p.grad is None for p in model.parameters())
            else:
                loss.backward()
        for deferred in waiting:
            deferred.run()
    return [p.grad.numpy() for p in model.parameters()], ledger.count()


def test_a_models_weight_gradients_are_the_same_bit_for_bit():
    """Tied weights, positions split off a parameter, several microbatches."""
    mesh = tpm.mesh(dp=2, tp=2)
    whole, calls = model_gradients(False, mesh)
    split, split_calls = model_gradients(True, mesh)
    for one, other in zip(whole, split, strict=True):
        np.testing.assert_array_equal(one, other)
    assert calls == split_calls


def test_only_what_weight_gradients_need_is_held(group):
    w = parameter(group, 32, 32)
    x = tpm.tensor(values(32, 32), group.autodiff()).require_grad()
    hidden = x.gelu()
    product = hidden @ w
    result = product.gelu()
    kept = {
        "operand": weakref.ref(hidden.array),
        "product": weakref.ref(product.array),
        "result": weakref.ref(result.array),
    }
    deferred = tpm.Deferred()
    (result * result).sum().backward(later=deferred)
    del hidden, product, result
    gc.collect()
    alive = {name for name, ref in kept.items() if ref() is not None}
    assert alive == {"operand"}
    deferred.run()
    gc.collect()
    assert kept["operand"]() is None


def test_a_weight_is_not_gathered_again_for_its_own_gradient(group):
    def gradients(deferred):
        w = parameter(group, 8, 8, sharding=Shard(0))
        x = tpm.tensor(values(4, 8), group.autodiff()).require_grad()
        whole = w.with_sharding(Replicate(), regather=True)
        loss = (x.gelu() @ whole).gelu().sum()
        with tpm.ledger() as ledger:
            loss.backward(later=deferred)
            if deferred is not None:
                deferred.run()
        return ledger.count("all_gather"), x.grad.numpy(), w.grad.numpy()

    (one, dx, dw), (other, dx_too, dw_too) = gradients(None), gradients(tpm.Deferred())
    assert one == other == 1
    np.testing.assert_array_equal(dx, dx_too)
    np.testing.assert_array_equal(dw, dw_too)


def test_weights_later_of_what_is_run_again(group):
    w = parameter(group, 6, 6, sharding=Shard(1))
    x = tpm.tensor(values(4, 6), group.autodiff()).require_grad()

    def gradients(deferred):
        layer = tpm.recompute(lambda x: (x @ w).gelu())
        layer(x.gelu()).sum().backward(later=deferred)
        if deferred is not None:
            assert w.grad is None
            deferred.run()
        found = x.grad.numpy(), w.grad.numpy()
        x.zero_grad()
        w.zero_grad()
        return found

    for one, other in zip(gradients(None), gradients(tpm.Deferred()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_write_before_the_later_part_is_refused(group):
    w = parameter(group, 4, 4)
    x = tpm.tensor(values(4, 4), group.autodiff()).require_grad()
    deferred = tpm.Deferred()
    (x @ w).sum().backward(later=deferred)
    w.write_local(np.zeros((4, 4)))
    with pytest.raises(tpm.AutodiffError, match="written to"):
        deferred.run()
    assert w.grad is None
    assert len(deferred) == 1
