"""Which way sums take at which size: measured once on a cluster, read by later runs.

A table changes how messages are cut and sent, never a bit of a result. It is read by
the first rank at `init` and told to all, since members must take the same way.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tparmpi.config import environment
from tparmpi.errors import UsageError

_FORMAT = 1
_NO_TABLE = "0"


@dataclass(frozen=True)
class Way:
    """How the sums of groups of one kind go.

    Parameters
    ----------
    members : int
        The groups' size.
    nodes : int
        1 for groups on one node, 2 for those on several.
    whole_bytes : int
        As long as a member has to send no more bytes than this, it sends its array
        whole to all.
    piece_bytes : int
        Larger ones go in pieces of so many bytes from all members together.
    """

    members: int
    nodes: int
    whole_bytes: int
    piece_bytes: int


def path() -> Path | None:
    """Return where the table is; None if none is to be used. Local."""
    given = environment().tuning
    if given == _NO_TABLE:
        return None
    if given is not None:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "tparmpi" / "tuning.json"


def read(library: str) -> tuple[Way, ...]:
    """Return the table of the MPI `library`; empty if there is none. Local.

    A table that cannot be read is warned about, and not used.
    """
    file = path()
    try:
        if file is None or not file.exists():
            return ()
        return _ways(json.loads(file.read_text()).get(library, ()))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(
            f"the tuning table {file} is not used: {error}; run `tparmpi bench "
            "collectives --tune` to write it anew, or remove it",
            stacklevel=2,
        )
        return ()


def write(library: str, ways: Iterable[Way]) -> Path:
    """Put the ways measured with an MPI `library` into the table. Local.

    Ways of other groups and libraries stay.

    Raises
    ------
    UsageError
        If no table is to be used.
    """
    file = path()
    if file is None:
        raise UsageError(
            "bench: TPARMPI_TUNING=0 says to use no table; set it to the file to write"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    known = {(way.members, way.nodes): way for way in _ways(table.get(library, ()))}
    known.update({(way.members, way.nodes): way for way in ways})
    table["format"] = _FORMAT
    table[library] = [asdict(way) for _, way in sorted(known.items())]
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(json.dumps(table, indent=1) + "\n")
    aside.replace(file)
    return file


def choose(ways: Iterable[Way], members: int, nodes: int) -> Way | None:
    """Return the way of a group: that of the size nearest to its own. Local."""
    alike = [way for way in ways if way.nodes == min(nodes, 2)]
    return min(
        alike, key=lambda way: (abs(way.members - members), way.members), default=None
    )


def _ways(rows: Iterable[Mapping[str, int]]) -> tuple[Way, ...]:
    ways = tuple(Way(**row) for row in rows)
    for way in ways:
        if any(type(value) is not int for value in asdict(way).values()):
            raise ValueError(f"{way} does not hold integers only")
        if way.members < 2 or way.whole_bytes < 0 or way.piece_bytes < 1:
            raise ValueError(f"{way} is out of range")
    return ways
