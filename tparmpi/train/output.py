"""Writing to a stream that may be closed, full or a pipe that nobody reads on."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO


def write(stream: TextIO | None, text: str) -> bool:
    """Write and flush a text; False once the stream takes no more. Local.

    From then on the stream leads nowhere, so that nothing fails at exit either.
    Characters that its encoding lacks are written as escapes.

    Parameters
    ----------
    stream
        None where the process was started without one.
    """
    if stream is None:
        return False
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        # A ValueError is what a closed stream raises.
        _lead_nowhere(stream)
        return False
    return True


def _lead_nowhere(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


class Unfailing:
    """A stream for a library to write to that never fails: it goes on unseen."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open = True
        self.encoding = stream.encoding or "ascii"

    def write(self, text: str) -> int:
        """Write and flush a text while the stream takes it. Local."""
        self._open = self._open and write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: every text is flushed as it is written. Local."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal. Local."""
        return is_terminal(self._stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal, and not a closed one. Local."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False
