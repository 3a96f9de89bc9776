"""Reading a checkpoint's data files, checksums verified. Local: no MPI here.

Nothing in a file is believed before it is checked: only contiguous datasets inside
their own file are read, and a size is compared with the file's before memory is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np
from h5py import h5d

from tparmpi.io import format as fmt
from tparmpi.io.index import Index, StoredPiece, StoredTensor
from tparmpi.io.planner import Box
from tparmpi.io.untrusted import (
    Refused,
    datasets,
    open_data_file,
    told,
    walk,
)

STAGING_BYTES = 16 * fmt.BLOCK_BYTES
_PART_BYTES = 4 * fmt.BLOCK_BYTES


class BlockReader:
    """Reads parts of tensors from a checkpoint's data files, checksums verified.

    A context manager that keeps the data files it has needed open. Local.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder = folder
        self._index = index
        self._files: dict[str, _DataFile] = {}
        self._pool = ThreadPoolExecutor(fmt.threads())

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read(self, name: str, box: Box) -> np.ndarray:
        """The part `box` of a tensor, as a fresh array in its own dtype.

        Raises
        ------
        CheckpointError
            A data file is missing, cut, changed, or not the one that was written.
        """
        tensor = self._index.tensors[name]
        values = np.empty(box.shape, fmt.dtypes.dtype(tensor.dtype))
        for piece in tensor.pieces:
            common = piece.box.intersection(box)
            if common is not None:
                target = common.of(values, box.offset)
                self._read_piece(tensor, piece, common, target)
        return values

    def check(self, name: str, piece: StoredPiece) -> None:
        """Read a stored piece of a tensor whole, for its checksums alone.

        Raises
        ------
        CheckpointError
            As for :meth:`read`.
        """
        with self._file(piece.file, name) as file:
            file.check(self._index.tensors[name], piece)

    def datasets(self, file_name: str) -> list[str]:
        """Names of all datasets in a data file.

        Raises
        ------
        CheckpointError
            The file is missing, damaged, or not the one that was written.
        """
        with self._file(file_name, None) as file:
            return file.datasets()

    def _read_piece(
        self, tensor: StoredTensor, piece: StoredPiece, part: Box, target: np.ndarray
    ) -> None:
        with self._file(piece.file, tensor.name) as file:
            file.read(tensor, piece, part, target)

    @contextmanager
    def _file(self, file_name: str, name: str | None) -> Iterator[_DataFile]:
        """A data file, opened once, and its errors in a sentence."""
        path = self._folder / file_name
        needed = f"; '{name}' cannot be read without it" if name else ""
        with told(path, needed):
            if file_name not in self._files:
                save_id = self._index.header.save_id
                self._files[file_name] = _DataFile(path, save_id, self._pool)
            yield self._files[file_name]


class _DataFile:
    """One data file: HDF5 says where a dataset lies, plain reads fetch it."""

    def __init__(self, path: Path, save_id: str, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._file = open_data_file(path, save_id)
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except BaseException:
            self._file.close()
            raise
        self._size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)
        self._file.close()

    def read(
        self, tensor: StoredTensor, piece: StoredPiece, part: Box, target: np.ndarray
    ) -> None:
        offset = self._offset(tensor, piece)
        size = fmt.itemsize(tensor.dtype)
        nbytes = piece.box.size * size
        shape = piece.box.shape
        low = tuple(o - b for o, b in zip(part.offset, piece.box.offset, strict=True))
        blocks = _Blocks(self._descriptor, offset, nbytes, piece.checksums)
        if part == piece.box and target.flags.c_contiguous:
            blocks.read_all(tensor.name, target, self._pool)
            return
        for slab in slabs(shape, Box(low, part.shape), STAGING_BYTES // size):
            first = np.ravel_multi_index(slab.offset, shape) if shape else 0
            data = blocks.read(tensor.name, int(first) * size, slab.size * size)
            values = data.view(target.dtype).reshape(slab.shape)
            common = slab.intersection(Box(low, part.shape))
            if common is not None:
                common.of(target, low)[...] = common.of(values, slab.offset)

    def check(self, tensor: StoredTensor, piece: StoredPiece) -> None:
        nbytes = piece.box.size * fmt.itemsize(tensor.dtype)
        offset = self._offset(tensor, piece)
        blocks = _Blocks(self._descriptor, offset, nbytes, piece.checksums)
        blocks.check(tensor.name)

    def datasets(self) -> list[str]:
        return [name for name, _ in datasets(self._file)]

    def _offset(self, tensor: StoredTensor, piece: StoredPiece) -> int:
        dataset = walk(self._file, tensor.name)
        if not isinstance(dataset, h5py.Dataset):
            raise Refused(f"'{tensor.name}' is not a dataset")
        properties = dataset.id.get_create_plist()
        if properties.get_layout() != h5d.CONTIGUOUS:
            raise Refused(f"'{tensor.name}' is not stored contiguously")
        if properties.get_external_count():
            raise Refused(f"'{tensor.name}' is stored in another file")
        if dataset.shape != piece.box.shape:
            raise Refused(
                f"'{tensor.name}' has shape {dataset.shape}, the index says "
                f"{piece.box.shape}"
            )
        if not dataset.id.get_type().equal(fmt.file_type(tensor.dtype)):
            raise Refused(f"'{tensor.name}' is not stored as {tensor.dtype}")
        offset = dataset.id.get_offset()
        nbytes = piece.box.size * fmt.itemsize(tensor.dtype)
        if offset is None or offset + nbytes > self._size:
            raise Refused(
                f"it has {self._size} bytes, too few for '{tensor.name}': was it cut?"
            )
        return int(offset)


class _Blocks:
    """Checked reads from one stored piece; the last block is kept for the next."""

    def __init__(
        self, descriptor: int, offset: int, nbytes: int, checksums: np.ndarray
    ) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._nbytes = nbytes
        self._checksums = checksums
        self._kept = (0, np.empty(0, np.uint8))

    def read(self, name: str, first: int, count: int) -> np.ndarray:
        """Bytes ``first ... first + count - 1`` of the piece, as uint8."""
        block = first // fmt.BLOCK_BYTES
        start = block * fmt.BLOCK_BYTES
        end = min(self._nbytes, fmt.block_count(first + count) * fmt.BLOCK_BYTES)
        kept_start, kept = self._kept
        known = kept[start - kept_start :] if start >= kept_start else kept[:0]
        data = np.empty(end - start, np.uint8)
        data[: len(known)] = known
        fresh = data.data[len(known) :]
        read_at(self._descriptor, fresh, self._offset + start + len(known))
        self._verify(name, start + len(known), fresh)
        last = (len(data) - 1) // fmt.BLOCK_BYTES * fmt.BLOCK_BYTES
        self._kept = (start + last, data[last:].copy())
        return data[first - start : first - start + count]

    def read_all(self, name: str, target: np.ndarray, pool: ThreadPoolExecutor) -> None:
        """The whole piece, straight to where it is wanted, by several threads."""
        data = target.reshape(-1).view(np.uint8).data

        def read(first: int) -> None:
            part = data[first : first + _PART_BYTES]
            read_at(self._descriptor, part, self._offset + first)
            self._verify(name, first, part)

        parts = range(0, self._nbytes, _PART_BYTES)
        # A thread's turn costs more than a small tensor. All parts are waited for.
        for _ in map(read, parts) if len(parts) < 2 else pool.map(read, parts):
            pass

    def check(self, name: str) -> None:
        """The whole piece, for its checksums alone."""
        staging = np.empty(min(self._nbytes, STAGING_BYTES), np.uint8).data
        for first in range(0, self._nbytes, STAGING_BYTES):
            part = staging[: self._nbytes - first]
            read_at(self._descriptor, part, self._offset + first)
            self._verify(name, first, part)

    def _verify(self, name: str, start: int, data: memoryview) -> None:
        block = start // fmt.BLOCK_BYTES
        for number, found in enumerate(fmt.block_checksums(data), block):
            if found != self._checksums[number]:
                raise Refused(
                    f"the checksum of '{name}' is wrong in its block {number} (1 MiB "
                    "each): the data are damaged or not those that were saved"
                )


def read_at(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill `target`: the system may give less than asked for at a time."""
    while len(target):
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise OSError("the file ends too early")
        target, offset = target[count:], offset + count


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
