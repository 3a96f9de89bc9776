"""Reading a checkpoint that may be damaged or hostile. Local: no MPI here.

Nothing in a file is believed before it is checked: only hard links are followed, only
contiguous datasets inside their own file are read, the virtual mapping is read as data
and never read through, and a size is compared with the file's before memory is taken.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5s, h5t

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.planner import Box, fills
from tparmpi.io.writer import Header

STAGING_BYTES = 16 * fmt.BLOCK_BYTES
_PART_BYTES = 4 * fmt.BLOCK_BYTES

# What h5py raises for files that are cut, damaged or made to confuse it.
HDF5_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor, the data file that holds it, its block checksums."""

    box: Box
    file: str
    checksums: np.ndarray


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the index describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Index:
    """A checkpoint's index, checked: safe to send to other ranks and to read by."""

    header: Header
    tensors: dict[str, StoredTensor]


def read_index(folder: Path) -> Index:
    """Read and check ``index.h5`` whole. Local.

    Raises
    ------
    CheckpointError
        The folder holds no checkpoint, or not one that this program can have written.
    """
    path = folder / fmt.INDEX_NAME
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    if not path.exists():
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {fmt.INDEX_NAME}"
        )
    try:
        with _open(path) as file:
            header = _read_header(file)
            tensors: dict[str, StoredTensor] = {}
            for name, dataset in _datasets(file):
                tensors[name] = _read_tensor(name, dataset, header.save_id)
    except HDF5_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read: {fmt.reason(error)}") from error
    except _Refused as refused:
        raise CheckpointError(f"{path} is refused: {refused}") from refused
    return Index(header, tensors)


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
        try:
            if file_name not in self._files:
                save_id = self._index.header.save_id
                self._files[file_name] = _DataFile(path, save_id, self._pool)
            yield self._files[file_name]
        except FileNotFoundError as error:
            needed = f"; '{name}' cannot be read without it" if name else ""
            raise CheckpointError(f"{path} is missing{needed}") from error
        except HDF5_ERRORS as error:
            raise CheckpointError(
                f"{path} cannot be read: {fmt.reason(error)}"
            ) from error
        except _Refused as refused:
            raise CheckpointError(f"{path} is refused: {refused}") from refused


class _Refused(Exception):
    """Why a file is not read; always turned into a CheckpointError with its path."""


class _DataFile:
    """One data file: HDF5 says where a dataset lies, plain reads fetch it."""

    def __init__(self, path: Path, save_id: str, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._file = _open(path)
        try:
            if _text(self._file, "save_id") != save_id:
                raise _Refused("it belongs to another save")
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
        return [name for name, _ in _datasets(self._file)]

    def _offset(self, tensor: StoredTensor, piece: StoredPiece) -> int:
        dataset = _walk(self._file, tensor.name)
        if not isinstance(dataset, h5py.Dataset):
            raise _Refused(f"'{tensor.name}' is not a dataset")
        properties = dataset.id.get_create_plist()
        if properties.get_layout() != h5d.CONTIGUOUS:
            raise _Refused(f"'{tensor.name}' is not stored contiguously")
        if properties.get_external_count():
            raise _Refused(f"'{tensor.name}' is stored in another file")
        if dataset.shape != piece.box.shape:
            raise _Refused(
                f"'{tensor.name}' has shape {dataset.shape}, the index says "
                f"{piece.box.shape}"
            )
        if not dataset.id.get_type().equal(fmt.file_type(tensor.dtype)):
            raise _Refused(f"'{tensor.name}' is not stored as {tensor.dtype}")
        offset = dataset.id.get_offset()
        nbytes = piece.box.size * fmt.itemsize(tensor.dtype)
        if offset is None or offset + nbytes > self._size:
            raise _Refused(
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
                raise _Refused(
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


def _open(path: Path) -> h5py.File:
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        raise _Refused("it is not a regular file")
    # A published file never changes, so it needs no lock; some shared file systems
    # refuse locks.
    return h5py.File(path, "r", locking=False)


def _read_header(file: h5py.File) -> Header:
    if _text(file, "format") != fmt.FORMAT:
        raise _Refused("it is not a tparmpi checkpoint")
    version = _integer(file, "format_version")
    if version != fmt.VERSION:
        raise _Refused(
            f"its format has version {version}, this tparmpi reads version "
            f"{fmt.VERSION}; use a newer tparmpi"
        )
    if _integer(file, "crc_block_bytes") != fmt.BLOCK_BYTES:
        raise _Refused(f"crc_block_bytes is not {fmt.BLOCK_BYTES}")
    save_id = _text(file, "save_id")
    if not fmt.SAVE_ID.fullmatch(save_id):
        raise _Refused("save_id is not 16 hexadecimal digits")
    step, extra = _integer(file, "step"), json.loads(_text(file, "extra"))
    if step is None or not isinstance(extra, dict):
        raise _Refused("step or extra is missing")
    seed, position = _integer(file, "seed"), _integer(file, "position")
    steps = _integer(file, "optimizer_steps")
    return Header(save_id, step, seed, position, steps, extra)


def _datasets(file: h5py.File) -> list[tuple[str, h5py.Dataset]]:
    """Every dataset below the root by hard links alone, each met once."""
    found: list[tuple[str, h5py.Dataset]] = []
    met: set[Any] = set()
    pending: list[tuple[str, h5py.Group]] = [("", file["/"])]
    while pending:
        path, group = pending.pop()
        for key in group:
            name = f"{path}/{key}" if path else key
            child = _child(group, key, name)
            address = h5py.h5o.get_info(child.id).addr
            if address in met or name.count("/") >= fmt.MAX_DEPTH:
                raise _Refused(f"'{name}' is linked twice or nested too deeply")
            met.add(address)
            if isinstance(child, h5py.Dataset):
                found.append((name, child))
            else:
                pending.append((name, child))
    return sorted(found, key=lambda item: item[0])


def _walk(file: h5py.File, name: str) -> h5py.Group | h5py.Dataset:
    place = file["/"]
    for component in name.split("/"):
        if not isinstance(place, h5py.Group) or component not in place:
            raise _Refused(f"it has no '{name}'")
        place = _child(place, component, name)
    return place


def _child(group: h5py.Group, key: str, name: str) -> h5py.Group | h5py.Dataset:
    if not fmt.checked_name(key):
        raise _Refused(f"{name!r} is not a name that a checkpoint can hold")
    if group.get(key, getclass=True, getlink=True) is not h5py.HardLink:
        raise _Refused(f"'{name}' is a soft or external link")
    if group.get(key, getclass=True) not in (h5py.Group, h5py.Dataset):
        raise _Refused(f"'{name}' is neither a group nor a dataset")
    return group[key]


def _read_tensor(name: str, dataset: h5py.Dataset, save_id: str) -> StoredTensor:
    dtype = _text(dataset, "dtype")
    if dtype not in fmt.DTYPES:
        raise _Refused(f"'{name}' has the unknown dtype {dtype!r}")
    if not dataset.id.get_type().equal(fmt.file_type(dtype)):
        raise _Refused(f"'{name}' is not stored as its dtype {dtype}")
    if dataset.id.get_space().get_simple_extent_type() == h5s.NULL:
        raise _Refused(f"'{name}' has no shape")
    if dataset.maxshape != dataset.shape:
        raise _Refused(f"'{name}' has no fixed shape")
    properties = dataset.id.get_create_plist()
    if properties.get_layout() != h5d.VIRTUAL:
        raise _Refused(f"'{name}' is not a virtual dataset")
    shape, size = dataset.shape, fmt.itemsize(dtype)
    mapping = [
        _read_mapping(name, shape, properties, number, save_id)
        for number in range(properties.get_virtual_count())
    ]
    mapping.sort(key=lambda entry: entry[0])
    if not fills(shape, tuple(box for box, _ in mapping)):
        raise _Refused(f"the pieces of '{name}' do not fill its shape exactly once")
    counts = [fmt.block_count(box.size * size) for box, _ in mapping]
    checksums = np.split(_checksums(dataset, name, sum(counts)), np.cumsum(counts))
    pieces = tuple(
        StoredPiece(box, file, part)
        for (box, file), part in zip(mapping, checksums[:-1], strict=True)
    )
    return StoredTensor(name, shape, dtype, pieces)


def _read_mapping(
    name: str, shape: tuple[int, ...], properties: Any, number: int, save_id: str
) -> tuple[Box, str]:
    file = properties.get_virtual_filename(number)
    match = fmt.DATA_NAME.fullmatch(file)
    if not match or match[1] != save_id:
        raise _Refused(f"'{name}' is said to lie in {file!r}, not in a file of its own")
    if properties.get_virtual_dsetname(number) != name:
        raise _Refused(f"'{name}' is mapped to a dataset of another name")
    if properties.get_virtual_srcspace(number).get_select_type() != h5s.SEL_ALL:
        raise _Refused(f"'{name}' is mapped to a part of a dataset")
    return _mapped_box(name, shape, properties.get_virtual_vspace(number)), file


def _mapped_box(name: str, shape: tuple[int, ...], space: h5s.SpaceID) -> Box:
    if space.get_select_type() == h5s.SEL_ALL:
        return Box((0,) * len(shape), shape)
    if space.get_select_type() != h5s.SEL_HYPERSLABS or not (
        space.is_regular_hyperslab()
    ):
        raise _Refused(f"the mapping of '{name}' is not a rectangular block")
    start, stride, count, block = space.get_regular_hyperslab()
    for step, times, extent in zip(stride, count, block, strict=True):
        if times != 1 and step != extent:
            raise _Refused(f"the mapping of '{name}' has gaps")
    extents = tuple(int(c * b) for c, b in zip(count, block, strict=True))
    return Box(tuple(map(int, start)), extents)


def _attribute(place: h5py.HLObject, name: str) -> h5a.AttrID | None:
    if not h5a.exists(place.id, name.encode()):
        return None
    return h5a.open(place.id, name.encode())


def _text(place: h5py.HLObject, name: str) -> str:
    attribute = _attribute(place, name)
    if attribute is None:
        raise _Refused(f"the attribute {name} is missing")
    kind = attribute.get_type()
    if (
        not isinstance(kind, h5t.TypeStringID)
        or kind.is_variable_str()
        or attribute.shape != ()
        or kind.get_size() > fmt.MAX_TEXT_BYTES
    ):
        raise _Refused(f"the attribute {name} is not a text of fixed length")
    return bytes(place.attrs[name]).decode()


def _integer(place: h5py.HLObject, name: str) -> int | None:
    attribute = _attribute(place, name)
    if attribute is None:
        return None
    if attribute.shape != () or not attribute.get_type().equal(h5t.STD_I64LE):
        raise _Refused(f"the attribute {name} is not a 64-bit integer")
    return int(place.attrs[name])


def _checksums(dataset: h5py.Dataset, name: str, count: int) -> np.ndarray:
    attribute = _attribute(dataset, "crc32")
    if (
        attribute is None
        or count * 4 > dataset.file.id.get_filesize()
        or attribute.shape != (count,)
        or not attribute.get_type().equal(h5t.STD_U32LE)
    ):
        raise _Refused(f"'{name}' does not have its {count} checksums")
    return np.asarray(dataset.attrs["crc32"], np.uint32)
