"""What a rank's record of its latest calls says, as others read it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

CALLS = 256
"""The calls that are kept."""


def start_of(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None if it is gone. Local.

    Together with the id it tells a process from a later one of the same id.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class RecordedCall:
    """One call as its rank recorded it.

    Parameters
    ----------
    entered : float
        Monotonic seconds.
    seconds : float or None
        What it took; None while the rank is inside.
    failed : bool
        Whether it ended with an error.
    number, sequence : int
        Its number among the calls of the rank, and among those of its group.
    kind, place, operator, site : str
        The call, its group, the operator that made it ("" if none), its source line.
    """

    entered: float
    seconds: float | None
    failed: bool
    number: int
    sequence: int
    kind: str
    place: str
    operator: str
    site: str

    def line(self, offset: float, now: float | None = None) -> str:
        """Return it as a line of text. Local.

        Parameters
        ----------
        offset
            What to add to the monotonic clock to get the time of day.
        now
            The monotonic clock, if the rank may still be inside.
        """
        of_day = time.strftime("%H:%M:%S", time.localtime(self.entered + offset))
        by = f" of operator {self.operator}" if self.operator else ""
        if self.failed:
            how = "ended with an error"
        elif self.seconds is not None:
            how = f"took {self.seconds * 1e3:.3f} ms"
        elif now is not None:
            how = f"not done after {now - self.entered:.1f} s"
        else:
            how = "not done"
        return (
            f"{of_day}  #{self.number}  {self.kind}{by}, call {self.sequence} on "
            f"{self.place}, at {self.site}: {how}"
        )


@dataclass(frozen=True)
class Recorded:
    """What a rank's file says.

    Parameters
    ----------
    rank, size : int
    pid, started : int
        Its process, and when that started, as the kernel tells it.
    offset : float
        What to add to the monotonic clock to get the time of day.
    waiting, busy : float
        Since when it waits, or does something long; 0 if it does not.
    reason : str
        What the long thing is.
    asked, answered : bool
        Whether it was asked to tell where it is, and has done so.
    calls : tuple of RecordedCall
        The latest, in the order in which they began.
    """

    rank: int
    size: int
    pid: int
    started: int
    offset: float
    waiting: float
    busy: float
    reason: str
    asked: bool
    answered: bool
    calls: tuple[RecordedCall, ...]

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote it is still there."""
        return start_of(self.pid) == self.started

    def lines(self, latest: int = CALLS) -> list[str]:
        """Return the `latest` calls as lines of text. Local."""
        now = time.monotonic() if self.is_alive else None
        return [call.line(self.offset, now) for call in self.calls[-latest:]]
