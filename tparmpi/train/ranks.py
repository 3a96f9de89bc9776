"""What the ranks of a run tell each other, outside the mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from tparmpi import comm
from tparmpi.errors import TparmpiError, reason
from tparmpi.train.signals import StopSignals

Result = TypeVar("Result")


def from_rank_zero(function: Callable[[], Result]) -> Result:
    """What `function` returns on rank 0, on every rank. Collective over all ranks.

    For what one rank looks at or changes on behalf of all, such as a file. The result
    must be picklable.

    Raises
    ------
    TparmpiError
        On every rank, where `function` raised it on rank 0 or found no memory there.
    """
    world = comm.world()
    outcome: tuple[bool, Result | TparmpiError] | None = None
    if world.rank == 0:
        try:
            outcome = True, function()
        except TparmpiError as error:
            outcome = False, error
        except MemoryError as error:
            outcome = False, TparmpiError(f"rank 0 is {reason(error)}")
    worked, result = world.broadcast_object(outcome)
    if not worked:
        raise result
    return result


class Boundary:
    """The meeting of all ranks between two steps, in one small message.

    It adds up numbers, and carries what may happen to one rank alone: a signal that
    asks to stop, and an error of something that only this rank does.
    """

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self._error: TparmpiError | None = None
        self.stop = False
        """Whether a rank had been asked to stop when the ranks last met."""

    def attempt(self, action: Callable[[], None]) -> None:
        """Do what only this rank does; an error is raised when the ranks meet. Local.

        Nothing more is attempted after an error.
        """
        if self._error is None:
            try:
                action()
            except TparmpiError as error:
                self._error = error

    def meet(self, *numbers: float) -> list[float]:
        """The sums of `numbers` over all ranks. Collective over all ranks.

        Raises
        ------
        TparmpiError
            On every rank, where an attempt failed on one.
        """
        asked, failed = self._signals.requested, self._error is not None
        mine = np.array([*numbers, asked, failed], dtype=np.float64)
        *sums, asked, failed = comm.world().all_reduce(mine).tolist()
        if failed:
            comm.agree(self._error)
        self.stop = bool(asked)
        return sums
