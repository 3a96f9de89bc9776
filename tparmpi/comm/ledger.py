"""Accounting of communication: what was sent, along which axis, for which operator.

Bytes are those of the payload that this rank sends, by each call's algorithm, however
the transport cuts them into messages. An ``all_reduce`` of N bytes over n members
counts as a ``reduce_scatter`` and an ``all_gather`` of N bytes: 2 (n - 1) / n N bytes
where the members' pieces are equal. Calls of one-member groups move nothing and are not
recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TypeVar

_PACKAGE = str(Path(__file__).resolve().parent.parent)


class Current:
    """What is running: the dispatcher of operators assigns the operator's name."""

    operator: str = ""


current = Current()

active: list[Ledger] = []
"""The ledgers that are open; empty while nobody counts."""

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Record:
    """One collective or point-to-point call.

    Parameters
    ----------
    kind : str
        The call: ``"all_reduce"``, ``"send"``, …
    axis : str
        Name of the group's axis.
    operator : str
        Operator that made the call; empty for a call of the user's own.
    bytes : int
        Payload bytes that this rank sent.
    seconds : float
        Time from entering the call to leaving it; from the start of a non-blocking one
        to the moment when this rank saw it complete.
    site : str
        ``file:line`` of the nearest caller outside the package.
    """

    kind: str
    axis: str
    operator: str
    bytes: int
    seconds: float
    site: str


@dataclass
class Ledger:
    """The calls made by this rank while the ledger was open.

    Attributes
    ----------
    records : list of Record
        In the order in which the calls ended.
    """

    records: list[Record] = field(default_factory=list)

    def __enter__(self) -> Ledger:
        active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        # By identity: two ledgers with the same records are equal.
        active[:] = [ledger for ledger in active if ledger is not self]

    def select(
        self,
        kind: str | None = None,
        axis: str | None = None,
        operator: str | None = None,
    ) -> Iterator[Record]:
        """Yield the records of a kind, an axis, an operator; None takes all. Local."""
        for record in self.records:
            if (
                kind in (None, record.kind)
                and axis in (None, record.axis)
                and operator in (None, record.operator)
            ):
                yield record

    def count(
        self,
        kind: str | None = None,
        axis: str | None = None,
        operator: str | None = None,
    ) -> int:
        """Return the number of calls. Local."""
        return sum(1 for _ in self.select(kind, axis, operator))

    def bytes(
        self,
        kind: str | None = None,
        axis: str | None = None,
        operator: str | None = None,
    ) -> int:
        """Return the payload bytes that this rank sent. Local."""
        return sum(record.bytes for record in self.select(kind, axis, operator))

    def seconds(
        self,
        kind: str | None = None,
        axis: str | None = None,
        operator: str | None = None,
    ) -> float:
        """Return the seconds spent in the calls. Local."""
        return sum(record.seconds for record in self.select(kind, axis, operator))

    def table(self) -> str:
        """Return the totals by kind, axis, operator and site, as text. Local."""
        totals = _group_by(
            self.records, lambda r: (r.kind, r.axis, r.operator or "-", r.site)
        )
        rows = [("call", "axis", "operator", "count", "bytes", "seconds", "site")]
        for (kind, axis, operator, site), records in sorted(totals.items()):
            sent = sum(record.bytes for record in records)
            seconds = sum(record.seconds for record in records)
            rows.append(
                (
                    kind,
                    axis,
                    operator,
                    str(len(records)),
                    str(sent),
                    f"{seconds:.6f}",
                    site,
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        )


def _group_by(
    records: list[Record], key: Callable[[Record], _Key]
) -> dict[_Key, list[Record]]:
    groups: dict[_Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def ledger() -> Ledger:
    """Return a ledger to open: ``with tpm.ledger() as led: …``. Local."""
    return Ledger()


class Entry:
    """A call that is under way while ledgers are open. Made when it begins."""

    def __init__(self) -> None:
        self._books = tuple(active)
        self._operator = current.operator
        self._site = call_site()
        self._start = perf_counter()

    def close(self, kind: str, axis: str, sent: int) -> None:
        """Enter the call, of `sent` payload bytes, in the ledgers. Local."""
        seconds = perf_counter() - self._start
        entry = Record(kind, axis, self._operator, sent, seconds, self._site)
        for book in self._books:
            book.records.append(entry)


def call_site() -> str:
    """Return ``file:line`` of the nearest caller outside the package. Local."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
