"""Tensors between places."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.nn import Parameter
from tparmpi.testing import all_layouts, laid_out

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture(scope="module")
def places():
    devices = tpm.devices()
    return [
        devices[1],
        tpm.group(devices[:2]),
        tpm.group(devices[1:]),
        tpm.group([devices[3], devices[0]]),
        tpm.mesh(dp=2, tp=2),
    ]


def test_every_place_and_layout_reaches_every_other(places):
    array = np.arange(15.0).reshape(5, 3)
    for a, b in product(places, repeat=2):
        for layout in all_layouts(2, len(a.axes)):
            x = laid_out(array, a, layout)
            for wanted in all_layouts(2, len(b.axes), partial=False):
                moved = x.to(b, wanted, allow_empty=True)
                assert moved.layout == wanted
                assert moved.spec.place is b.inner()
                if b.is_member:
                    assert np.array_equal(moved.local, array[moved.spec.local_slices])
                else:
                    assert moved.is_shell


def test_the_layout_is_kept_by_the_names_of_axes(places):
    mesh = places[-1]
    x = laid_out(np.arange(12.0).reshape(4, 3), mesh, (tpm.Shard(0), tpm.Partial()))
    other = tpm.mesh(tp=1, dp=4)
    assert x.to(other).layout == (tpm.Replicate(), tpm.Shard(0))


def test_numbers_and_small_dtypes_travel(places):
    for dtype in (np.bool_, np.int8, np.float16, np.complex128):
        x = tpm.tensor(np.array(1, dtype), places[1])
        moved = x.to(places[2])
        assert moved.shape == () and moved.dtype == dtype
        if places[2].is_member:
            assert moved.item() == 1


def test_a_moved_value_is_a_copy(places):
    x = tpm.tensor(np.ones(3), places[0])
    moved = x.to(places[1])
    if places[0].is_member:
        x.write_local(np.zeros(3))
        assert np.array_equal(moved.local, np.ones(3))


def test_only_what_lacks_is_sent(places):
    x = tpm.tensor(np.ones(8), places[1])
    x.to(places[2])
    with tpm.ledger() as led:
        x.to(places[2])
    # Rank 1 has it; ranks 2 and 3 get it from ranks 0 and 1 in some way.
    sent = tpm.world().all_reduce(np.array(led.bytes()))
    assert sent == 2 * 64


def test_what_cannot_be_moved_is_refused(places):
    with pytest.raises(tpm.ShardingError, match="allow_empty"):
        tpm.tensor(np.ones(3), places[1]).to(
            places[-1], dp=tpm.Shard(0), tp=tpm.Shard(0)
        )
    with pytest.raises(tpm.UsageError, match="no place"):
        tpm.tensor(np.ones(3), places[1]).to("gpu")


def test_gradients_go_back_the_same_way(places):
    """Between every two places, in any layouts, through other ranks' operators."""
    array, factor = np.sin(np.arange(15.0)).reshape(5, 3), np.arange(15.0).reshape(5, 3)
    single = tpm.tensor(array, tpm.device().autodiff()).require_grad()
    weight = tpm.tensor(factor, tpm.device())
    ((single.gelu() * weight).softmax(1) * weight).sum().backward()
    expected = single.grad.numpy()
    for a, b in product(places, repeat=2):
        targets = all_layouts(2, len(b.axes), partial=False)
        for number, layout in enumerate(all_layouts(2, len(a.axes))):
            x = laid_out(array, a.autodiff(), layout).require_grad()
            wanted = targets[number % len(targets)]
            y = x.gelu().to(b, wanted, allow_empty=True)
            assert y.requires_grad
            w = tpm.tensor(factor, b)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", tpm.ImplicitGatherWarning)
                ((y * w).softmax(1) * w).sum().backward()
            if a.is_member:
                np.testing.assert_allclose(x.grad.numpy(), expected, 0, 1e-12)
            else:
                assert x.grad is None


def staged(places, wrap=lambda f: f, deferred=None):
    """Two stages with weights of their own, and a path back to the first."""
    first, second = places[1], places[2]
    values = np.sin(np.arange(16.0)).reshape(4, 4)
    w = Parameter((4, 4), first.autodiff(), tpm.Shard(1), dtype=np.float64)
    v = Parameter((4, 4), second.autodiff(), tpm.Shard(0), dtype=np.float64)
    for parameter in (w, v):
        if not parameter.is_shell:
            parameter.write_local(values[parameter.spec.local_slices])
    x = tpm.tensor(values, first.autodiff())

    def program(x):
        hidden = (x @ w).gelu()
        there = (hidden.to(second) @ v).gelu()
        return there.to(first, tpm.Replicate()) + hidden.to(first, tpm.Replicate())

    y = wrap(program)(x)
    (y * y).sum().backward(later=deferred)
    if deferred is not None:
        assert w.grad is None and v.grad is None
        deferred.run()
    grads = [None if p.is_shell else p.grad.numpy() for p in (w, v)]
    return grads


def test_stages_train_together(places):
    grads = staged(places)
    values = np.sin(np.arange(16.0)).reshape(4, 4)
    x, w, v = (tpm.tensor(values, tpm.device().autodiff()) for _ in range(3))
    w.require_grad()
    v.require_grad()
    hidden = (x @ w).gelu()
    y = (hidden @ v).gelu() + hidden
    (y * y).sum().backward()
    for wanted, *others in zip(
        (w.grad.numpy(), v.grad.numpy()),
        grads,
        staged(places, tpm.recompute),
        staged(places, deferred=tpm.Deferred()),
        strict=True,
    ):
        for found in others:
            if found is not None:
                np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_grad_of_a_function_over_two_places(places):
    x = tpm.tensor(np.arange(4.0), places[1])
    value, slope = tpm.value_and_grad(
        lambda x: (x.to(places[2]) * x.to(places[2])).sum()
    )(x)
    assert slope.is_shell == x.is_shell
    if places[1].is_member:
        np.testing.assert_allclose(slope.numpy(), 2 * np.arange(4.0))
    if places[2].is_member:
        assert value.item() == 14


def test_ranks_that_disagree_about_gradients_are_told(places):
    source, target = places[0], tpm.group([tpm.devices()[2]])
    x = tpm.tensor(np.ones(3), source.autodiff())
    if source.is_member:
        x.require_grad()
        x.to(target)
    elif target.is_member:
        with pytest.raises(tpm.AutodiffError, match="on all ranks alike"):
            x.to(target)
    with tpm.no_grad():
        assert not x.to(target).requires_grad


def test_a_transfer_goes_back_once(places):
    x = tpm.tensor(np.ones(3), places[1].autodiff()).require_grad()
    y = x.to(places[2])
    y.sum().backward()
    with pytest.raises(tpm.AutodiffError, match="used by an earlier backward"):
        y.sum().backward()
