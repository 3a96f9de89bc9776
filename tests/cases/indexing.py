"""Operators that find elements by their indices."""

from __future__ import annotations

import numpy as np

import tparmpi as tpm
from tests.cases.case import Case, values


def scatter_add(x, ids, y, dim):
    result = x.copy()
    index = list(np.indices(ids.shape))
    index[dim] = ids
    np.add.at(result, tuple(index), y)
    return result


def key(name: str, at, shape=(5, 3), whole=()) -> Case:
    return Case(
        "getitem",
        lambda x: x[at],
        lambda x: x[at],
        [values(*shape)],
        name,
        whole={0: set(whole)},
    )


IDS = np.array([[3, 0, -1], [4, 2, 3]])
ALONG = np.array([[0, -1, 2], [4, 4, 1], [0, 0, -5], [1, 2, 3]])

CASES = [
    key("slice", np.s_[1:4]),
    key("both", np.s_[2:, 1:]),
    key("one", np.s_[3]),
    key("one_of_each", np.s_[-1, 0]),
    key("all_kinds", np.s_[1:4, None, ..., 2], (5, 2, 3), {1}),
    key("one_and_slice", np.s_[1:, 2], (5, 5)),
    key("strided", np.s_[1::2]),
    key("strided_back", np.s_[::-2, ::-1]),
    key("nothing", np.s_[3:2]),
    Case("getitem", lambda x: x.flip(), np.flip, [values(5, 3)], "flip"),
    Case(
        "take",
        lambda x, i: tpm.take(x, i, 1),
        lambda x, i: np.take(x, i, 1),
        [values(2, 5, 3), IDS],
        whole={0: {0, 2}},
    ),
    Case(
        "take",
        tpm.take,
        lambda x, i: np.take(x, i, 0),
        [values(5, 3), np.array([1, 1, 4, 0, 1])],
        "rows",
    ),
    Case("take", lambda x, i: x[i], lambda x, i: x[i], [values(5), IDS], "index"),
    Case(
        "take",
        lambda x, i: x[1:, ..., i],
        lambda x, i: x[1:, ..., i],
        [values(3, 5), np.array(2)],
        "key",
    ),
    Case(
        "gather",
        lambda x, i: x.gather(i, 1),
        lambda x, i: np.take_along_axis(x, i, 1),
        [values(4, 5), ALONG],
    ),
    Case(
        "gather",
        lambda x, i: x.gather(i, 0),
        lambda x, i: np.take_along_axis(x, i, 0),
        [values(5, 1, 2), np.array([[[0], [1], [-1]], [[4], [4], [2]]])],
        "repeated",
    ),
    Case(
        "scatter_add",
        lambda x, i, y: x.scatter_add(i, y, 1),
        lambda x, i, y: scatter_add(x, i, y, 1),
        [values(4, 5), ALONG, values(4, 3, seed=1)],
    ),
    Case(
        "scatter_add",
        tpm.scatter_add,
        lambda x, i, y: scatter_add(x, i, y, 0),
        [values(3), np.array([2, 2, 0, -1, 2]), values(5, seed=1)],
        "one_dim",
    ),
    Case(
        "one_hot",
        lambda i: i.one_hot(5, float),
        lambda i: np.eye(5)[i],
        [IDS % 5],
    ),
    Case(
        "getitem",
        lambda x: (x[3], x[1:, ::-1], x[..., 0]),
        lambda x: (x[3], x[1:, ::-1], x[..., 0]),
        [values(5, 3) > 0],
        "truths",
    ),
    Case(
        "take",
        lambda x, i: (x[i], x.scatter_add(i, x)),
        lambda x, i: (x[i], scatter_add(x, i, x, 0)),
        [np.arange(5, dtype=np.int32), np.array([1, 1, 4, 0, 1])],
        "integers",
    ),
    Case("triangular", tpm.tril, np.tril, [values(2, 5, 3)], whole={0: {0}}),
    Case(
        "triangular",
        lambda x: tpm.triu(x, -1),
        lambda x: np.triu(x, -1),
        [values(3, 5)],
        "upper",
    ),
]
