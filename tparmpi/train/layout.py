"""Which ranks do what: the sizes of the mesh's axes and each rank's rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tparmpi.errors import UsageError, counted
from tparmpi.sharding.chunks import chunk


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's axes; `dp` is the outer one."""

    dp: int
    tp: int

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp}"


def choose_layout(ranks: int, n_head: int, *, tp: int | None, dp: int | None) -> Layout:
    """The layout for a number of ranks, from the axes that were given. Local.

    An axis that was not given takes the ranks that are left. Where neither was, all go
    to `tp` if there is a head for each rank, else to `dp`.

    Raises
    ------
    UsageError
        The given axes do not multiply to the ranks, or `tp` exceeds the heads.
    """
    given = {"tp": tp, "dp": dp}
    product = (tp or 1) * (dp or 1)
    if ranks % product or (tp and dp and product != ranks):
        axes = " * ".join(f"{axis}={size}" for axis, size in given.items() if size)
        raise UsageError(
            f"the layout {axes} is for {counted(product, 'rank')} but there "
            f"{'is' if ranks == 1 else 'are'} {ranks}: start "
            f"{counted(product, 'rank')}, or leave an axis out so that it takes what "
            "is left"
        )
    if tp is None and dp is None:
        tp = ranks if n_head >= ranks else 1
    tp = tp or ranks // (dp or 1)
    if tp > n_head:
        raise UsageError(
            f"model.n_head ({n_head}) is fewer than tp ({tp}), and each tp rank needs "
            "a head: give a smaller --tp, a larger --dp, or more heads"
        )
    return Layout(dp=ranks // tp, tp=tp)


@dataclass(frozen=True)
class Rows:
    """A run of rows of the global batch.

    `total` is how many rows the whole microbatch has over all `dp` ranks.
    """

    first: int
    count: int
    total: int


def microbatch_rows(
    batch_size: int, *, dp: int, coordinate: int, microbatches: int
) -> list[Rows]:
    """The rows of each microbatch on one `dp` rank. Local.

    The batch is split over `dp` by the chunk rule, each rank's rows again over the
    microbatches; every rank has the same number of microbatches, some perhaps empty.
    The rows of one microbatch over all ranks follow the chunk rule too, since the sizes
    of one microbatch differ between ranks by at most one, the larger ones first.
    """
    first, count = chunk(batch_size, dp, coordinate)
    rows = []
    for index in range(microbatches):
        offset, length = chunk(count, microbatches, index)
        total = sum(
            chunk(chunk(batch_size, dp, rank)[1], microbatches, index)[1]
            for rank in range(dp)
        )
        rows.append(Rows(first + offset, length, total))
    return rows
