"""Reading a checkpoint's data files, checksums verified. Local: no MPI here.

Nothing in a file is believed before it is checked: only contiguous datasets inside
their own file are read, or chunks of one form, and a size is compared with the file's
before memory is taken.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np
from h5py import h5d

from tparmpi.io import checksums, slabs, staging
from tparmpi.io import format as fmt
from tparmpi.io.chunked import Chunks
from tparmpi.io.index import Index, StoredPiece, StoredTensor
from tparmpi.io.planner import Box
from tparmpi.io.untrusted import (
    Refused,
    datasets,
    open_data_file,
    told,
    walk,
)

Fetch = Callable[[memoryview, int], None]
"""Fills memory with bytes of a piece, from one of its file order on."""


class BlockReader:
    """Reads parts of tensors from a checkpoint's data files, checksums verified.

    A context manager that keeps the data files it has needed open. Local.

    Parameters
    ----------
    folder : Path
    index : Index
    verified : bool, default True
        For measuring alone: what checksums cost is the time without them.
    """

    def __init__(self, folder: Path, index: Index, *, verified: bool = True) -> None:
        self._folder = folder
        self._index = index
        self._files: dict[str, _DataFile] = {}
        self._crew = _Crew(verified)

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._crew.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def bytes_read(self) -> int:
        """Bytes of data files asked for so far."""
        return self._crew.bytes_read

    def read(self, name: str, box: Box) -> np.ndarray:
        """The part `box` of a tensor, as a fresh array in its own dtype.

        Raises
        ------
        CheckpointError
            A data file is missing, cut, changed, or not the one that was written.
        """
        dtype = fmt.dtypes.dtype(self._index.tensors[name].dtype)
        values = np.empty(box.shape, dtype)
        self.read_into(name, box, values)
        return values

    def read_into(self, name: str, box: Box, target: np.ndarray) -> None:
        """Read the part `box` of a tensor to where it is wanted.

        What is contiguous in the file and in `target` goes straight there; else each
        thread stages one part, of at most `staging.part_bytes()`.

        Parameters
        ----------
        name : str
        box : Box
        target : ndarray
            Of the box's shape and the tensor's dtype. After an error its values are
            undefined.

        Raises
        ------
        CheckpointError
            As for :meth:`read`.
        """
        tensor = self._index.tensors[name]
        for piece in tensor.pieces:
            common = piece.box.intersection(box)
            if common is not None:
                with self._file(piece.file, name) as file:
                    file.read(tensor, piece, common, common.of(target, box.offset))

    def check(self, name: str, box: Box) -> None:
        """Read the part `box` of a tensor for its checksums alone, keeping nothing.

        Raises
        ------
        CheckpointError
            As for :meth:`read`.
        """
        tensor = self._index.tensors[name]
        for piece in tensor.pieces:
            common = piece.box.intersection(box)
            if common is not None:
                with self._file(piece.file, name) as file:
                    file.check(tensor, piece, common)

    def datasets(self, file_name: str) -> list[str]:
        """Names of all datasets in a data file.

        Raises
        ------
        CheckpointError
            The file is missing, damaged, or not the one that was written.
        """
        with self._file(file_name, None) as file:
            return file.datasets()

    @contextmanager
    def _file(self, file_name: str, name: str | None) -> Iterator[_DataFile]:
        """A data file, opened once, and its errors in a sentence."""
        path = self._folder / file_name
        needed = f"; '{name}' cannot be read without it" if name else ""
        with told(path, needed):
            if file_name not in self._files:
                save_id = self._index.header.save_id
                self._files[file_name] = _DataFile(path, save_id, self._crew)
            yield self._files[file_name]


class _DataFile:
    """One data file: HDF5 says where a dataset lies, plain reads fetch it."""

    def __init__(self, path: Path, save_id: str, crew: _Crew) -> None:
        self._crew = crew
        self._file = open_data_file(path, save_id)
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except BaseException:
            self._file.close()
            raise
        self._size = os.fstat(self._descriptor).st_size
        # Asking HDF5 takes longer than reading a small tensor, and each is read twice.
        self._groups: dict[str, h5py.Group] = {}
        self._offsets: dict[tuple[str, tuple[int, ...]], int] = {}

    def close(self) -> None:
        self._groups.clear()
        os.close(self._descriptor)
        self._file.close()

    def read(
        self, tensor: StoredTensor, piece: StoredPiece, part: Box, target: np.ndarray
    ) -> None:
        self._blocks(tensor, piece).read(_inside(piece, part), target)

    def check(self, tensor: StoredTensor, piece: StoredPiece, part: Box) -> None:
        self._blocks(tensor, piece).check(_inside(piece, part))

    def _blocks(self, tensor: StoredTensor, piece: StoredPiece) -> _Blocks:
        return _Blocks(self._bytes(tensor, piece), tensor, piece, self._crew)

    def datasets(self) -> list[str]:
        return [name for name, _ in datasets(self._file)]

    def _bytes(self, tensor: StoredTensor, piece: StoredPiece) -> Fetch:
        """What reads the bytes of a piece in file order."""
        key = tensor.name, piece.box.shape
        if key not in self._offsets:
            dataset = self._dataset(tensor, piece)
            if dataset.id.get_create_plist().get_layout() == h5d.CHUNKED:
                return Chunks(dataset, tensor.name, self._size, self._read).read
            offset = dataset.id.get_offset()
            nbytes = piece.box.size * fmt.itemsize(tensor.dtype)
            if offset is None or offset + nbytes > self._size:
                raise Refused(
                    f"it has {self._size} bytes, too few for '{tensor.name}': was it "
                    "cut?"
                )
            self._offsets[key] = offset
        start = self._offsets[key]
        return lambda target, first: self._read(target, start + first)

    def _dataset(self, tensor: StoredTensor, piece: StoredPiece) -> h5py.Dataset:
        """A piece's dataset, in a form that can be read by offsets."""
        dataset = walk(self._file, tensor.name, self._groups)
        if not isinstance(dataset, h5py.Dataset):
            raise Refused(f"'{tensor.name}' is not a dataset")
        properties = dataset.id.get_create_plist()
        if properties.get_layout() not in (h5d.CONTIGUOUS, h5d.CHUNKED):
            raise Refused(f"'{tensor.name}' is stored neither contiguously nor chunked")
        if properties.get_external_count():
            raise Refused(f"'{tensor.name}' is stored in another file")
        if dataset.shape != piece.box.shape:
            raise Refused(
                f"'{tensor.name}' has shape {dataset.shape}, the index says "
                f"{piece.box.shape}"
            )
        if not dataset.id.get_type().equal(fmt.file_type(tensor.dtype)):
            raise Refused(f"'{tensor.name}' is not stored as {tensor.dtype}")
        return dataset

    def _read(self, target: memoryview, first: int) -> None:
        read_at(self._descriptor, target, first)


def _inside(piece: StoredPiece, part: Box) -> Box:
    """A part of a tensor that lies in a piece, counted from the piece's first."""
    low = tuple(o - b for o, b in zip(part.offset, piece.box.offset, strict=True))
    return Box(low, part.shape)


class _Crew:
    """The threads that read and check, each with a buffer of its own."""

    def __init__(self, verified: bool) -> None:
        self.verified = verified
        self.bytes_read = 0
        self.buffers = staging.Buffers()
        self._pool = ThreadPoolExecutor(fmt.threads())

    def run(
        self, work: Callable[[tuple[int, int]], None], ranges: list[tuple[int, int]]
    ) -> None:
        self.bytes_read += sum(end - first for first, end in ranges)
        # A thread's turn costs more than a small tensor. All ranges are waited for.
        for _ in map(work, ranges) if len(ranges) < 2 else self._pool.map(work, ranges):
            pass

    def close(self) -> None:
        self._pool.shutdown()


class _Blocks:
    """Checked reads from one stored piece, in whole blocks of its file order."""

    def __init__(
        self, read: Fetch, tensor: StoredTensor, piece: StoredPiece, crew: _Crew
    ) -> None:
        self._read = read
        self._name = tensor.name
        self._shape = piece.box.shape
        self._itemsize = fmt.itemsize(tensor.dtype)
        self._nbytes = piece.box.size * self._itemsize
        self._checksums = piece.checksums
        self._crew = crew

    def read(self, part: Box, target: np.ndarray) -> None:
        """A part of the piece, to where it is wanted."""
        low = high = 0
        straight = memoryview(b"")
        if target.flags.c_contiguous and slabs.contiguous(self._shape, part):
            low = slabs.place(self._shape, part.offset) * self._itemsize
            high = low + part.size * self._itemsize
            straight = target.reshape(-1).view(np.uint8).data

        def read(where: tuple[int, int]) -> None:
            first, end = where
            if low <= first and end <= high:
                self._fetch(first, straight[first - low : end - low])
                return
            staged = self._crew.buffers.get(end - first)
            self._fetch(first, staged.data)
            self._scatter(staged, first, part, target)

        self._crew.run(read, self._ranges(part, (low, high)))

    def check(self, part: Box) -> None:
        """What a part of the piece needs, for its checksums alone."""

        def check(where: tuple[int, int]) -> None:
            # One block at a time stays in the processor's cache.
            staged = self._crew.buffers.get(fmt.BLOCK_BYTES).data
            for first in range(*where, fmt.BLOCK_BYTES):
                self._fetch(first, staged[: where[1] - first])

        self._crew.run(check, self._ranges(part, (0, 0)))

    def _ranges(self, part: Box, straight: tuple[int, int]) -> list[tuple[int, int]]:
        """The bytes to read, cut for threads, and where a straight range has ends."""
        block, step = fmt.BLOCK_BYTES, staging.part_bytes()
        low, high = -(-straight[0] // block) * block, straight[1] // block * block
        if straight[1] == self._nbytes:
            high = self._nbytes
        found = []
        for run in slabs.touched(self._shape, part, block // self._itemsize):
            begin, end = run[0] * block, min(run[1] * block, self._nbytes)
            cuts = {begin, end, *(cut for cut in (low, high) if begin < cut < end)}
            for first, last in itertools.pairwise(sorted(cuts)):
                found += [(at, min(at + step, last)) for at in range(first, last, step)]
        return found

    def _fetch(self, first: int, target: memoryview) -> None:
        """Read whole blocks from `first` on, each checked while it is in the cache."""
        for at in range(0, len(target), fmt.BLOCK_BYTES):
            block = target[at : at + fmt.BLOCK_BYTES]
            self._read(block, first + at)
            number = (first + at) // fmt.BLOCK_BYTES
            if not self._crew.verified:
                continue
            if checksums.crc32(block) != self._checksums[number]:
                raise Refused(
                    f"the checksum of '{self._name}' is wrong in its block {number} "
                    "(1 MiB each): the data are damaged or not those that were saved"
                )

    def _scatter(
        self, staged: np.ndarray, first: int, part: Box, target: np.ndarray
    ) -> None:
        """Copy what a part has of bytes of file order to its places in `target`."""
        values = staged.view(target.dtype)
        start = first // self._itemsize
        for box in slabs.boxes(self._shape, start, start + len(values)):
            common = box.intersection(part)
            found = values[: box.size].reshape(box.shape)
            values = values[box.size :]
            if common is not None:
                common.of(target, part.offset)[...] = common.of(found, box.offset)


def read_at(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill `target`: the system may give less than asked for at a time."""
    while len(target):
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise OSError("the file ends too early")
        target, offset = target[count:], offset + count
