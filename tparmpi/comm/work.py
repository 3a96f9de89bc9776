"""Saying that a rank does something long on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

reasons: list[str] = []
"""What this rank is doing; the innermost last."""

announce: Callable[[], None] | None = None
"""Tells the other ranks; None where nobody watches."""


@contextmanager
def long_work(reason: str) -> Iterator[None]:
    """Make the watchdogs of all ranks patient while this rank does something long.

    ``with tpm.long_work("writing the corpus"): ...`` Local; may be nested.

    Parameters
    ----------
    reason
        What is being done; shown to those who wait longer than usual.
    """
    reasons.append(reason)
    _tell()
    try:
        yield
    finally:
        reasons.pop()
        _tell()


def _tell() -> None:
    if announce is not None:
        announce()
