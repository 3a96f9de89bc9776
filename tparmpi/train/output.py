"""Writing to a stream that may close before the program ends, as a pipe to `head`."""

from __future__ import annotations

import os
from typing import TextIO


def write(stream: TextIO, text: str) -> bool:
    """Write and flush a text; False once nobody reads the stream any more. Local.

    From then on the stream leads nowhere, so that nothing fails at exit either.
    """
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return False
    return True
