"""Tensors in Python's and NumPy's syntax, on one device."""

from __future__ import annotations

import copy
import operator
import pickle
import timeit

import numpy as np
import pytest

import tparmpi as tpm

ARRAY = np.arange(1.0, 7.0).reshape(2, 3)
BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.pow,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


def on_device(array=ARRAY):
    return tpm.tensor(array, tpm.device())


def same(found, expected):
    assert isinstance(found, tpm.Tensor)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("apply", BINARY)
def test_operators_on_tensors_and_numbers_on_either_side(apply):
    x, other = on_device(), ARRAY[::-1] * 0.5
    same(apply(x, on_device(other)), apply(ARRAY, other))
    for number in (2, 2.5, np.float64(0.5), np.int64(3), True):
        same(apply(x, number), apply(ARRAY, number))
        same(apply(number, x), apply(number, ARRAY))


@pytest.mark.parametrize("apply", [operator.and_, operator.or_, operator.xor])
def test_bits(apply):
    integers, bools = np.arange(6), np.arange(6) % 2 == 0
    same(apply(on_device(integers), 3), apply(integers, 3))
    same(apply(5, on_device(integers)), apply(5, integers))
    same(apply(on_device(bools), on_device(integers > 2)), apply(bools, integers > 2))
    same(apply(on_device(bools), True), apply(bools, True))
    same(apply(on_device(bools), on_device(integers)), apply(bools, integers))


def test_one_operand():
    same(-on_device(), -ARRAY)
    same(abs(-on_device()), ARRAY)
    same(~on_device(ARRAY > 2), ~(ARRAY > 2))
    same(~on_device(np.arange(3)), ~np.arange(3))
    x = on_device()
    assert +x is x
    same(x @ x.T, ARRAY @ ARRAY.T)
    same(x[1, ::2], ARRAY[1, ::2])
    with pytest.raises(tpm.ShapeError, match=r"transpose\(dims\)"):
        _ = on_device(np.ones(3)).T


def test_augmented_assignment_rebinds():
    x = before = on_device()
    x += 1
    x *= 2
    x //= 3
    same(x, (ARRAY + 1) * 2 // 3)
    same(before, ARRAY)


def test_arrays_beside_tensors_are_refused():
    x = on_device()
    for apply in (*BINARY, operator.matmul):
        for operands in ((x, ARRAY), (ARRAY, x)):
            with pytest.raises((TypeError, tpm.UsageError), match="not a tensor"):
                apply(*operands)


def test_comparisons_are_elementwise_but_keys_are_identities():
    x, y = on_device(), on_device()
    assert (x == y).numpy().all()
    assert len({x, y, x}) == 2
    table = {x: "x", y: "y"}
    assert (table[x], table[y]) == ("x", "y")


def test_truth_length_and_membership():
    x = on_device()
    with pytest.raises(tpm.ShapeError, match=r"x.any\(\) or x.all\(\)"):
        bool(x > 3)
    assert bool((x > 3).any()) and not (x > 3).all()
    assert len(x) == 2
    with pytest.raises(TypeError, match="without dims"):
        len(x.sum())
    with pytest.raises(TypeError, match="compare with x == value"):
        _ = 3.0 in x
    with pytest.raises(TypeError, match=r"x.split\(n, dim\)"):
        list(x)
    with pytest.raises(TypeError, match="cannot be iterated over"):
        _, _ = x


def test_numbers_from_tensors():
    x = on_device(np.array([2.5]))
    assert (float(x), int(x), complex(x), bool(x)) == (2.5, 2, 2.5 + 0j, True)
    assert complex(x * 1j) == 2.5j
    for convert in (float, int, complex):
        with pytest.raises(tpm.ShapeError, match="6 elements, not one"):
            convert(on_device())
    index = on_device(np.array(1, np.int32))
    assert "abc"[index] == "b"
    assert operator.index(index) == 1
    for no_index in (x, on_device(np.array([1])), on_device(np.array(True))):
        with pytest.raises(TypeError, match="only an integer tensor without dims"):
            operator.index(no_index)


def test_numpy_takes_whole_values():
    x = on_device()
    array = np.asarray(x)
    assert type(array) is np.ndarray
    np.testing.assert_array_equal(array, ARRAY)
    array[:] = 0
    same(x, ARRAY)
    assert np.array(x, np.float32).dtype == np.float32
    lent = np.asarray(x, copy=False)
    assert not lent.flags.writeable
    assert np.shares_memory(lent, x.local)
    with pytest.raises(ValueError, match="leave out copy=False"):
        np.asarray(x, np.float32, copy=False)


def test_numpys_functions_are_refused():
    x = on_device()
    for call in (np.add, np.multiply):
        with pytest.raises(TypeError, match="__array_ufunc__"):
            call(x, x)
    with pytest.raises(TypeError, match=r"numpy.sum .* call tpm.sum, or"):
        np.sum(x)
    with pytest.raises(TypeError, match=r"numpy.hstack takes no tensors: give it"):
        np.hstack([x, x])


class Old:
    """A consumer of DLPack that cannot be told that memory is read-only."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        options.pop("max_version", None)
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_dlpack_lends_the_array():
    x = on_device()
    assert x.__dlpack_device__() == (1, 0)
    lent = np.from_dlpack(x)
    np.testing.assert_array_equal(lent, ARRAY)
    assert np.shares_memory(lent, x.local) and not lent.flags.writeable
    for copied in (np.from_dlpack(x, copy=True), np.from_dlpack(Old(x))):
        np.testing.assert_array_equal(copied, ARRAY)
        assert not np.shares_memory(copied, x.local)


def test_copies():
    x = tpm.tensor(ARRAY, tpm.device().autodiff()).require_grad()
    for made in (x.copy(), copy.copy(x)):
        same(made, ARRAY)
        assert not np.shares_memory(made.local, x.local)
        made.sum().backward()
    same(x.grad, np.full((2, 3), 2.0))
    assert not x.detach().copy().requires_grad
    same(x.astype("float32"), ARRAY.astype(np.float32))
    same(x.astype(int), ARRAY.astype(int))
    assert x.astype(float) is x


def test_what_cannot_be_doubled_says_why():
    x = on_device()
    with pytest.raises(TypeError, match=r"x.detach\(\).copy\(\)"):
        copy.deepcopy(x)
    with pytest.raises(TypeError, match=r"pickle x.numpy\(\) \(collective\)"):
        pickle.dumps(x)
    with pytest.raises(TypeError, match=r"tpm.checkpoint.save"):
        pickle.dumps({"weights": [x]})


def test_repr_is_local_and_shows_no_values():
    text = repr(on_device())
    assert "shape=(2, 3)" in text and "dtype=float64" in text and "6." not in text
    assert str(on_device()) == text


@pytest.mark.parametrize(
    ("apply", "most"),
    [
        (lambda x, y: x + y, 12),
        (lambda x, y: x + 2.0, 20),
        (lambda x, y: x * 2.0, 20),
        (lambda x, y: x > y, 16),
    ],
    ids=["add", "add_number", "scale", "compare"],
)
def test_small_operators_are_quick(apply, most):
    """Microseconds a call; several times what it takes, as other work disturbs."""
    x = on_device(np.ones((4, 4), np.float32))
    seconds = min(timeit.repeat(lambda: apply(x, x), number=500, repeat=20))
    assert seconds / 500 * 1e6 < most
