"""Operators that move and find elements, on one device: keys, special cases, errors."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

import tparmpi as tpm
from tests.cases.case import values

IDS = np.array([[2, 0, -1], [1, 1, 0]])


def on_device(array) -> tpm.Tensor:
    return tpm.tensor(np.asarray(array), tpm.device())


def same(found: tpm.Tensor, expected) -> None:
    """Values, shape and dtype alike."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.numpy(), expected)


# Keys


@given(st.data())
def test_basic_keys_are_numpys(data):
    shape = data.draw(array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    key = data.draw(basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    array = values(*shape)
    same(on_device(array)[key], array[key])


@pytest.mark.parametrize(
    "key",
    [
        np.s_[IDS],
        np.s_[:, IDS],
        np.s_[..., IDS],
        np.s_[1, IDS],
        np.s_[IDS, 1],
        np.s_[1, IDS, :, 0],
        np.s_[1, :, IDS],
        np.s_[1, ..., IDS],
        np.s_[IDS, :, 1],
        np.s_[IDS, ..., 1],
        np.s_[1, None, IDS],
        np.s_[:, 1, IDS, 2],
        np.s_[:, 1, :, IDS],
        np.s_[1, IDS, ..., 1, 2],
        np.s_[1, 1, IDS, ...],
        np.s_[1, 1, ..., IDS, 2],
        np.s_[1, 2, 0, ..., IDS],
        np.s_[None, IDS, None, ::-1],
        np.s_[::2, IDS[0], 1:],
        np.s_[[2, 0], 1:],
        np.s_[[]],
        np.s_[(0, 1), 2],
        np.s_[np.array(2), IDS],
        np.s_[np.int8(1), IDS.astype(np.int8)],
    ],
    ids=lambda key: re.sub(r"\s+", "", str(key)),
)
def test_keys_with_an_array_are_numpys(key):
    array = values(3, 4, 3, 5)
    same(on_device(array)[key], array[key])
    items = key if isinstance(key, tuple) else (key,)
    tensors = tuple(
        on_device(item) if isinstance(item, np.ndarray) and item.ndim else item
        for item in items
    )
    same(on_device(array)[tensors], array[key])


def test_a_key_that_leaves_all_is_the_tensor_itself():
    x = on_device(values(3, 2))
    assert x[...] is x and x[:, 0:2] is x and x[()] is x


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        (3, tpm.ShapeError, "index 3 is outside dim 0 of size 3; indices go from -3"),
        (np.s_[..., -3], tpm.ShapeError, "index -3 is outside dim 1 of size 2"),
        (np.s_[0, 0, 0], tpm.ShapeError, r"3 indices are given, .* \(3, 2\) has 2"),
        (np.s_[..., 0, ...], tpm.UsageError, "one ellipsis"),
        (np.s_[[0], [1]], tpm.UsageError, r"2 arrays of indices.*take\(x, ids, dim\)"),
        (True, tpm.UsageError, "truth values"),
        (np.zeros((3, 2), bool), tpm.UsageError, r"where\(mask"),
        (1.0, tpm.UsageError, "it has a float"),
        ("a", tpm.UsageError, "it has a str"),
        (np.s_[::0], tpm.UsageError, "slice step cannot be zero"),
        (np.s_["a":], tpm.UsageError, "is no slice"),
        ([0, 5], tpm.UsageError, "take: the index 5 is outside dim 0 of size 3"),
        ([0.5], tpm.UsageError, "it has a ndarray"),
    ],
)
def test_keys_that_are_refused(key, error, words):
    with pytest.raises(error, match=words):
        on_device(values(3, 2))[key]


# Indices


def test_take_of_scalars_nothing_and_other_dtypes():
    x = values(3, 4)
    same(tpm.take(on_device(x), on_device(np.uint8(2)), 1), x[:, 2])
    none = np.zeros((0, 2), np.int32)
    same(tpm.take(on_device(x), on_device(none)), np.take(x, none, 0))
    empty = np.zeros((3, 0))
    same(tpm.take(on_device(empty), on_device(IDS)), np.take(empty, IDS, 0))
    for kind in (bool, np.int16, np.complex64, ml_dtypes.bfloat16):
        array = np.arange(6).reshape(3, 2).astype(kind)
        same(tpm.take(on_device(array), on_device(IDS)), array[IDS])
        along = np.array([[1, 0, 1]])
        expected = np.take_along_axis(array, along.T, 1)
        same(on_device(array).gather(on_device(along.T), 1), expected)


def test_gradients_of_indices_are_added_up_in_float32():
    """2,049 times 2**-11 is 1.0005; in float16 the sum would stay at 1."""
    x = tpm.tensor(np.zeros((2, 1), np.float16), tpm.device().autodiff())
    x.require_grad()
    ids = on_device(np.zeros(2049, np.int64))
    (tpm.take(x, ids) * 2.0**-11).sum().backward()
    assert x.grad.dtype == np.float16
    assert x.grad.numpy()[0, 0] == np.float16(2049 / 2048)
    y = tpm.tensor(np.zeros(1, np.float16), tpm.device().autodiff()).require_grad()
    (y.expand((2049,)) * 2.0**-11).sum().backward()
    assert y.grad.numpy()[0] == np.float16(2049 / 2048)


def test_scatter_add_promotes_and_adds_integers():
    x, y = np.array([1, 2, 3], np.int32), np.array([10, 20, 30], np.int64)
    ids = np.array([2, 2, -3])
    same(tpm.scatter_add(*map(on_device, (x, ids, y))), np.array([31, 2, 33]))
    same(
        tpm.scatter_add(on_device(x * 0.5), on_device(ids), on_device(y)),
        np.array([30.5, 1, 31.5]),
    )
    none = np.zeros(0, np.int64)
    same(tpm.scatter_add(on_device(x), on_device(none), on_device(none)), x.astype(int))


def test_one_hot_has_the_default_dtype_and_any_depth():
    hot = on_device(IDS % 3).one_hot(3)
    assert hot.dtype == tpm.device().settings.float
    same(on_device(np.zeros((2, 0), int)).one_hot(0, bool), np.zeros((2, 0, 0), bool))
    same(on_device(np.int64(1)).one_hot(2, "int8"), np.array([0, 1], np.int8))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, i: tpm.take(x, x), tpm.UsageError, "indices must be integers"),
        (lambda x, i: x.take(i, 2), tpm.ShapeError, "has no dim 2"),
        (lambda x, i: x.take(i, 1), tpm.UsageError, "index 2 is outside dim 1 of"),
        (lambda x, i: x.gather(i[0]), tpm.ShapeError, "indices of 1 dims .* of 2"),
        (lambda x, i: x.gather(i), tpm.ShapeError, "only dim 0 may differ"),
        (lambda x, i: x.gather(i[:, :2] - 4), tpm.UsageError, "gather: the index -4"),
        (lambda x, i: x.scatter_add(i, x), tpm.ShapeError, "must have the same"),
        (lambda x, i: x.scatter_add(i, i), tpm.ShapeError, "only dim 0 may differ"),
        (lambda x, i: i.one_hot(2), tpm.UsageError, "one_hot: the id -1"),
        (lambda x, i: (i * i).one_hot(4), tpm.UsageError, "one_hot: the id 4"),
        (lambda x, i: x.one_hot(2), tpm.UsageError, "must be integers"),
        (lambda x, i: tpm.tril(x[0]), tpm.ShapeError, "fewer than two dims"),
        (lambda x, i: x.squeeze(0), tpm.ShapeError, "of size 3, not 1"),
        (lambda x, i: x.expand_dims(4), tpm.ShapeError, "has not the dims"),
        (lambda x, i: x.expand_dims((0, -4)), tpm.ShapeError, "stands twice"),
        (lambda x, i: x.expand((3, 4)), tpm.ShapeError, "cannot be repeated to"),
        (lambda x, i: x.expand((2,)), tpm.ShapeError, "cannot be repeated to"),
        (lambda x, i: x.expand((-1, 3, 2)), tpm.ShapeError, "cannot be repeated"),
        (lambda x, i: tpm.stack([]), tpm.ShapeError, "no tensors"),
        (lambda x, i: tpm.stack([x, i]), tpm.ShapeError, "operand 1 has the shape"),
        (lambda x, i: tpm.stack([x], 3), tpm.ShapeError, "no place for a new dim 3"),
        (lambda x, i: tpm.concat([x, i], 0), tpm.ShapeError, "dim 1 of operand 1"),
        (lambda x, i: x.pad((1,)), tpm.ShapeError, "widths for 1 dims"),
        (lambda x, i: x.pad((1, (0, -1))), tpm.ShapeError, "cut with a slice"),
        (lambda x, i: i.pad((1, 1), 0.5), tpm.UsageError, "0.5 does not fit into"),
        (lambda x, i: i.cast("i1").pad((1, 1), 128), tpm.UsageError, "does not fit"),
        (lambda x, i: x.pad((1, 1), "a"), tpm.UsageError, "does not fit into"),
        (lambda x, i: x.roll((1, 2), 0), tpm.ShapeError, "2 shifts .* 1 dims"),
        (lambda x, i: x.repeat(-1), tpm.ShapeError, "0 or more"),
        (lambda x, i: x.topk(4, 0), tpm.ShapeError, "from 0 to the 3 elements"),
        (lambda x, i: x.sort(2), tpm.ShapeError, "no dim 2"),
    ],
)
def test_what_is_refused(call, error, words):
    x, ids = on_device(values(3, 2)), on_device(IDS)
    with pytest.raises(error, match=words):
        call(x, ids)


# Order


@pytest.mark.parametrize("kind", ["f8", "f2", ml_dtypes.bfloat16, "i4", "u1", "?"])
def test_sort_is_stable_in_every_dtype(kind):
    x = np.array([[3, 1, 1, 0, 3], [0, 2, 0, 2, 1]]).astype(kind)
    order = np.argsort(x.astype(float), 1, kind="stable")
    values_, indices = on_device(x).sort()
    same(indices, order)
    same(values_, np.take_along_axis(x, order, 1))
    down = np.argsort(-x.astype(float), 1, kind="stable")
    values_, indices = on_device(x).sort(descending=True)
    same(indices, down)
    values_, indices = on_device(x).topk(2)
    same(indices, down[:, :2])
    same(values_, np.take_along_axis(x, down[:, :2], 1))


def test_what_is_not_a_number_is_largest():
    x = np.array([1.0, np.nan, -np.inf, np.inf, np.nan])
    same(on_device(x).sort()[1], np.array([2, 0, 3, 1, 4]))
    same(on_device(x).sort(descending=True)[1], np.array([1, 4, 3, 0, 2]))
    same(on_device(x).topk(3)[1], np.array([1, 4, 3]))
    same(on_device(x).topk(2, largest=False)[0], np.array([-np.inf, 1.0]))
    same(on_device(np.zeros((2, 0))).topk(0)[1], np.zeros((2, 0), int))
    same(on_device(np.zeros((0, 3))).sort()[0], np.zeros((0, 3)))


def test_pad_keeps_the_dtype_and_takes_any_value():
    x = values(2, 2)
    for value in (np.nan, -np.inf, 3, True):
        expected = np.pad(x, 1, constant_values=value)
        same(on_device(x).pad((1, 1), value), expected)
    half = x.astype(np.float16)
    same(on_device(half).pad((1, 1), 0.5), np.pad(half, 1, constant_values=0.5))
    same(
        on_device(x > 0).pad((0, 1), True),
        np.pad(x > 0, ((0, 0), (1, 1)), constant_values=True),
    )


def test_arguments_may_be_numpys_integers():
    x, n = values(4, 2), np.int64(2)
    same(on_device(x).roll(n, np.int8(0)), np.roll(x, 2, 0))
    same(on_device(x).pad((n, 0)), np.pad(x, ((2, 2), (0, 0))))
    same(on_device(x).split(n)[1], x[2:])
    same(on_device(x).split(np.array([1, 3]))[1], x[1:])
    same(on_device(x).repeat(n), np.repeat(x, 2, 0))
    same(on_device(x).topk(n, np.int8(0))[0], np.sort(x, 0)[:1:-1])


def test_nothing_to_do_is_the_tensor_itself():
    x = on_device(values(3, 2))
    for y in (x.pad((0, 0)), x.roll(3), x.repeat(1), x.expand((-1, 2)), x.squeeze()):
        assert y is x


def test_dims_of_size_0_and_1_and_none():
    x = values(1, 0, 3)
    same(on_device(x).flip(), np.flip(x))
    same(on_device(x).roll((1, 1), (1, 2)), np.roll(x, (1, 1), (1, 2)))
    same(on_device(x).repeat(2, 1), np.repeat(x, 2, 1))
    same(on_device(x).expand((4, 2, 0, 3)), np.broadcast_to(x, (4, 2, 0, 3)))
    same(on_device(x).squeeze(), x[0])
    same(
        on_device(x).pad(((0, 0), (1, 1), (0, 0)), 2.0),
        np.pad(x, ((0, 0), (1, 1), (0, 0)), constant_values=2.0),
    )
    same(on_device(x).tril(), np.tril(x))
    scalar = on_device(np.array(2.0))
    same(scalar.expand_dims((0, -1)), np.array([[2.0]]))
    same(scalar.expand((2, 2)), np.full((2, 2), 2.0))
    same(tpm.stack([scalar, scalar]), np.array([2.0, 2.0]))
    same(scalar.flip(), np.array(2.0))
    same(scalar.pad(()), np.array(2.0))


# History


def test_slices_are_views_whose_writes_are_seen():
    x = tpm.tensor(values(4, 3), tpm.device().autodiff()).require_grad()
    with tpm.no_grad():
        seen = [
            x[1:3, None],
            x.flip(0),
            x.squeeze(),
            x.split(2)[1],
            x.expand((2, 4, 3)),
        ]
    for view in seen:
        assert np.may_share_memory(view.array, x.array)
        loss = (
            view
            * tpm.tensor(np.ones(view.shape), tpm.device().autodiff()).require_grad()
        ).sum()
        x.write_local(np.zeros((4, 3)))
        with pytest.raises(tpm.AutodiffError, match="was written to"):
            loss.backward()


def test_indices_have_no_history():
    x = tpm.tensor(values(4, 3), tpm.device().autodiff()).require_grad()
    largest, indices = x.topk(2, 0)
    assert largest.requires_grad and not indices.requires_grad
    picked = x.gather(indices, 0)
    (picked * largest).sum().backward()
    assert np.count_nonzero(x.grad.numpy()) == 6
    assert not on_device(IDS % 3).one_hot(3).requires_grad


def test_repeated_indices_get_all_gradients():
    x = tpm.tensor(values(3), tpm.device().autodiff()).require_grad()
    x[on_device(np.array([1, 1, 0, 1, -2]))].sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [1, 4, 0])


def test_reshape_takes_a_number_and_no_fractions():
    x = tpm.tensor(np.arange(6.0).reshape(3, 2), tpm.device())
    assert x.reshape(6).shape == x.reshape(-1).shape == x.reshape([6]).shape == (6,)
    assert x.reshape(np.array([2, 3])).shape == (2, 3)
    with pytest.raises(TypeError, match="integer"):
        x.reshape((2.5, 3))
    with pytest.raises(tpm.ShapeError, match="do not fit"):
        x.reshape(5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.softmax((0, 1)),
        lambda x: x.log_softmax(None),
        lambda x: x.sort((0, 1)),
        lambda x: x.roll(1, 0).sort(None),
        lambda x: x.split(1, (0, 1)),
        lambda x: tpm.concat([x, x], (0, 1)),
    ],
)
def test_several_dims_where_one_is_needed(call):
    with pytest.raises(tpm.UsageError, match="a dim is given by its number"):
        call(tpm.tensor(np.ones((2, 3)), tpm.device()))


def test_numbers_that_are_none():
    x = tpm.tensor(np.ones((2, 3)), tpm.device())
    with pytest.raises(tpm.ShapeError, match="whole number"):
        x.repeat((2, 1))
    with pytest.raises(TypeError, match="a number is needed, not a tensor"):
        x.scale(x)
