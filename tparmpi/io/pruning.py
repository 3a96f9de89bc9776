"""Which checkpoints of a folder stay when it is tidied, and the removal of the rest.

Rank 0 alone looks at the folder and decides; the others are told.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import publish
from tparmpi.io.agreement import on_rank_zero
from tparmpi.io.index import read_header
from tparmpi.io.inspection import flaw


def prune(
    folder: str | Path,
    keep: int,
    *,
    keep_every: int = 0,
    keep_best: str | None = None,
    damaged: Collection[str] = (),
) -> list[Path]:
    """Remove old checkpoints. Collective over all ranks.

    Those with a missing or cut file, which a look at each shows, and those known to be
    `damaged` neither count as kept nor are they removed. An old one in whose
    folder lies anything but a checkpoint's own files stays, too. Of a symbolic link
    only the link is removed.

    Parameters
    ----------
    folder : str or Path
    keep : int
        How many of the newest stay, at least 1.
    keep_every : int, default 0
        The steps that are multiples of it stay for good; 0: none.
    keep_best : str, optional
        The one that :func:`best` finds by this name stays.
    damaged : collection of str
        Names of checkpoints in the folder, such as ``"step-00001000"``.

    Returns
    -------
    list of Path
        Those removed.

    Raises
    ------
    CheckpointError
        `keep` is below 1, a number is no integer, or one cannot be removed.
    """
    keep = fmt.integer("keep", keep)
    keep_every = fmt.integer("keep_every", keep_every, range(1 << 63))
    if keep < 1:
        raise CheckpointError(
            f"at least 1 checkpoint must be kept, not {keep}: a run resumes from it"
        )

    def remove() -> list[Path]:
        found = [
            (step, path)
            for step, path in publish.published(Path(folder))
            if path.name not in damaged
        ]
        stay: set[Path | None] = set(_newest(found, keep))
        if keep_best is not None:
            stay.add(_best(found, keep_best))
        if keep_every:
            stay.update(path for step, path in found if step % keep_every == 0)
        old = [path for _, path in found if path not in stay and _removable(path)]
        for path in old:
            publish.withdraw(path)
        return old

    return on_rank_zero(f"remove old checkpoints from {folder}", remove)


def best(folder: str | Path, by: str) -> Path | None:
    """The published checkpoint with the lowest of some number. Collective.

    Collective over all ranks: rank 0 looks, the others are told.

    Parameters
    ----------
    folder : str or Path
    by : str
        The number's name in what was given to :func:`save` as `extra`;
        ``tparmpi train`` records ``"val_loss"``.

    Returns
    -------
    Path or None
        The newest of equal ones. None if none records a finite number.
    """
    return on_rank_zero(
        f"look for the best checkpoint in {folder}",
        lambda: _best(publish.published(Path(folder)), by),
    )


def finite(value: Any) -> float | None:
    """A recorded number, None if it is none or beyond a float's range. Pure."""
    # Of integers beyond that range `math.isfinite` raises.
    is_finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return float(value) if is_finite else None


def _newest(found: Sequence[tuple[int, Path]], count: int) -> list[Path]:
    newest: list[Path] = []
    for _, path in reversed(found):
        if len(newest) == count:
            break
        if not flaw(path):
            newest.append(path)
    return newest


def _best(found: Sequence[tuple[int, Path]], by: str) -> Path | None:
    ranked = []
    for step, path in found:
        try:
            number = finite(read_header(path).extra.get(by))
        except CheckpointError:
            # Without an index it cannot be loaded.
            continue
        if number is not None:
            ranked.append((number, -step, path))
    return next((path for *_, path in sorted(ranked) if not flaw(path)), None)


def _removable(path: Path) -> bool:
    return publish.obstacle(path) is None and not flaw(path)
