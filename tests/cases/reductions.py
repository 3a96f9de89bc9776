"""Reductions."""

from __future__ import annotations

from tests.cases.case import Case, values

CASES = [
    Case("sum", lambda x: x.sum(1), lambda x: x.sum(1), [values(5, 3, 2)]),
    Case("sum", lambda x: x.sum(), lambda x: x.sum(), [values(5, 3)], "all"),
    Case(
        "sum",
        lambda x: x.sum((0, 2), keepdims=True),
        lambda x: x.sum((0, 2), keepdims=True),
        [values(5, 3, 2)],
        "keepdims",
    ),
    Case("sum", lambda x: x.mean(0), lambda x: x.mean(0), [values(5, 3)], "mean"),
]
