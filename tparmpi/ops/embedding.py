"""Rows of tables."""

from __future__ import annotations

from typing import Any

from tparmpi.backend import has_values
from tparmpi.errors import UsageError
from tparmpi.ops.combiners import narrowed, widened
from tparmpi.tensors import Plan, operator


def check_ids(plan: Plan, ids: Any, size: int) -> None:
    """Refuse what a kernel would silently round or take for another member's row.

    Raises
    ------
    UsageError
        Naming an id that is no integer from 0 to ``size - 1``.
    """
    name = plan.operator.name
    if ids.dtype.kind not in "iu":
        raise UsageError(f"{name}: ids must be integers, they are {ids.dtype}")
    if ids.size == 0 or not has_values(ids):
        return
    low, high = (int(plan.backend.to_host(x)) for x in (ids.min(), ids.max()))
    if low < 0 or high >= size:
        raise UsageError(
            f"{name}: the id {low if low < 0 else high} is outside the vocabulary of "
            f"{size}; ids go from 0 to {size - 1}"
        )


@operator(
    "vd,...->...d",
    linear=(0,),
    dtype=lambda dtypes, _: dtypes[0],
    cast=False,
    fresh=True,
)
def embedding(plan: Plan, table: Any, ids: Any) -> Any:
    """Return the rows of `table` that `ids` name.

    A contraction over the vocabulary: if that is sharded, each member gives its own
    rows, zeros for the others, and the result is a pending sum.

    Parameters
    ----------
    table : (V, D)
    ids : (...), integers from 0 to V-1

    Raises
    ------
    UsageError
        If an id is outside the vocabulary.
    """
    check_ids(plan, ids, plan.factors["v"].size)
    rows = plan.backend.embedding(table, ids, plan.factors["v"].offset)
    return rows, ids


@embedding.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    shard = plan.factors["v"]
    dtable = plan.backend.embedding_backward(
        widened(grad), saved, shard.offset, shard.length
    )
    return narrowed(plan, dtable), None
