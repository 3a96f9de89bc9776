"""The tape: what it records, what it reduces, what it frees, what it refuses."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.sharding import REPLICATE, Partial, Replicate, Shard
from tparmpi.tensors import Operator, methods, registry
from tparmpi.testing import check_gradient, laid_out

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture
def group():
    return tpm.group(tpm.devices())


def columns(*shape: int) -> np.ndarray:
    return np.sin(np.arange(1.0, np.prod(shape) + 1)).reshape(shape)


def test_a_plain_device_records_nothing(group):
    x = tpm.tensor(columns(4, 4), group)
    assert (x @ x).gelu().node is None
    y = tpm.tensor(columns(4, 4), group.autodiff()).require_grad()
    with tpm.no_grad():
        assert (y @ y).node is None
        with tpm.no_grad():
            pass
        assert (y @ y).node is None
    again = tpm.no_grad()
    with again, again:
        pass
    mixed = x @ y
    assert mixed.requires_grad and mixed.device is group.autodiff()


def test_a_tensor_read_by_three_operators_is_reduced_once(group):
    """Three column-parallel products of one input: one all_reduce in the backward."""
    x = tpm.tensor(columns(2, 6), group.autodiff()).require_grad()
    hidden = x.gelu()
    weights = [
        tpm.tensor(columns(6, 8) + i, group).with_sharding(Shard(1)) for i in range(3)
    ]
    result = hidden @ weights[0] + hidden @ weights[1] + hidden @ weights[2]
    loss = result.sum()
    with tpm.ledger() as ledger:
        loss.backward()
    assert ledger.count() == ledger.count("all_reduce") == 1
    assert x.grad.sharding == Replicate()


def test_a_sharded_and_a_pending_gradient_are_reduced_together(group):
    """The slice's gradient is put in its place of the pending sum."""
    x = tpm.tensor(columns(4, 6), group.autodiff()).require_grad()
    hidden = x * 2.0
    weight = tpm.tensor(columns(6, 8), group).with_sharding(Shard(1))
    rows = hidden.gelu()
    loss = (rows @ weight).sum() + (rows.with_sharding(Shard(0)) * 3.0).sum()
    with tpm.ledger() as ledger:
        loss.backward()
    assert ledger.count() == ledger.count("all_reduce") == 1

    def function(x, weight):
        rows = (x * 2.0).gelu()
        return (rows @ weight).sum() + (rows.with_sharding(Shard(0)) * 3.0).sum()

    layouts = [(REPLICATE,), (Shard(1),)]
    check_gradient(function, [columns(4, 6), columns(6, 8)], group, layouts)


def test_linear_operators_pass_pending_gradients_back(group):
    """A leaf's gradient stays pending; nothing is communicated."""
    x = tpm.tensor(columns(4, 6), group.autodiff()).require_grad()
    weight = tpm.tensor(columns(6, 8), group).with_sharding(Shard(1))
    loss = ((x * 2.0).transpose((1, 0)).transpose((1, 0)) @ weight).sum()
    with tpm.ledger() as ledger:
        loss.backward()
    assert ledger.count() == 0
    assert x.grad.sharding == Partial()
    expected = 2 * np.broadcast_to(columns(6, 8).sum(1), (4, 6))
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-14)


def test_pieces_of_a_split_pass_pending_gradients_together(group):
    x = tpm.tensor(columns(4, 6), group.autodiff()).require_grad()
    weight = tpm.tensor(columns(3, 8), group).with_sharding(Shard(1))
    left, right = x.split(2, 1)
    loss = (left @ weight).sum() + right.gelu().sum()
    with tpm.ledger() as ledger:
        loss.backward()
    assert ledger.count() == 0

    def function(x, weight):
        left, right = x.split(2, 1)
        return (left @ weight).sum() + right.gelu().sum()

    check_gradient(
        function, [columns(4, 6), columns(3, 8)], group, [(REPLICATE,), (Shard(1),)]
    )


def test_diamonds_and_accumulation(group):
    def function(x):
        y = x.gelu()
        return (y * y + y).sum() + x.softmax(1).sum() + (x + x).gelu().sum()

    for layout in [(REPLICATE,), (Shard(0),), (Shard(1),), (Partial(),)]:
        check_gradient(function, [columns(4, 6)], group, [layout])
    x = tpm.tensor(columns(4, 6), group.autodiff()).require_grad()
    function(x).backward()
    once = x.grad.numpy()
    function(x).backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * once, rtol=1e-14)
    x.zero_grad()
    assert x.grad is None


def test_gradients_pass_through_every_redistribution(group):
    moves = [(REPLICATE,), (Shard(0),), (Shard(1),)]
    for source in [*moves, (Partial(),)]:
        for target in moves:

            def function(x, target=target):
                return (x.with_sharding(target) * x.with_sharding(target)).gelu()

            check_gradient(function, [columns(4, 6)], group, [source])


def test_a_gradient_is_no_other_tensors_gradient(group):
    autodiff = group.autodiff()
    x = tpm.tensor(columns(4), autodiff).require_grad()
    y = tpm.tensor(columns(4), autodiff).require_grad()
    (x + y).sum().backward()
    x.grad.array[...] = 9
    np.testing.assert_array_equal(y.grad.numpy(), np.ones(4))
    np.testing.assert_array_equal(x.grad.numpy(), np.full(4, 9.0))


def test_a_library_write_between_forward_and_backward_is_refused(group):
    x = tpm.tensor(columns(4), group.autodiff()).require_grad()
    fixed = tpm.tensor(columns(4), group)
    loss = (x * fixed).sum()
    fixed.write_local(np.zeros(4))
    assert fixed.version == 1
    with pytest.raises(tpm.AutodiffError, match="operand of mul was written to"):
        loss.backward()


def test_the_tape_is_used_once(group):
    x = tpm.tensor(columns(4), group.autodiff()).require_grad()
    loss = x.gelu().sum()
    loss.backward()
    with pytest.raises(tpm.AutodiffError, match="run the forward again"):
        loss.backward()


def test_backward_frees_what_it_no_longer_needs(group):
    """While the first layer's backward runs, what later layers kept is gone."""
    x = tpm.tensor(columns(64, 64), group.autodiff()).require_grad()
    kept: list[weakref.ref] = []
    alive: list[int] = []

    def spy(plan, saved, grad, wanted):
        gc.collect()
        alive.append(sum(ref() is not None for ref in kept))
        return original(plan, saved, grad, wanted)

    original = registry["gelu"].backward
    registry["gelu"].backward = spy
    try:
        hidden = x
        for _ in range(4):
            hidden = hidden.gelu()
            kept.append(weakref.ref(hidden.array))
        loss = hidden.sum()
        del hidden
        loss.backward()
    finally:
        registry["gelu"].backward = original
    # at the k-th backward from the end its own input is alive, and those before it
    assert alive == [3, 2, 1, 0]


def test_a_regathered_operand_is_not_kept(group):
    """Gathered for use, kept as its shard, gathered once more in the backward."""
    weight = tpm.tensor(columns(8, 8), group.autodiff())
    weight = weight.with_sharding(Shard(0)).require_grad()
    x = tpm.tensor(columns(4, 8), group.autodiff()).require_grad()
    with tpm.ledger() as forward:
        whole = weight.with_sharding(Replicate(), regather=True)
        gathered = weakref.ref(whole.array)
        loss = (x.gelu() @ whole).sum()
        del whole
    assert forward.count("all_gather") == forward.count() == 1
    gc.collect()
    assert gathered() is None
    with tpm.ledger() as backward:
        loss.backward()
    assert backward.count("all_gather") == backward.count() == 1
    np.testing.assert_allclose(x.grad.numpy().shape, (4, 8))

    def function(x, weight):
        return x.gelu() @ weight.with_sharding(Replicate(), regather=True)

    arrays = [columns(4, 8), columns(8, 8)]
    check_gradient(function, arrays, group, [(REPLICATE,), (Shard(0),)])


def test_a_regathered_operand_may_be_moved_once_more(group):
    """The operator slices or exchanges what was gathered; the backward does again."""

    def function(x, weight):
        return x * weight.with_sharding(Replicate(), regather=True)

    arrays = [columns(8, 8), columns(8, 8)]
    check_gradient(function, arrays, group, [(Shard(0),), (Shard(1),)])

    def product(x, weight):
        return x @ weight.with_sharding(Replicate(), regather=True)

    check_gradient(product, arrays, group, [(Shard(1),), (Shard(0),)])


def test_many_gradients_of_a_tensor_without_dims_are_all_added(group):
    s = tpm.tensor(np.array(2.0), group.autodiff()).require_grad()
    (s * 1.0 + s * 10.0 + s * 100.0 + s * 1000.0).backward()
    assert s.grad.item() == 1111
    for _ in range(4):
        (s * 1.0).backward()
    assert s.grad.item() == 1115
    x = tpm.tensor(columns(4), group.autodiff()).require_grad()
    loss = (x * x).sum()
    (loss + loss * 2.0 + loss * 3.0).backward()
    np.testing.assert_allclose(x.grad.numpy(), 12 * columns(4), rtol=1e-14)


def test_a_write_is_seen_through_views(group):
    w = tpm.tensor(columns(2, 3), group.autodiff()).require_grad()
    x = tpm.tensor(columns(3, 2), group.autodiff()).require_grad()
    for view in (lambda: w.reshape((3, 2)), lambda: w.transpose()):
        with tpm.no_grad():
            seen = view()
        loss = (x * seen).sum()
        w.write_local(np.zeros((2, 3)))
        with pytest.raises(tpm.AutodiffError, match="was written to"):
            loss.backward()


def test_no_grad_holds_for_redistributions(group):
    w = tpm.tensor(columns(4, 4), group.autodiff()).require_grad()
    with tpm.no_grad():
        assert not w.with_sharding(Shard(1)).requires_grad
    assert w.with_sharding(Shard(1)).requires_grad


def test_a_refused_backward_changes_no_gradient(group):
    x = tpm.tensor(columns(4), group.autodiff()).require_grad()
    u = tpm.tensor(columns(4), group.autodiff()).require_grad()
    hidden = x.gelu()
    hidden.sum().backward()
    before = x.grad.numpy()
    for _ in range(2):
        with pytest.raises(tpm.AutodiffError, match="used by an earlier backward"):
            ((hidden * 2.0) + u).sum().backward()
    assert u.grad is None
    np.testing.assert_array_equal(x.grad.numpy(), before)


def test_megatron_mlp_communicates_once_each_way(group):
    """Columns then rows, then a norm whose gradient is needed whole."""
    autodiff = group.autodiff()
    x = tpm.tensor(columns(2, 3, 8), autodiff).require_grad()
    ones, zeros = tpm.tensor(np.ones(8), autodiff), tpm.tensor(np.zeros(8), autodiff)
    up = laid_out(columns(8, 10), autodiff, (Shard(1),)).require_grad()
    up_bias = laid_out(columns(10), autodiff, (Shard(0),)).require_grad()
    down = laid_out(columns(10, 8), autodiff, (Shard(0),)).require_grad()
    down_bias = laid_out(columns(8), autodiff).require_grad()
    with tpm.ledger() as forward, tpm.no_implicit_gather():
        normed = tpm.layer_norm(x, ones, zeros)
        hidden = tpm.linear(normed, up, up_bias, "btd,df->btf").gelu()
        result = x + tpm.linear(hidden, down, down_bias, "btf,fd->btd")
    assert forward.count() == forward.count("all_reduce", operator="add") == 1
    loss = (result * result).sum()
    with tpm.ledger() as backward:
        loss.backward()
    assert backward.count() == backward.count("all_reduce") == 1
    # the bias of the pending product was added once, and its gradient is whole
    assert down_bias.grad.sharding == Replicate()


def test_a_users_own_operator(group):
    name = f"square_{len(registry)}"

    @tpm.operator("...->...", name=name)
    def square(plan, x):
        return x * x, x

    @square.define_backward
    def _(plan, saved, grad, wanted):
        return (2 * saved * grad,)

    try:
        for layout in [(REPLICATE,), (Shard(0),), (Partial(),)]:
            check_gradient(
                lambda x: getattr(x, name)(), [columns(5, 3)], group, [layout]
            )
    finally:
        del registry[name], methods[name]


@pytest.mark.parametrize(
    ("forward", "backward", "words"),
    [
        (lambda plan, x: x * 2, None, r"must return \(outputs, saved\)"),
        (lambda plan, x: (x.sum(), x), None, r"output 0 has the shape \(4, 3\)"),
        (lambda plan, x: (x.astype("f4"), x), None, "to be float64"),
        (
            lambda plan, x: (x * 2, x),
            lambda plan, saved, grad, wanted: 2 * grad,
            "a tuple of 1 gradients",
        ),
        (
            lambda plan, x: (x * 2, x),
            lambda plan, saved, grad, wanted: (grad.sum(),),
            "must have its shape",
        ),
        (lambda plan, x: (x * 2, x), None, "is not differentiable"),
    ],
)
def test_a_users_operator_that_returns_nonsense_is_told(
    group, forward, backward, words
):
    record = Operator("twice", "...->...", forward)
    record.backward = backward
    x = tpm.tensor(columns(4, 3), group.autodiff()).require_grad()
    with pytest.raises(tpm.TparmpiError, match=words):
        record(x).sum().backward()


def test_an_error_in_an_operator_names_no_later_call(group):
    x = tpm.tensor(columns(4, 4), group.autodiff()).require_grad()

    def fails(*_):
        raise ZeroDivisionError

    mapped = tpm.local_map(lambda x: (x.copy(), None), None, None, backward=fails)
    for call in (
        lambda: Operator("fails", "...->...", fails)(x),
        lambda: tpm.local_map(fails, None, None)(x),
        lambda: mapped(x).sum().backward(),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
        with tpm.ledger() as ledger:
            group.all_reduce(columns(2))
        assert ledger.count("all_reduce", operator="") == 1
