"""The exceptions and warnings of tparmpi.

Every error that the package raises on purpose is a `TparmpiError`, so that one
``except`` clause catches them all. Its text names the operation, what was expected,
what was given and what to do about it.
"""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number of things for a message: ``1 rank``, ``2 ranks``. Local."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def reason(error: BaseException) -> str:
    """Return why the system refused, without the file's name. Local."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {text}" if text else "out of memory"
    return text


class TparmpiError(Exception):
    """Base of every error that tparmpi raises on purpose.

    Attributes
    ----------
    exit_code : int
        What a command of the package exits with after this error.
    """

    exit_code = 1


class UsageError(TparmpiError, ValueError):
    """A bad argument, configuration key or command line; commands exit with 2."""

    exit_code = 2


class DeviceError(TparmpiError):
    """A rank cannot be bound to the device that was asked for."""


class GroupError(TparmpiError):
    """Devices that cannot form the group or mesh asked for, or a closed group."""


class ShardingError(TparmpiError, ValueError):
    """A layout that a tensor or an operator cannot have."""


class ShapeError(TparmpiError, ValueError):
    """Shapes that do not fit an operation."""


class AutodiffError(TparmpiError, RuntimeError):
    """A gradient that cannot be computed as asked."""


class CommunicationError(TparmpiError):
    """A collective or a message that cannot complete, or ranks that disagree."""


class CollectiveMismatchError(CommunicationError):
    """Members of a group make calls that do not belong together."""


class CheckpointError(TparmpiError):
    """A checkpoint that cannot be written, read or trusted."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint of which a file is missing, cut, changed or exchanged."""


class DataError(TparmpiError):
    """Training data that are missing, too short or unreadable."""


class RunFolderError(TparmpiError):
    """A run folder that is in use, or belongs to a different run."""


class ImplicitGatherWarning(UserWarning):
    """An operator had to gather an activation that no rule could take sharded."""
