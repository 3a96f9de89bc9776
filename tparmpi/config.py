"""The environment variables of the package, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tparmpi.errors import UsageError

DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Environment:
    """What the user chose through environment variables.

    Parameters
    ----------
    device : {"cpu", "cuda"} or None
        ``TPARMPI_DEVICE``: the kind of device to bind ranks to. None chooses a GPU
        where there is one.
    """

    device: str | None = None

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
        return cls(device=device)


@cache
def environment() -> Environment:
    """The process's settings, read at the first call. Local."""
    return Environment.read(os.environ)
