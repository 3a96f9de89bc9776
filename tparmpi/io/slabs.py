"""Parts of a stored piece in file order: C order, the last dim fastest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tparmpi.io.planner import Box


def slabs(shape: tuple[int, ...], part: Box, limit: int) -> list[Box]:
    """Cut a stored piece into boxes that are contiguous in file order. Pure.

    Parameters
    ----------
    shape : tuple of int
        The piece's.
    part : Box
        What is wanted of it; slabs that hold none of it are left out.
    limit : int
        Elements in a slab, exceeded only by a single element.

    Returns
    -------
    list of Box
        In file order. Each spans one index in some leading dims, a range in the next,
        and all of the rest.
    """
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, end = part.offset[0], part.offset[0] + part.shape[0]
    if row > limit:
        rest = Box(part.offset[1:], part.shape[1:])
        inner = slabs(shape[1:], rest, limit)
        return [
            Box((index, *slab.offset), (1, *slab.shape))
            for index in range(first, end)
            for slab in inner
        ]
    step = max(1, limit // row)
    zeros = (0,) * (len(shape) - 1)
    return [
        Box((at, *zeros), (min(step, end - at), *shape[1:]))
        for at in range(first, end, step)
    ]


def boxes(shape: tuple[int, ...], first: int, end: int) -> list[Box]:
    """The elements ``first ... end - 1`` of file order, as few boxes in order. Pure.

    Each box is contiguous in file order; there are at most two for each dim but the
    last.
    """
    if first >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    low, high = -(-first // row), end // row
    if low > high:
        return _inside(shape, high, first - high * row, end - high * row)
    found = []
    if first < low * row:
        found += _inside(shape, low - 1, first - (low - 1) * row, row)
    if low < high:
        zeros = (0,) * (len(shape) - 1)
        found.append(Box((low, *zeros), (high - low, *shape[1:])))
    return found + _inside(shape, high, 0, end - high * row)


def _inside(shape: tuple[int, ...], index: int, first: int, end: int) -> list[Box]:
    """Elements of one index of the first dim."""
    return [
        Box((index, *box.offset), (1, *box.shape))
        for box in boxes(shape[1:], first, end)
    ]


def place(shape: Sequence[int], offset: Sequence[int]) -> int:
    """Number of an element in file order. Pure."""
    number = 0
    for extent, index in zip(shape, offset, strict=True):
        number = number * extent + index
    return number


def contiguous(shape: tuple[int, ...], part: Box) -> bool:
    """Whether a part's elements follow each other in file order. Pure."""
    wide = [dim for dim, extent in enumerate(part.shape) if extent > 1]
    return not wide or part.shape[wide[0] + 1 :] == shape[wide[0] + 1 :]


def touched(shape: tuple[int, ...], part: Box, block: int) -> list[tuple[int, int]]:
    """Runs ``(first, end)`` of blocks of file order that hold elements of a part. Pure.

    Parameters
    ----------
    shape : tuple of int
        The piece's.
    part : Box
    block : int
        Elements in a block.
    """
    runs: list[tuple[int, int]] = []
    for slab in slabs(shape, part, block):
        wanted = slab.intersection(part) or slab
        corners = zip(wanted.offset, wanted.shape, strict=True)
        first = place(shape, wanted.offset) // block
        end = place(shape, [at + extent - 1 for at, extent in corners]) // block + 1
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((first, end))
    return runs
