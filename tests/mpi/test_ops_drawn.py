"""Operators on drawn shapes in drawn layouts, the same draws on all ranks."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import tparmpi as tpm
from tests.cases.case import Case, values
from tests.cases.indexing import scatter_add
from tests.cases.rearranging import first
from tests.comparison import errors, unchecked_reference
from tparmpi.testing import all_layouts

pytestmark = pytest.mark.mpi(min_size=4)

# No rank may stop early or try other draws than the others: no clock, no shrinking.
TOGETHER = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

SIZES = st.integers(0, 6)
FULL_SIZES = st.integers(1, 6)


@st.composite
def shapes(draw, fewest: int = 0, most: int = 3, sizes=SIZES) -> tuple[int, ...]:
    return tuple(draw(st.lists(sizes, min_size=fewest, max_size=most)))


@st.composite
def broadcast_pairs(draw) -> Case:
    """Elementwise operators of two operands, with sizes 1 and missing dims."""
    name, reference = draw(st.sampled_from(PAIRS))
    whole = draw(shapes())
    operands = []
    for seed in range(2):
        shape = [draw(st.sampled_from([1, n])) for n in whole]
        missing = draw(st.integers(0, len(shape)))
        operands.append(positive(*shape[missing:], seed=seed))
    return Case(name, getattr(tpm, name), reference, operands)


PAIRS = [("add", np.add), ("sub", np.subtract), ("mul", np.multiply)]


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """Distinct numbers between 0.4 and 2.6, where no operator has a kink."""
    return values(*shape, seed=seed) + 1.5


def dim_of(shape: tuple[int, ...]):
    return st.integers(0, len(shape) - 1)


@st.composite
def reductions(draw) -> Case:
    """Over any dims, kept or not."""
    name, reference, empty = draw(st.sampled_from(REDUCTIONS))
    shape = draw(shapes(sizes=SIZES if empty else FULL_SIZES))
    dims = tuple(draw(st.sets(dim_of(shape)))) if shape else ()
    dim = draw(st.sampled_from([None, dims]))
    keepdims = draw(st.booleans())
    return Case(
        name,
        lambda x: getattr(tpm, name)(x, dim, keepdims),
        lambda x: reference(x, axis=dim, keepdims=keepdims),
        [values(*shape)],
        f"{name} over {dim}",
    )


def logsumexp(x, axis, keepdims):
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=keepdims))


# Whether there is a result where there is nothing to reduce.
REDUCTIONS = [
    ("sum", np.sum, True),
    ("mean", np.mean, False),
    ("max", np.max, False),
    ("min", np.min, False),
    ("prod", np.prod, True),
    ("var", np.var, False),
    ("std", np.std, False),
    ("norm", np.linalg.vector_norm, True),
    ("logsumexp", logsumexp, False),
]


@st.composite
def decisions(draw) -> Case:
    """Whole results of a reduction, over one dim or all."""
    name = draw(st.sampled_from(["argmax", "argmin", "any", "all"]))
    shape = draw(shapes(1, sizes=FULL_SIZES))
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    keepdims = draw(st.booleans())
    small = draw(st.integers(1, 3))
    return Case(
        name,
        lambda x: getattr(tpm, name)(x, dim, keepdims),
        lambda x: getattr(np, name)(x, axis=dim, keepdims=keepdims),
        [np.round(values(*shape) * small)],
        name,
        constant=(0,),
    )


@st.composite
def running_sums(draw) -> Case:
    shape = draw(shapes(1))
    dim = draw(dim_of(shape))
    return Case(
        "cumsum", lambda x: x.cumsum(dim), lambda x: x.cumsum(dim), [values(*shape)]
    )


@st.composite
def products(draw) -> Case:
    """Matrix products as NumPy's: vectors, matrices, batches."""
    m, k, n = (draw(SIZES) for _ in range(3))
    batch = draw(shapes(most=1))
    left = (*draw(st.sampled_from([(), batch])), m, k)
    right = (*draw(st.sampled_from([(), batch])), k, n)
    if draw(st.integers(0, 4)) == 0:
        left = (k,)
    if draw(st.integers(0, 4)) == 0:
        right = (k,)
    operands = [values(*left), values(*right, seed=1)]
    return Case("matmul", tpm.matmul, np.matmul, operands)


@st.composite
def sums_of_products(draw) -> Case:
    """Any einsum string of up to three operands."""
    letters = "abcd"
    sizes = {letter: draw(st.integers(0, 5)) for letter in letters}
    words = [
        "".join(draw(st.permutations(letters))[: draw(st.integers(1, 3))])
        for _ in range(draw(st.integers(1, 3)))
    ]
    have = sorted(set("".join(words)))
    result = "".join(draw(st.permutations(have))[: draw(st.integers(0, len(have)))])
    text = f"{','.join(words)}->{result}"
    operands = [
        values(*[sizes[letter] for letter in word], seed=seed)
        for seed, word in enumerate(words)
    ]
    return Case(
        "einsum",
        lambda *x: tpm.einsum(text, *x),
        lambda *x: np.einsum(text, *x),
        operands,
        text,
    )


@st.composite
def reshapes(draw) -> Case:
    """From any shape to any other of as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), max_size=4))
    if draw(st.integers(0, 9)) == 0:
        factors.append(0)
    before, after = (
        tuple(
            prod(factors[a:b])
            for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)
        )
        for cuts in (
            sorted(draw(st.lists(st.integers(0, len(factors)), max_size=2)))
            for _ in range(2)
        )
    )
    return Case(
        "reshape",
        lambda x: x.reshape(after),
        lambda x: x.reshape(after),
        [values(*before)],
        f"to {after}",
    )


@st.composite
def transposes(draw) -> Case:
    shape = draw(shapes())
    dims = tuple(draw(st.permutations(range(len(shape)))))
    return Case(
        "transpose",
        lambda x: x.transpose(dims),
        lambda x: x.transpose(dims),
        [values(*shape)],
    )


@st.composite
def joins(draw) -> Case:
    """Up to three operands joined along a dim."""
    shape = draw(shapes(1))
    dim = draw(dim_of(shape))
    operands = [
        values(*shape[:dim], draw(SIZES), *shape[dim + 1 :], seed=seed)
        for seed in range(draw(st.integers(1, 3)))
    ]
    return Case(
        "concat",
        lambda *x: tpm.concat(x, dim),
        lambda *x: np.concatenate(x, dim),
        operands,
        f"dim {dim}",
    )


@st.composite
def pieces(draw) -> Case:
    """A dim cut anywhere."""
    shape = draw(shapes(1))
    dim = draw(dim_of(shape))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    sizes = tuple(np.diff([0, *cuts, shape[dim]]).tolist())
    return Case(
        "split",
        lambda x: x.split(sizes, dim),
        lambda x: np.split(x, cuts, dim),
        [values(*shape)],
        f"{sizes} of dim {dim}",
    )


@st.composite
def cuts(draw) -> Case:
    """Basic keys: integers, slices of any step, new dims, an ellipsis."""
    shape = draw(shapes())
    key = draw(basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    return Case(
        "getitem", lambda x: x[key], lambda x: x[key], [values(*shape)], str(key)
    )


@st.composite
def shifts(draw) -> Case:
    """Padded, rolled or repeated."""
    shape = draw(shapes(1))
    dim = draw(dim_of(shape))
    widths = tuple(draw(st.tuples(*[st.integers(0, 3)] * 2)) for _ in shape)
    amount = draw(st.integers(-9, 9))
    apply, reference = draw(
        st.sampled_from(
            [
                (lambda x: x.pad(widths), lambda x: np.pad(x, widths)),
                (lambda x: x.roll(amount, dim), lambda x: np.roll(x, amount, dim)),
                (
                    lambda x: x.repeat(abs(amount) // 2, dim),
                    lambda x: np.repeat(x, abs(amount) // 2, dim),
                ),
            ]
        )
    )
    name = f"{widths} {amount} {dim}"
    return Case("pad", apply, reference, [values(*shape)], name)


@st.composite
def indexed(draw) -> Case:
    """Taken, gathered, or added at indices that occur several times."""
    shape = draw(shapes(1, sizes=FULL_SIZES))
    dim = draw(dim_of(shape))
    size = shape[dim]
    along = (*shape[:dim], draw(SIZES), *shape[dim + 1 :])
    ids = np.arange(prod(along)).reshape(along) * 7 % (2 * size) - size
    if draw(st.booleans()):
        few = draw(shapes(most=2))
        chosen = np.arange(prod(few)).reshape(few) * 7 % (2 * size) - size
        return Case(
            "take",
            lambda x, i: x.take(i, dim),
            lambda x, i: np.take(x, i, dim),
            [values(*shape), chosen],
        )
    return Case(
        "gather",
        lambda x, i, y: x.scatter_add(i, x.gather(i, dim) * y, dim),
        lambda x, i, y: scatter_add(x, i, np.take_along_axis(x, i, dim) * y, dim),
        [values(*shape), ids, values(*along, seed=1)],
    )


@st.composite
def orders(draw) -> Case:
    """The first few of numbers of which many are equal."""
    shape = draw(shapes(1))
    dim = draw(dim_of(shape))
    k = draw(st.integers(0, shape[dim]))
    largest = draw(st.booleans())
    x = np.arange(prod(shape)).reshape(shape) * 7 % 5 * 1.0
    return Case(
        "topk",
        lambda x: x.topk(k, dim, largest),
        lambda x: first(k, x, dim, largest),
        [x],
        f"{k} of dim {dim}",
        constant=(0,),
    )


@st.composite
def softmaxes(draw) -> Case:
    shape = draw(shapes(1, sizes=FULL_SIZES))
    dim = draw(dim_of(shape))
    return Case("softmax", lambda x: x.softmax(dim), None, [values(*shape)])


@st.composite
def lookups(draw) -> Case:
    """Rows of a table by any number of ids."""
    table = values(draw(FULL_SIZES), draw(SIZES))
    shape = draw(shapes(most=2))
    ids = np.arange(prod(shape)).reshape(shape) * 5 % len(table)
    return Case("embedding", tpm.embedding, lambda t, i: t[i], [table, ids])


FAMILIES = [
    broadcast_pairs,
    reductions,
    decisions,
    running_sums,
    products,
    sums_of_products,
    reshapes,
    transposes,
    joins,
    pieces,
    cuts,
    shifts,
    indexed,
    orders,
    softmaxes,
    lookups,
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_drawn_shapes_and_layouts(family):
    """Values as NumPy's, gradients as on one device (float64)."""
    devices = tpm.devices()
    places = [
        *(tpm.group(devices[:members]) for members in (2, 3, 4)),
        tpm.mesh(dp=2, tp=2),
    ]

    @TOGETHER
    @given(st.data())
    def check(data):
        case = data.draw(family())
        place = data.draw(st.sampled_from(places))
        layouts = [
            data.draw(
                st.sampled_from(
                    all_layouts(
                        array.ndim,
                        len(place.shape),
                        partial=array.dtype.kind == "f",
                    )
                )
            )
            for array in case.arrays
        ]
        worst = (0.0, 0.0)
        if place.is_member:
            worst = errors(case, place, layouts, *unchecked_reference(case))
        forward, backward = tpm.world().all_reduce(np.array(worst), "max")
        shown = [case.name, *(array.shape for array in case.arrays), place, layouts]
        assert forward < 1e-11, shown
        assert backward < 1e-10, shown

    check()
