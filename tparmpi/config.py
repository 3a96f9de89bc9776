"""The environment variables of the package, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from tparmpi.errors import UsageError

_T = TypeVar("_T")

DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Environment:
    """What the user chose through environment variables.

    Parameters
    ----------
    device : {"cpu", "cuda"} or None
        ``TPARMPI_DEVICE``: the kind of device to bind ranks to. None chooses a GPU
        where there is one.
    progress_thread : bool
        ``TPARMPI_PROGRESS_THREAD``: whether a thread moves non-blocking operations on,
        where MPI lets several threads call it.
    cuda_aware : bool or None
        ``TPARMPI_CUDA_AWARE``: whether MPI takes GPU memory. None asks the library.
    tuning : str or None
        ``TPARMPI_TUNING``: the file of the tuning table; ``0`` uses none. None is the
        user's cache folder.
    check : bool
        ``TPARMPI_CHECK``: whether members compare what they call before each call.
    watchdog : float
        ``TPARMPI_WATCHDOG``: how many seconds a rank may wait for others before the
        job is ended; 0 for ever.
    staging_mib : int
        ``TPARMPI_STAGING_MIB``: MiB that a rank may use between tensors and files, at
        least 16.
    """

    device: str | None = None
    progress_thread: bool = True
    cuda_aware: bool | None = None
    tuning: str | None = None
    check: bool = False
    watchdog: float = 300.0
    staging_mib: int = 256

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment:
        """Read the settings out of `variables`. Local.

        Raises
        ------
        UsageError
            A variable has a value that is not among its choices.
        """
        device = variables.get("TPARMPI_DEVICE") or None
        if device is not None and device not in DEVICE_KINDS:
            choices = " or ".join(DEVICE_KINDS)
            raise UsageError(f"TPARMPI_DEVICE must be {choices}, it is {device!r}")
        return cls(
            device=device,
            progress_thread=_flag(variables, "TPARMPI_PROGRESS_THREAD", default=True),
            cuda_aware=_flag(variables, "TPARMPI_CUDA_AWARE", default=None),
            tuning=variables.get("TPARMPI_TUNING") or None,
            check=_flag(variables, "TPARMPI_CHECK", default=False),
            watchdog=_seconds(variables, "TPARMPI_WATCHDOG", default=300.0),
            staging_mib=_mebibytes(variables, "TPARMPI_STAGING_MIB", default=256),
        )


def _flag(variables: Mapping[str, str], name: str, *, default: _T) -> bool | _T:
    value = variables.get(name) or None
    if value not in (None, "0", "1"):
        raise UsageError(f"{name} must be 0 or 1, it is {value!r}")
    return default if value is None else value == "1"


def _seconds(variables: Mapping[str, str], name: str, *, default: float) -> float:
    text = variables.get(name) or None
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name} must be a number of seconds, it is {text!r}")
    return value


def _mebibytes(variables: Mapping[str, str], name: str, *, default: int) -> int:
    text = variables.get(name) or None
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or not 16 <= int(text) < 1 << 31:
        raise UsageError(f"{name} must be a number of MiB from 16 on, it is {text!r}")
    return int(text)


@cache
def environment() -> Environment:
    """The process's settings, read at the first call. Local."""
    return Environment.read(os.environ)
