"""Arrays without data have the shapes and dtypes that NumPy's have."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tparmpi.backend import MetaArray, get
from tparmpi.errors import DeviceError

META = get("meta")


def arrays(xp) -> dict[str, object]:
    """Operands for the expressions below, of one or the other kind."""
    made = {
        "x": np.ones((3, 1, 5), np.float32),
        "y": np.ones((4, 5)),
        "i": np.ones((2, 3), np.int32),
        "b": np.ones((3, 1, 5), bool),
        "z": np.ones((), np.float16),
        "e": np.ones((0, 4)),
        "h": np.ones((4, 2), ml_dtypes.bfloat16),
        "c": np.ones((4,), np.complex64),
        "k": np.ones((3, 1, 2), np.int64),
    }
    if xp is np:
        return made
    return {name: META.from_host(array) for name, array in made.items()}


EXPRESSIONS = """
x + y
x + 1
x * 2.5
2 - x
-x
x / i[0, 0]
x // 2
x ** 2
i / i
i + 1.0
x @ y.T
x[0] @ y.T @ y[:, 0]
y @ y[0]
y[0] @ y.T
h * 2.0
h.astype("f4") @ h.T
x > y
(x > y) & b
~b
z + x
z * 1.5
x.sum()
x.sum(1)
x.sum(axis=(0, -1), keepdims=True)
x.mean(-1)
i.sum()
i.mean()
b.sum(0)
b.any()
e.sum(0)
h.sum(0)
x.max(axis=2, keepdims=True)
x.argmax(1)
x.argmax()
x.var(0)
x.std()
y.cumsum(0)
y.cumsum()
i.cumprod(1)
x.prod(0)
xp.logaddexp(x, y)
xp.add.reduce(y)
xp.add.reduce(y, axis=1, keepdims=True)
xp.add.accumulate(y, 1)
xp.maximum.reduce(i, axis=-1)
xp.add.reduceat(y, [0, 2], axis=0)
xp.add.outer(y[0], i)
xp.exp(x)
xp.exp(i)
xp.sqrt(h)
xp.frexp(y)[1]
xp.ldexp(y, i[0, 0])
xp.isfinite(x)
xp.sign(i)
xp.where(b, x, 0.0)
xp.where(b, x, y[0])
xp.clip(x, 0, 1)
xp.reshape(x, (5, -1))
x.reshape(15)
x.reshape((3, 5))
x.reshape(-1)
x.ravel()
x.transpose(2, 0, 1)
x.transpose((2, 0, 1))
x.T
x.swapaxes(0, 2)
xp.moveaxis(x, 0, -1)
xp.expand_dims(x, (0, -1))
x.squeeze(1)
xp.squeeze(x)
xp.broadcast_to(x, (2, 3, 4, 5))
xp.split(y, 2, axis=0)[1]
xp.concatenate([y, y[:1], e.T[:, :5].reshape(0, 5)], axis=0)
xp.concatenate([x, x.astype("f8")], axis=-1)
xp.stack([y, y], axis=-1)
xp.stack((x, x))
xp.flip(x, 2)
xp.roll(y, 2, axis=1)
xp.repeat(y, 3, axis=1)
y.repeat(2)
xp.tile(y, (2, 1))
xp.pad(y, ((1, 2), (0, 0)))
xp.take(y, i, axis=0)
xp.take(x, i, axis=-1)
y.take(i)
xp.take_along_axis(x, k, axis=-1)
xp.argsort(y, axis=0)
xp.sort(y)
xp.tril(y, 1)
xp.triu(x)
xp.einsum("abc,dc->adb", x, y)
xp.einsum("ii->i", y[:, :4])
xp.tensordot(x, y, axes=([2], [1]))
xp.zeros_like(i)
xp.full_like(x, 3, dtype="f8")
xp.empty_like(x)
xp.result_type(x, y)
xp.zeros((2, 3))
xp.zeros(3, "i4")
xp.ones(())
xp.full((2,), 1.5, "f4")
xp.full((2,), 3)
xp.arange(5)
xp.arange(1, 7, 2.0)
xp.eye(3)
xp.linspace(0, 1, 7)
xp.asarray(3.5)
xp.array([1, 2], dtype="i2")
xp.asarray(x, "f8")
x[0]
x[..., None]
x[1:, :, ::-2]
x[:, 0, 2]
y[i]
y[i, 0]
y[:, i]
x[0, :, i]
x[:2, [0], i[0]]
y[[True, False, True, True]]
e[:, 1]
z[()]
c.real
c * c.conj()
abs(c)
y.view("f4")
h.view("u2")
xp.diagonal(y)
xp.nan_to_num(y)
xp.copy(x)
x.copy()
x.astype(bool)
y.nbytes
y.strides
y[:0].size
len(y)
[row for row in y][3]
xp.ndim(y)
"""


@pytest.mark.parametrize("expression", EXPRESSIONS.strip().splitlines())
def test_expression(expression: str) -> None:
    wanted, found = (eval(expression, {"xp": xp, **arrays(xp)}) for xp in (np, META.xp))
    if isinstance(wanted, np.ndarray | np.generic):
        assert isinstance(found, MetaArray)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    else:
        assert found == wanted


@pytest.mark.parametrize(
    "statement",
    [
        "y += 1",
        "y *= x",
        "y[1:] = 0",
        "y[i] = y[i]",
        "y[y > 0] = 0",
        "xp.exp(y, out=y)",
        "xp.add(y, 1, out=y)",
        "y.fill(3)",
        "xp.add.at(y, i, 1.0)",
        "xp.put_along_axis(x, k, 0, -1)",
        "xp.copyto(y, 0)",
    ],
)
def test_writing_changes_nothing(statement: str) -> None:
    names = {"xp": META.xp, **arrays(META.xp)}
    before = {name: names[name] for name in "xy"}
    if "y *= x" in statement:
        names["x"] = names["y"]
    exec(statement, names)
    assert names["y"] is before["y"]


@pytest.mark.parametrize(
    "expression",
    [
        "float(z)",
        "int(z)",
        "bool(z)",
        "if_ if z else 0",
        "np.asarray(y)",
        "y.tolist()",
        "y.item()",
        "y[y > 0]",
        "xp.nonzero(y)",
        "xp.flatnonzero(y)",
        "xp.where(b)",
        "xp.unique(i)",
        "xp.allclose(y, y)",
        "[1, 2][z]",
    ],
)
def test_values_are_refused(expression: str) -> None:
    with pytest.raises(DeviceError, match="no values"):
        eval(expression, {"xp": META.xp, "np": np, **arrays(META.xp)})


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, y = META.zeros((3, 4), "f8"), META.zeros((5, 4), "f8")
    for wrong in (
        lambda: x + y,
        lambda: x @ y,
        lambda: x[3],
        lambda: META.xp.concatenate([x, y], axis=1),
        lambda: META.xp.stack([x, y]),
        lambda: x.reshape(5, 5),
        lambda: x.__setitem__(slice(1), y),
    ):
        with pytest.raises((ValueError, IndexError)):
            wrong()


def test_large_arrays_cost_nothing() -> None:
    """A product of matrices of 2**60 elements, and what is made of it."""
    x = META.zeros((1 << 30, 1 << 30), "f4")
    y = META.xp.exp(x @ x.T + 1).sum(0)
    assert y.shape == (1 << 30,)
    assert META.random_normal((1, 2), x.shape, (0, 0), x.shape, "f4").shape == x.shape
    loss, _ = META.attention(*[META.zeros((4, 1 << 20, 8, 64), "f4")] * 3, 1.0)
    assert loss.shape == (4, 1 << 20, 8, 64)
