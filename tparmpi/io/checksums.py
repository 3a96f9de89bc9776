"""CRC-32 (ISO 3309, as in zlib), by the fastest library that is installed."""

from __future__ import annotations

try:
    # zlib-ng uses the processor's carry-less multiplication, which the zlib that most
    # Pythons are built with does not.
    from zlib_ng.zlib_ng import crc32

    MADE_BY = "zlib-ng"
except ImportError:
    from zlib import crc32

    MADE_BY = "zlib"

__all__ = ["MADE_BY", "crc32"]
