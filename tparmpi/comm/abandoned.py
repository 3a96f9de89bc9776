"""What the messages of a call that was broken off may still read from or write to."""

from __future__ import annotations

from typing import Any

_kept: list[Any] = []


def keep(error: BaseException) -> None:
    """Keep the arrays and messages of the operation that `error` ended. Local.

    MPI goes on with messages that have begun, whatever becomes of those who began them;
    memory that was given back meanwhile would be read, or written to, as another's.

    Parameters
    ----------
    error
        As caught by the frame that ran the operation.
    """
    trace = error.__traceback__
    # Not the frames themselves, which hold all that their callers hold.
    while trace is not None:
        _kept.append(dict(trace.tb_frame.f_locals))
        trace = trace.tb_next
