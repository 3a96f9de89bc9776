"""Who writes what: one writer for each element of each tensor. Pure, no files, no MPI.

Every rank knows every tensor's shape and layout, so every rank computes the same plan
without a word to the others. The reader uses the same :class:`Box` and the same proof
that boxes fill a shape.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from tparmpi.errors import CheckpointError

# A replicated block is divided among its holders only into pieces of at least this
# many bytes: smaller ones cost more in mapping entries than they save in balance.
MIN_PIECE_BYTES = 64 << 10


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor: its first index and its extent in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Index of this box in an array whose first element is at `origin`."""
        base = (0,) * len(self.shape) if origin is None else origin
        return tuple(
            slice(o - b, o - b + n)
            for o, n, b in zip(self.offset, self.shape, base, strict=True)
        )

    def of(self, array: Any, origin: Sequence[int] | None = None) -> Any:
        """View of this box in an array whose first element is at `origin`."""
        # The ellipsis keeps a view of an array without dims from becoming a scalar.
        return array[self.slices(origin) + (...,)]  # noqa: RUF005

    def intersection(self, other: Box) -> Box | None:
        """The common part, None if there is none."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(
                self.offset, self.shape, other.offset, other.shape, strict=True
            )
        )
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))


@dataclass(frozen=True)
class Block:
    """A part of a tensor that some ranks hold, all of them the same values."""

    box: Box
    holders: tuple[int, ...]


@dataclass(frozen=True)
class TensorDescription:
    """What the planner needs to know of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor and the world rank that writes it."""

    box: Box
    writer: int


Plan = Mapping[str, tuple[Piece, ...]]


def blocks_of(spec: Any) -> tuple[Block, ...]:
    """The distinct blocks of a tensor and the world ranks holding each. Local.

    Parameters
    ----------
    spec : Spec
        Of a tensor without a pending sum. Empty blocks are left out.
    """
    holders: dict[Box, list[int]] = {}
    coordinates = itertools.product(*(range(n) for n in spec.place.shape))
    for device, coordinate in zip(spec.place.devices, coordinates, strict=True):
        box = Box(*map(tuple, spec.block(coordinate)))
        if box.size:
            holders.setdefault(box, []).append(device.rank)
    return tuple(Block(box, tuple(sorted(r))) for box, r in sorted(holders.items()))


def make_plan(
    tensors: Iterable[TensorDescription], min_piece_bytes: int = MIN_PIECE_BYTES
) -> dict[str, tuple[Piece, ...]]:
    """Choose one writer for each element of each tensor. Local, the same on all ranks.

    Blocks are taken from large to small. A large one is divided along its first dim
    among its holders so that their loads become level; a small one goes whole to the
    holder with the least to write.

    Parameters
    ----------
    tensors : iterable of TensorDescription
    min_piece_bytes : int
        Smallest piece into which a block is divided.

    Returns
    -------
    dict
        Name to pieces, sorted by offset; together they are the whole tensor.

    Raises
    ------
    CheckpointError
        A tensor's blocks leave out or repeat elements.
    """
    load: dict[int, int] = {}
    pieces: dict[str, list[Piece]] = {}
    pending: list[tuple[int, str, Block, int]] = []
    for tensor in tensors:
        boxes = tuple(block.box for block in tensor.blocks)
        if not fills(tensor.shape, boxes):
            raise CheckpointError(
                f"the blocks of '{tensor.name}' do not fill its shape {tensor.shape} "
                "exactly once"
            )
        pieces[tensor.name] = []
        for block in tensor.blocks:
            nbytes = block.box.size * tensor.itemsize
            pending.append((nbytes, tensor.name, block, tensor.itemsize))
    pending.sort(key=lambda item: (-item[0], item[1], item[2].box))
    for _, name, block, itemsize in pending:
        for piece in _divided(block, itemsize, load, min_piece_bytes):
            load[piece.writer] = load.get(piece.writer, 0) + piece.box.size * itemsize
            pieces[name].append(piece)
    return {
        name: tuple(sorted(parts, key=lambda p: p.box))
        for name, parts in sorted(pieces.items())
    }


def digest_of(tensors: Iterable[TensorDescription]) -> str:
    """A hash by which ranks compare what they are about to save. Local."""
    text = "\n".join(map(repr, tensors))
    return hashlib.sha256(text.encode()).hexdigest()


def _divided(
    block: Block, itemsize: int, load: Mapping[int, int], min_piece_bytes: int
) -> list[Piece]:
    box = block.box
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    shares = _level(block, itemsize, load, min_piece_bytes)
    if dim is None or len(shares) == 1:
        return [Piece(box, min(block.holders, key=lambda r: (load.get(r, 0), r)))]
    rows, total = box.shape[dim], sum(shares.values())
    parts, first, given = [], 0, 0
    for writer, share in shares.items():
        given += share
        end = rows * given // total
        if end > first:
            parts.append(Piece(_rows(box, dim, first, end), writer))
        first = end
    return parts


def _rows(box: Box, dim: int, first: int, end: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[dim] += first
    shape[dim] = end - first
    return Box(tuple(offset), tuple(shape))


def _level(
    block: Block, itemsize: int, load: Mapping[int, int], min_piece_bytes: int
) -> dict[int, int]:
    """Bytes for each holder such that loads end level; none below the minimum."""
    nbytes = block.box.size * itemsize
    holders = sorted(block.holders, key=lambda r: (load.get(r, 0), r))
    while len(holders) > 1:
        level = (nbytes + sum(load.get(r, 0) for r in holders)) // len(holders)
        if level - load.get(holders[-1], 0) >= min_piece_bytes:
            return {r: level - load.get(r, 0) for r in holders}
        holders.pop()
    return {holders[0]: nbytes}


@lru_cache(maxsize=4096)
def fills(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> bool:
    """Whether non-empty boxes cover a shape completely and nowhere twice. Local."""
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return False
        if not all(
            o >= 0 and n > 0 and o + n <= size
            for o, n, size in zip(box.offset, box.shape, shape, strict=True)
        ):
            return False
    if sum(box.size for box in boxes) != prod(shape):
        return False
    return _disjoint([(box.offset, box.shape) for box in boxes])


def _disjoint(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Sweep along the first dim; boxes alive together are compared in the others."""
    if len(boxes) < 2:
        return True
    if not boxes[0][0]:
        return False
    boxes = sorted(boxes, key=lambda b: b[0][0])
    alive: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    position = 0
    while position < len(boxes):
        start = boxes[position][0][0]
        alive = [b for b in alive if b[0][0] + b[1][0] > start]
        while position < len(boxes) and boxes[position][0][0] == start:
            alive.append(boxes[position])
            position += 1
        if not _disjoint([(offset[1:], shape[1:]) for offset, shape in alive]):
            return False
    return True
