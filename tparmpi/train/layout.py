"""Which ranks do what: the sizes of the mesh's axes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tparmpi.errors import UsageError, counted


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's axes, from the outer one: `pp`, `dp`, `tp`."""

    dp: int
    tp: int
    pp: int = 1

    def __str__(self) -> str:
        stages = f"pp={self.pp} " if self.pp > 1 else ""
        return f"{stages}dp={self.dp} tp={self.tp}"


def choose_layout(
    ranks: int, n_head: int, *, tp: int | None, dp: int | None, pp: int = 1
) -> Layout:
    """The layout for a number of ranks, from the axes that were given. Local.

    An axis that was not given takes the ranks that are left. Where neither was, all go
    to `tp` if there is a head for each rank, else to `dp`.

    Raises
    ------
    UsageError
        The given axes do not multiply to the ranks, or `tp` exceeds the heads.
    """
    given = {"pp": pp if pp > 1 else None, "tp": tp, "dp": dp}
    product = pp * (tp or 1) * (dp or 1)
    if ranks % product or (tp and dp and product != ranks):
        axes = " * ".join(f"{axis}={size}" for axis, size in given.items() if size)
        needed = counted(product, "rank")
        there = f"but there {'is' if ranks == 1 else 'are'} {ranks}"
        if tp and dp:
            raise UsageError(
                f"the layout {axes} is for {needed} {there}: start {needed}, or leave "
                "tp or dp out so that it takes what is left"
            )
        options = " or ".join(f"--{axis}" for axis, size in given.items() if size)
        raise UsageError(
            f"the layout {axes} is for {needed} {there}: start so many or a multiple "
            f"of them, or give another {options}"
        )
    ranks //= pp
    if tp is None and dp is None:
        tp = ranks if n_head >= ranks else 1
    tp = tp or ranks // (dp or 1)
    if tp > n_head:
        raise UsageError(
            f"model.n_head ({n_head}) is fewer than tp ({tp}), and each tp rank needs "
            "a head: give a smaller --tp, a larger --dp, or more heads"
        )
    return Layout(dp=ranks // tp, tp=tp, pp=pp)
