"""Compressed datasets: HDF5 chunks, each shuffled and deflated. Local: no MPI here.

A chunk's elements follow each other in file order (C order, the last dim fastest), so
all chunks in order are the piece's bytes in file order, of which the checksums are
taken. Compression and its inverse run in threads, with at most one chunk's bytes for
each in memory, whatever a file says.
"""

from __future__ import annotations

import difflib
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import h5py
import numpy as np
from h5py import h5p, h5z

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.untrusted import Refused

Compression = str | int | Mapping[str, str | int | None] | None

_GZIP = "gzip"
_NONE = "none"
_GZIP_LEVEL = 4
_LEVELS = range(1, 10)
# What deflate can make of nothing but equal bytes.
_MOST_RATIO = 1032


class Levels:
    """Which tensors are compressed, and how much: a level from 1 to 9, or 0.

    Raises
    ------
    CheckpointError
        What was given says nothing of the kind. As of all errors of it, the first word
        is the argument's name.
    """

    def __init__(self, compression: Compression) -> None:
        self._by_name = isinstance(compression, Mapping)
        given = compression if isinstance(compression, Mapping) else {".*": compression}
        self._levels: list[tuple[re.Pattern[str], int]] = []
        for pattern, value in given.items():
            try:
                self._levels.append((re.compile(pattern), _level(value)))
            except (re.error, TypeError) as error:
                raise CheckpointError(
                    f"compression has {pattern!r}, which is no regular expression: "
                    f"{error}"
                ) from error

    def of(self, path: str) -> int:
        """The level for a tensor by its path in the checkpoint."""
        name = _name(path)
        for pattern, level in self._levels:
            if pattern.fullmatch(name):
                return level
        return 0

    def check(self, paths: Collection[str]) -> None:
        """Refuse a pattern that matches none of the tensors that there are.

        Parameters
        ----------
        paths
            Those of all tensors, in the checkpoint.

        Raises
        ------
        CheckpointError
            Naming the pattern, and the tensor whose name is nearest to it.
        """
        if not self._by_name:
            return
        names = [_name(path) for path in paths]
        for pattern, _ in self._levels:
            if not any(map(pattern.fullmatch, names)):
                raise CheckpointError(
                    f"compression has {pattern.pattern!r}, which matches no tensor's "
                    f"whole name{_nearest(pattern.pattern, names)}; correct the "
                    "pattern or leave it out"
                )


def _name(path: str) -> str:
    """A parameter's name, with dots, of its path in a checkpoint."""
    return path.partition("/")[2].replace("/", ".")


def _nearest(pattern: str, names: Collection[str]) -> str:
    # Whatever its likeness: of a pattern, most is not the name's.
    near = difflib.get_close_matches(pattern.replace("\\", ""), names, 1, 0.0)
    return f" (near: {near[0]!r})" if near else ": there are none"


def _level(value: Any) -> int:
    if value is None or value == _NONE:
        return 0
    if value == _GZIP:
        return _GZIP_LEVEL
    if type(value) is int and value in _LEVELS:
        return value
    raise CheckpointError(
        "compression must be 'gzip', a level of it from 1 to 9, or 'none', for all "
        f"tensors or for each pattern of names; it is {value!r}"
    )


class Grid:
    """How a piece is cut into chunks. Pure.

    Attributes
    ----------
    shape, chunk : tuple of int
        The piece's, and a chunk's: ones, then a part of one dim, then whole dims.
    nbytes : int
        Bytes of a chunk.
    count : int
        Chunks.
    """

    def __init__(
        self, shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int
    ) -> None:
        self.shape, self.chunk = shape, chunk
        self.nbytes = prod(chunk) * itemsize
        wide = [dim for dim, extent in enumerate(chunk) if extent > 1]
        self._dim = wide[0] if wide else len(shape) - 1
        # Chunks and bytes of one index of the dims before that one.
        self._across = -(-shape[self._dim] // chunk[self._dim])
        self._row = prod(shape[self._dim :]) * itemsize
        self.count = self._across * prod(shape[: self._dim])

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int) -> Grid:
        """The largest chunks of at most a checksum's block."""
        room = max(1, fmt.BLOCK_BYTES // itemsize)
        chunk = [1] * len(shape)
        for dim in reversed(range(len(shape))):
            chunk[dim] = min(shape[dim], room)
            room //= chunk[dim]
            if chunk[dim] < shape[dim] or not room:
                break
        return cls(shape, tuple(chunk), itemsize)

    def is_in_file_order(self) -> bool:
        """Whether each chunk's elements follow each other in the piece."""
        return self.chunk[self._dim + 1 :] == self.shape[self._dim + 1 :]

    def offset(self, number: int) -> tuple[int, ...]:
        """Index of the first element of a chunk in the piece."""
        before, along = divmod(number, self._across)
        lead = np.unravel_index(before, self.shape[: self._dim]) if self._dim else ()
        after = (0,) * (len(self.shape) - self._dim - 1)
        return (*map(int, lead), along * self.chunk[self._dim], *after)

    def span(self, number: int) -> tuple[int, int]:
        """First byte of a chunk in file order, and the one after its last."""
        before, along = divmod(number, self._across)
        first = before * self._row + along * self.nbytes
        return first, min(first + self.nbytes, (before + 1) * self._row)

    def at(self, byte: int) -> int:
        """The chunk that holds a byte of file order."""
        before, inside = divmod(byte, self._row)
        return before * self._across + inside // self.nbytes


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a piece can be cut into chunks: scalars and empty ones cannot."""
    return bool(shape) and prod(shape) > 0


def properties(shape: tuple[int, ...], itemsize: int, level: int) -> h5p.PropDCID:
    """How HDF5 is to lay out a compressed dataset."""
    made = h5p.create(h5p.DATASET_CREATE)
    made.set_chunk(Grid.of(shape, itemsize).chunk)
    if itemsize > 1:
        made.set_shuffle()
    made.set_deflate(level)
    return made


def write(
    dataset: h5py.Dataset,
    itemsize: int,
    level: int,
    parts: Iterable[memoryview],
    threads: int,
) -> np.ndarray:
    """Write a dataset's chunks; the checksums of its bytes.

    Parameters
    ----------
    parts
        The bytes in file order, whole blocks at a time but for the last.
    threads
        That compress at once.
    """
    grid = Grid.of(dataset.shape, itemsize)
    checksums: list[int] = []
    pending: deque[tuple[int, Future[bytes]]] = deque()

    def write_oldest() -> None:
        number, packed = pending.popleft()
        dataset.id.write_direct_chunk(grid.offset(number), packed.result())

    with ThreadPoolExecutor(threads) as pool:
        chunks = _chunks(grid, _summed(parts, checksums))
        for number, chunk in enumerate(chunks):
            pending.append((number, pool.submit(_pack, chunk, itemsize, level)))
            while len(pending) >= 2 * threads:
                write_oldest()
        while pending:
            write_oldest()
    return np.array(checksums, np.uint32)


def _summed(parts: Iterable[memoryview], checksums: list[int]) -> Iterator[memoryview]:
    for part in parts:
        checksums += fmt.block_checksums(part)
        yield part


def _chunks(grid: Grid, parts: Iterable[memoryview]) -> Iterator[np.ndarray]:
    """The bytes of each chunk, with zeros behind a shorter last one of a row."""
    rest = memoryview(b"")
    source = iter(parts)
    for number in range(grid.count):
        first, end = grid.span(number)
        chunk = np.zeros(grid.nbytes, np.uint8)
        filled = 0
        while filled < end - first:
            rest = rest if len(rest) else next(source)
            taken = rest[: end - first - filled]
            chunk.data[filled : filled + len(taken)] = taken
            filled += len(taken)
            rest = rest[len(taken) :]
        yield chunk


def _pack(chunk: np.ndarray, itemsize: int, level: int) -> bytes:
    shuffled = np.ascontiguousarray(chunk.reshape(-1, itemsize).T)
    return zlib.compress(shuffled.data, level)


class Chunks:
    """Reads bytes of file order from a compressed dataset that may be hostile."""

    def __init__(
        self,
        dataset: h5py.Dataset,
        name: str,
        size: int,
        read_at: Callable[[memoryview, int], None],
    ) -> None:
        """Check how the dataset is laid out; nothing of it is read. Local.

        Parameters
        ----------
        dataset
            Chunked, of the shape and type that the index says.
        name
            The tensor's, for messages.
        size, read_at
            The file's bytes, and what fills memory from an offset in it.
        """
        self._dataset, self._name = dataset, name
        self._size, self._read_at = size, read_at
        self._itemsize = dataset.id.get_type().get_size()
        self._grid = Grid(dataset.shape, dataset.chunks, self._itemsize)
        self._own = threading.local()
        if _filters(dataset) != _expected(self._itemsize):
            raise Refused(f"'{name}' is stored with other filters than gzip's")
        if not self._grid.is_in_file_order() or self._grid.nbytes > fmt.BLOCK_BYTES:
            raise Refused(f"'{name}' has chunks of a form that is never written")
        stored, count = dataset.id.get_storage_size(), self._grid.count
        nbytes = prod(dataset.shape) * self._itemsize
        if (
            dataset.id.get_num_chunks() != count
            or stored > size
            or nbytes > _MOST_RATIO * stored
        ):
            raise Refused(f"it has too few bytes for '{name}': was it cut?")

    def read(self, target: memoryview, first: int) -> None:
        """Fill `target` with the bytes from `first` on."""
        while len(target):
            number = self._grid.at(first)
            begin, end = self._grid.span(number)
            found = self._chunk(number)[first - begin : end - begin][: len(target)]
            target[: len(found)] = found
            target, first = target[len(found) :], first + len(found)

    def _chunk(self, number: int) -> memoryview:
        """A chunk's bytes. Each thread keeps its last: the next read begins there."""
        kept: tuple[int, memoryview] | None = getattr(self._own, "kept", None)
        if kept is None or kept[0] != number:
            kept = self._own.kept = number, self._unpacked(number)
        return kept[1]

    def _unpacked(self, number: int) -> memoryview:
        info = self._dataset.id.get_chunk_info_by_coord(self._grid.offset(number))
        nbytes = self._grid.nbytes
        if info.byte_offset is None or info.filter_mask:
            raise Refused(f"chunk {number} of '{self._name}' is not stored compressed")
        # Deflate makes nothing longer by more than that.
        most = nbytes + nbytes // 1000 + 64
        if info.size > most or info.byte_offset + info.size > self._size:
            raise Refused(f"chunk {number} of '{self._name}' lies beyond its place")
        packed = np.empty(info.size, np.uint8)
        self._read_at(packed.data, info.byte_offset)
        inflating = zlib.decompressobj()
        try:
            data = inflating.decompress(packed.data, nbytes)
        except zlib.error as error:
            raise Refused(
                f"chunk {number} of '{self._name}' is damaged: {error}"
            ) from error
        if len(data) != nbytes or inflating.unconsumed_tail:
            raise Refused(f"chunk {number} of '{self._name}' has another length")
        plain = np.frombuffer(data, np.uint8).reshape(self._itemsize, -1).T
        return np.ascontiguousarray(plain).reshape(-1).data


def _filters(dataset: h5py.Dataset) -> list[int]:
    plist = dataset.id.get_create_plist()
    return [plist.get_filter(n)[0] for n in range(plist.get_nfilters())]


def _expected(itemsize: int) -> list[int]:
    shuffle = [h5z.FILTER_SHUFFLE] if itemsize > 1 else []
    return [*shuffle, h5z.FILTER_DEFLATE]
