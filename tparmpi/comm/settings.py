"""A device's defaults, fixed when it is bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tparmpi.errors import GroupError, UsageError

if TYPE_CHECKING:
    from tparmpi.comm.device import Device

_KINDS = {"float": np.inexact, "int": np.integer, "bool": np.bool_}


@dataclass(frozen=True)
class DeviceSettings:
    """Default dtypes, and how values are quantized.

    Parameters
    ----------
    float, int, bool : dtype-like
        What floating, integer and truth values are stored as when nothing else is said.
    quantization : str or None
        Name of the scheme that low-precision values are scaled by; None for none.

    Raises
    ------
    UsageError
        If a dtype is not of its kind.
    """

    float: Any = "float32"
    int: Any = "int64"
    bool: Any = "bool"
    quantization: str | None = None

    def __post_init__(self) -> None:
        for name in _KINDS:
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))


def _dtype(name: str, given: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(given)
    except TypeError as error:
        raise UsageError(f"DeviceSettings: {name}={given!r} is no dtype") from error
    # bfloat16 and its like are floating types that NumPy files under "void".
    is_kind = np.issubdtype(dtype, _KINDS[name])
    if not is_kind and not (name == "float" and _is_extended_float(dtype)):
        raise UsageError(f"DeviceSettings: {name}={dtype.name} is not a {name} dtype")
    return dtype


def _is_extended_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "Vf" and "float" in dtype.name


def common_settings(devices: Sequence[Device]) -> DeviceSettings:
    """Return the settings of a group of `devices`. Local.

    For each kind of value: the first of the members' default dtypes, in member order,
    that every member supports.

    Raises
    ------
    GroupError
        If no member's default runs on every member, or they quantize differently.
    """
    first = devices[0]
    if all(device.settings == first.settings for device in devices) and all(
        device.supported_dtypes == first.supported_dtypes for device in devices
    ):
        return first.settings
    for device in devices:
        if device.settings.quantization != first.settings.quantization:
            raise GroupError(
                f"group: rank {first.rank} quantizes with "
                f"{first.settings.quantization!r}, rank {device.rank} with "
                f"{device.settings.quantization!r}; give every member the same "
                "quantization in init(settings=…)"
            )
    supported = frozenset.intersection(*(device.supported_dtypes for device in devices))
    chosen = {name: _first_supported(name, devices, supported) for name in _KINDS}
    return DeviceSettings(quantization=first.settings.quantization, **chosen)


def _first_supported(
    name: str, devices: Sequence[Device], supported: frozenset[str]
) -> np.dtype[Any]:
    wanted: list[np.dtype[Any]] = [getattr(d.settings, name) for d in devices]
    for dtype in wanted:
        if dtype.name in supported:
            return dtype
    offered = ", ".join(sorted({dtype.name for dtype in wanted}))
    raise GroupError(
        f"group: no member's default {name} dtype ({offered}) runs on every member; "
        f"choose one of {', '.join(sorted(supported))} in init(settings=…)"
    )
