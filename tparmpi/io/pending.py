"""The save that goes on in the background: at most one in a process.

It writes beside the checkpoints, where another save removes what it finds half done,
and its result is what a load after it expects to find: both finish it first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Unfinished(Protocol):
    """A save that is not published yet."""

    @property
    def under_way(self) -> Path | None:
        """The checkpoint's folder. Local."""

    def finish(self) -> None:
        """Wait for it and publish it. Collective over all ranks."""

    def abandon(self) -> None:
        """Give it up. Local."""


current: Unfinished | None = None


def finish() -> None:
    """Finish the save that is under way, if there is one. Collective over all ranks.

    Raises
    ------
    CheckpointError
        It failed.
    """
    if current is not None:
        current.finish()


def _forget_in_child() -> None:
    global current
    current = None


os.register_at_fork(after_in_child=_forget_in_child)
