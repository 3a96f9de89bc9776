"""Cases of every operator: operands, and the NumPy function it must equal."""

from tests.cases import (
    arithmetic,
    attention,
    comparison,
    contraction,
    functions,
    indexing,
    network,
    rearranging,
    reductions,
    shape,
)
from tests.cases.case import Case

CASES: list[Case] = [
    *arithmetic.CASES,
    *functions.CASES,
    *comparison.CASES,
    *contraction.CASES,
    *reductions.CASES,
    *shape.CASES,
    *indexing.CASES,
    *rearranging.CASES,
    *network.CASES,
    *attention.CASES,
]
