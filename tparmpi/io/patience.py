"""Shared file systems that are behind: second looks, and words for what stays wrong.

A node of a cluster sees what another has written only after a while, and some servers
refuse what they will take a moment later. Local: no MPI here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

PAUSES = (0.1, 0.4, 1.5)
"""Seconds before each further try."""

_WORDS = {
    errno.ESTALE: "another node has replaced or removed it meanwhile",
    errno.EAGAIN: "another program holds a lock on it",
    errno.EBUSY: "the file system says that it is in use",
    errno.ENOLCK: "the file system has no locks to give",
    errno.ETIMEDOUT: "the file system's server does not answer",
}


def is_passing(error: BaseException) -> bool:
    """Whether what was not read may be whole all the same. Local."""
    return isinstance(error, OSError) and error.errno in _WORDS


def words(error: OSError) -> str:
    """What an error that `is_passing` means, and what to do. Local."""
    assert error.errno is not None
    return f"{_WORDS[error.errno]} ({os.strerror(error.errno)}); try again"


def patiently(work: Callable[[], Result], path: Path) -> Result:
    """Do local work on a file that ought to be there, again where that may help.

    What is missing is looked for once more, after the folder's names have been asked
    for anew; what is refused for the moment is tried again for some two seconds.

    Parameters
    ----------
    work
        Leaves nothing behind when it fails.
    path
        The file.

    Raises
    ------
    OSError
        Of the last try.
    """
    for pause in PAUSES:
        try:
            return work()
        except FileNotFoundError:
            if not is_listed(path):
                raise
        except OSError as error:
            if not is_passing(error):
                raise
        time.sleep(pause)
    return work()


def is_listed(path: Path) -> bool:
    """Whether a file's folder, asked anew, names it. Local."""
    with contextlib.suppress(OSError):
        return path.name in os.listdir(path.parent)
    return False
