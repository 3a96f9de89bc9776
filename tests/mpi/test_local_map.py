"""Plain array code on shards."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases.case import values
from tparmpi.sharding import PARTIAL, REPLICATE, Partial, Replicate, Shard
from tparmpi.testing import all_layouts, check_gradient, laid_out

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture
def group():
    return tpm.group(tpm.devices())


def scaled(x, w):
    return (x * w).sum(1), (x, w)


def scaled_back(saved, grad):
    x, w = saved
    return grad[:, None] * w, (grad[:, None] * x).sum(0)


def test_rows_by_plain_arrays_with_gradients(group):
    """An operand that all members hold whole gets the sum of their gradients."""
    function = tpm.local_map(
        scaled, [Shard(0), Replicate()], Shard(0), backward=scaled_back
    )
    arrays = [values(5, 3), values(3, seed=1)]
    for members in (1, 2, 3, 4):
        place = tpm.group(tpm.devices()[:members])
        if not place.is_member:
            continue
        for layout in all_layouts(2):
            for other in all_layouts(1):
                x, w = (
                    laid_out(arrays[0], place, layout),
                    laid_out(arrays[1], place, other),
                )
                y = function(x, w)
                assert y.shape == (5,) and y.sharding == Shard(0)
                np.testing.assert_allclose(y.numpy(), (arrays[0] * arrays[1]).sum(1))
                check_gradient(
                    lambda x, w: function(x, w).gelu(), arrays, place, [layout, other]
                )


def test_columns_leave_a_pending_sum(group):
    """Each member sums its own columns; the gradient of the rest stays sharded."""
    function = tpm.local_map(
        scaled,
        [Shard(1), Shard(0)],
        Partial(),
        backward=scaled_back,
        shapes=lambda x, w: x[:1],
    )
    x, w = (tpm.tensor(values(*s), group.autodiff()) for s in ((4, 6), (6,)))
    x.require_grad()
    w.require_grad()
    with tpm.ledger() as ledger:
        y = function(x, w)
        assert ledger.count() == 0
    assert y.sharding == Partial()
    np.testing.assert_allclose(y.numpy(), (values(4, 6) * values(6)).sum(1))
    with tpm.ledger() as ledger:
        y.backward(tpm.tensor(values(4, seed=2), group))
    assert ledger.count() == 0
    expected = values(4, seed=2)[:, None] * values(6)
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-13)
    check_gradient(lambda x, w: function(x, w).gelu(), [values(4, 6), values(6)], group)


def test_axes_of_a_mesh():
    mesh = tpm.mesh(dp=2, tp=2)

    def product(x, w):
        return x @ w, (x, w)

    def back(saved, grad):
        x, w = saved
        return grad @ w.T, x.T @ grad

    function = tpm.local_map(
        product,
        [{"dp": Shard(0), "tp": Shard(1)}, {"tp": Shard(0)}],
        {"dp": Shard(0), "tp": Partial()},
        backward=back,
    )
    arrays = [values(5, 3), values(3, 4, seed=1)]
    for layouts in [
        [(REPLICATE, REPLICATE), (REPLICATE, REPLICATE)],
        [(Shard(0), Shard(0)), (Shard(1), PARTIAL)],
        [(PARTIAL, Shard(1)), (Shard(0), Shard(0))],
    ]:
        x, w = (laid_out(a, mesh, p) for a, p in zip(arrays, layouts, strict=True))
        np.testing.assert_allclose(function(x, w).numpy(), arrays[0] @ arrays[1])
        check_gradient(lambda x, w: function(x, w).gelu(), arrays, mesh, layouts)


def test_a_function_that_communicates(group):
    """By the group's own methods; the ledger calls it by its name."""

    def centred(x):
        return x - group.all_reduce(x.sum(0)) / total, None

    def back(saved, grad):
        return (grad - group.all_reduce(grad.sum(0)) / total,)

    total = 6
    function = tpm.local_map(
        centred, Shard(0), Shard(0), backward=back, shapes=lambda x: x
    )
    x = laid_out(values(6, 3), group, (Shard(0),))
    with tpm.ledger() as ledger:
        y = function(x)
    assert ledger.count("all_reduce", operator="centred") == ledger.count() == 1
    np.testing.assert_allclose(y.numpy(), values(6, 3) - values(6, 3).mean(0))
    check_gradient(lambda x: function(x).gelu(), [values(6, 3)], group, [(Shard(0),)])


def test_several_outputs_of_other_dtypes(group):
    def sort_rows(x, *, descending=False):
        order = np.argsort(-x if descending else x, axis=1)
        return (np.take_along_axis(x, order, 1), order), order

    def unsort(order, grad, _):
        out = np.empty_like(grad)
        np.put_along_axis(out, order, grad, 1)
        return (out,)

    function = tpm.local_map(
        sort_rows,
        Shard(0),
        [Shard(0), Shard(0)],
        backward=unsort,
        dtype=[None, np.int64],
    )
    x = laid_out(values(5, 4), group.autodiff(), (Shard(1),)).require_grad()
    ranked, order = function(x, descending=True)
    np.testing.assert_array_equal(ranked.numpy(), -np.sort(-values(5, 4), 1))
    np.testing.assert_array_equal(order.numpy(), np.argsort(-values(5, 4), 1))
    assert not order.requires_grad
    check_gradient(lambda x: function(x)[0].gelu(), [values(5, 4)], group)


def test_inside_of_what_is_run_again(group):
    function = tpm.local_map(
        scaled, [Shard(0), Replicate()], Shard(0), backward=scaled_back
    )
    arrays = [values(5, 3), values(3, seed=1)]
    check_gradient(tpm.recompute(lambda x, w: function(x, w).gelu()), arrays, group)
    slope = tpm.grad(lambda x, w: function(x, w).gelu().sum())
    x, w = (tpm.tensor(array, group) for array in arrays)
    assert slope(x, w).shape == (5, 3)


def test_without_a_backward_there_is_no_gradient(group):
    def double(x):
        return 2 * x

    x = tpm.tensor(values(4), group.autodiff()).require_grad()
    y = tpm.local_map(double, Shard(0), Shard(0))(x)
    np.testing.assert_array_equal(y.numpy(), 2 * values(4))
    with pytest.raises(tpm.AutodiffError, match="double is not differentiable"):
        y.sum().backward()
    with tpm.no_grad():
        assert not tpm.local_map(double, Shard(0), Shard(0))(x).requires_grad
    loss = tpm.local_map(scaled, [None, None], None, backward=scaled_back)(
        tpm.tensor(values(4, 4), group), x
    ).sum()
    x.write_local(np.zeros(4))
    with pytest.raises(tpm.AutodiffError, match="operand of scaled was written to"):
        loss.backward()


def test_results_share_no_memory_with_operands(group):
    x = tpm.tensor(values(4), group)
    y = tpm.local_map(lambda x: x, None, None)(x)
    x.write_local(np.zeros(4))
    np.testing.assert_array_equal(y.numpy(), values(4))
    with pytest.raises(ValueError, match="read-only"):
        tpm.local_map(lambda x: x.fill(1), None, None)(x)


def test_shells_need_to_be_told_shapes():
    place = tpm.group(tpm.devices()[:2])
    x = tpm.tensor(values(4, 3), place)
    told = tpm.local_map(
        lambda x: x.sum(1), Shard(0), Shard(0), shapes=lambda x: x[:1]
    )(x)
    assert told.shape == (4,) and told.is_shell != place.is_member
    if not place.is_member:
        with pytest.raises(tpm.UsageError, match=r"shapes=\.\.\."):
            tpm.local_map(lambda x: x.sum(1), Shard(0), Shard(0))(x)


def test_mistakes_are_told(group):
    x = tpm.tensor(values(4, 3), group)
    rows = Shard(0)
    for function, layouts, options, words in [
        (lambda x: 1.5, (rows, rows), {}, "must return arrays"),
        (lambda x: (x, x, x), (rows, [rows, rows]), {}, "a tuple of 2 arrays"),
        (lambda x: x.astype("f4"), (rows, rows), {}, "is to be float64"),
        (lambda x: x, (rows, rows), {"shapes": lambda x: (9, 9)}, "the shape"),
        (lambda x: x, (rows, rows), {"backward": scaled_back}, r"\(outputs, saved\)"),
        (lambda x: x, ([rows, rows], rows), {}, "2 layouts in and 1 operands"),
        (lambda x: x, (Shard(2), rows), {}, "names no dim"),
        (lambda x: x, ({"tp": rows}, rows), {}, "no axis 'tp'"),
        (lambda x: x, (rows, rows), {"shapes": lambda x: [x, x]}, "a list of 1"),
    ]:
        with pytest.raises(tpm.TparmpiError, match=words):
            tpm.local_map(function, *layouts, name="mine", **options)(x)
    with pytest.raises(tpm.UsageError, match="not a tensor"):
        tpm.local_map(lambda x: x, rows, rows)(values(4))
    uneven = tpm.local_map(lambda x: x[group.rank :], None, rows)
    with pytest.raises(tpm.ShapeError, match="by the chunk rule they hold"):
        uneven(x)
    other = tpm.local_map(lambda x: x[:, : 1 + group.rank], None, rows)
    with pytest.raises(tpm.ShapeError, match="must agree in their dtype"):
        other(x)
    y = laid_out(values(4, 3), group.autodiff()).require_grad()
    wrong = tpm.local_map(
        lambda x: (x, None), None, None, backward=lambda saved, grad: grad
    )
    with pytest.raises(tpm.UsageError, match="a tuple of 1 gradients"):
        wrong(y).sum().backward()
