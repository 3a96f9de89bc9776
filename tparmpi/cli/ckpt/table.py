"""Numbers and tables as `tparmpi ckpt` prints them."""

from __future__ import annotations

from collections.abc import Sequence


def rows(cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of equally wide columns; those numbered in `right` end together. Local."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def size(nbytes: int) -> str:
    """A number of bytes in units of 1024. Local."""
    if nbytes < 1024:
        return f"{nbytes} B"
    number = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        number /= 1024
        if number < 1024 or unit == "PiB":
            break
    return f"{number:.1f} {unit}"


def count(number: int, name: str) -> str:
    """A number and its noun. Local."""
    return f"{number:,} {name}" + ("" if number == 1 else "s")
