"""Writing one data file, and the index over all of them. Local: no MPI here."""

from __future__ import annotations

import ctypes
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p

from tparmpi.errors import CheckpointError
from tparmpi.io import chunked, slabs, staging
from tparmpi.io import format as fmt
from tparmpi.io.planner import Box, Piece, TensorDescription

Checksums = np.ndarray


@dataclass(frozen=True)
class Shard:
    """One dataset of a data file: a name, what it is, and how to get its values.

    Attributes
    ----------
    name, dtype, shape
    fetch : callable
        Its values, wherever they are: an array of any memory, or anything with a shape
        and a dtype that slices can be taken of.
    to_host : callable
        Such a slice as a NumPy array. What `fetch` gives is not asked for as a whole,
        unless it is a C-contiguous NumPy array: that is written from where it lies.
    step_bytes : int, optional
        About how much to ask for at a time; else what is written at a time.
    level : int, optional
        How much it is compressed, 1 to 9; 0, the default, is not at all. Scalars and
        empty shards never are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], Any]
    to_host: Callable[[Any], np.ndarray] = np.asarray
    step_bytes: int = 0
    level: int = 0

    @property
    def is_compressed(self) -> bool:
        """Whether its dataset has compressed chunks."""
        return self.level > 0 and chunked.fits(self.shape)


@dataclass(frozen=True)
class Header:
    """What a checkpoint records beside its tensors; see :func:`checkpoint.save`."""

    save_id: str
    step: int
    seed: int | None = None
    position: int | None = None
    optimizer_steps: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def write_data_file(
    path: Path, save_id: str, shards: Sequence[Shard], *, threads: int | None = None
) -> dict[str, Checksums]:
    """Write, sync and check one rank's data file. Local.

    HDF5 lays out contiguous datasets and tells where they lie; their bytes are then
    written with plain positioned writes from several threads, which take the checksums.
    The disk is told to begin with each part at once, not when all are written.
    Compressed datasets are written by HDF5, chunk by chunk.

    Parameters
    ----------
    path : Path
        Must not exist.
    save_id : str
    shards : sequence of Shard
    threads : int, optional
        That write or compress at once; :func:`fmt.threads` by default.

    Returns
    -------
    dict
        Name to the CRC-32 of each 1 MiB block, uint32.

    Raises
    ------
    OSError
        The disk is full or fails.
    CheckpointError
        The written file is not what was meant.
    """
    threads = fmt.threads() if threads is None else threads
    offsets, checksums = _lay_out(path, save_id, shards, threads)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        plain = [shard for shard in shards if not shard.is_compressed]
        checksums |= _write_shards(descriptor, offsets, plain, threads)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _check_layout(path, shards, offsets)
    return checksums


def write_index(
    path: Path,
    header: Header,
    tensors: Mapping[str, TensorDescription],
    plan: Mapping[str, Sequence[Piece]],
    checksums: Mapping[str, Mapping[int, Checksums]],
) -> None:
    """Write and sync the index: each tensor a virtual dataset of its global shape.

    Parameters
    ----------
    path : Path
        Must not exist.
    header : Header
    tensors, plan : mapping
        By dataset name.
    checksums : mapping
        Dataset name to writer to block checksums.
    """
    with _create(path, header.save_id) as index:
        _write_header(index, header)
        for name, pieces in plan.items():
            _write_virtual(index, header.save_id, tensors[name], pieces)
            parts = [checksums[name][piece.writer] for piece in pieces]
            joined = np.concatenate([np.empty(0, np.uint32), *parts])
            attributes = index[name].attrs
            fmt.text_attribute(index[name], "dtype", tensors[name].dtype)
            attributes.create("crc32", joined, dtype="<u4")
    fmt.sync(path)


def _create(path: Path, save_id: str) -> h5py.File:
    # No other program knows the file yet, so a lock protects nothing, and some shared
    # file systems refuse locks.
    file = h5py.File(path, "x", libver=fmt.HDF5_VERSIONS, locking=False)
    fmt.text_attribute(file, "format", fmt.FORMAT)
    file.attrs.create("format_version", fmt.VERSION, dtype="<i8")
    fmt.text_attribute(file, "save_id", save_id)
    return file


def _write_header(index: h5py.File, header: Header) -> None:
    fmt.text_attribute(index, "extra", json.dumps(header.extra))
    index.attrs.create("crc_block_bytes", fmt.BLOCK_BYTES, dtype="<i8")
    for name in ("step", "seed", "position", "optimizer_steps"):
        value = getattr(header, name)
        if value is not None:
            index.attrs.create(name, value, dtype="<i8")


def _write_virtual(
    index: h5py.File,
    save_id: str,
    tensor: TensorDescription,
    pieces: Sequence[Piece],
) -> None:
    space = fmt.dataspace(tensor.shape)
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.VIRTUAL)
    properties.set_fill_value(fmt.fill_value(tensor.dtype))
    name = tensor.name.encode()
    for piece in pieces:
        source = fmt.dataspace(piece.box.shape)
        target = _selected(tensor.shape, piece.box)
        file_name = fmt.data_name(save_id, piece.writer).encode()
        properties.set_virtual(target, file_name, name, source)
    fmt.create_dataset(index, tensor.name, tensor.dtype, space, properties)


def _selected(shape: tuple[int, ...], box: Box) -> Any:
    space = fmt.dataspace(shape)
    if shape:
        space.select_hyperslab(box.offset, (1,) * len(shape), block=box.shape)
    return space


def _lay_out(
    path: Path, save_id: str, shards: Sequence[Shard], threads: int
) -> tuple[dict[str, int], dict[str, Checksums]]:
    """Where each contiguous dataset lies; checksums of compressed ones, now written."""
    checksums = {}
    with _create(path, save_id) as file:
        for shard in shards:
            itemsize = fmt.itemsize(shard.dtype)
            properties = (
                chunked.properties(shard.shape, itemsize, shard.level)
                if shard.is_compressed
                else _contiguous()
            )
            space = fmt.dataspace(shard.shape)
            fmt.create_dataset(file, shard.name, shard.dtype, space, properties)
        for shard in shards:
            if shard.is_compressed:
                checksums[shard.name] = chunked.write(
                    file[shard.name],
                    fmt.itemsize(shard.dtype),
                    shard.level,
                    _parts(shard),
                    threads,
                )
        return _offsets(file, shards), checksums


def _contiguous() -> h5p.PropDCID:
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.CONTIGUOUS)
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    return properties


def _offsets(file: h5py.File, shards: Sequence[Shard]) -> dict[str, int]:
    return {
        shard.name: file[shard.name].id.get_offset()
        for shard in shards
        if not shard.is_compressed
    }


def _write_shards(
    descriptor: int,
    offsets: Mapping[str, int],
    shards: Sequence[Shard],
    threads: int,
) -> dict[str, Checksums]:
    def write(part: memoryview, offset: int) -> list[int]:
        checksums = fmt.block_checksums(part)
        write_at(descriptor, part, offset)
        start_writeback(descriptor, offset, len(part))
        return checksums

    found: dict[str, list[list[int]]] = {shard.name: [] for shard in shards}
    pending: deque[tuple[str, Future[list[int]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for shard in shards:
            offset = offsets[shard.name]
            for part in _parts(shard):
                # A thread's turn costs more than a small tensor.
                if len(part) < fmt.BLOCK_BYTES:
                    done: Future[list[int]] = Future()
                    done.set_result(write(part, offset))
                else:
                    done = pool.submit(write, part, offset)
                pending.append((shard.name, done))
                offset += len(part)
                # One waits for each thread: more would hold more staging memory.
                while len(pending) >= 2 * threads:
                    name, oldest = pending.popleft()
                    found[name].append(oldest.result())
        for name, rest in pending:
            found[name].append(rest.result())
    return {
        name: np.array([number for numbers in parts for number in numbers], np.uint32)
        for name, parts in found.items()
    }


def _parts(shard: Shard) -> Iterator[memoryview]:
    """A shard's bytes in file order, some blocks at a time.

    They are copied, by parts, only where they do not lie like that in memory.
    """
    values = shard.fetch()
    if tuple(values.shape) != shard.shape or values.dtype.name != shard.dtype:
        raise CheckpointError(
            f"'{shard.name}' changed while it was saved: {values.dtype.name} "
            f"{values.shape} instead of {shard.dtype} {shard.shape}"
        )
    step = staging.part_bytes()
    if isinstance(values, np.ndarray) and values.flags.c_contiguous:
        yield from _cut(values, step)
        return
    asked = max(step, shard.step_bytes // step * step) // fmt.itemsize(shard.dtype)
    size = prod(shard.shape)
    for first in range(0, size, asked):
        parts = slabs.boxes(shard.shape, first, min(first + asked, size))
        arrays = [np.ravel(shard.to_host(part.of(values))) for part in parts]
        yield from _cut(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), step)


def _cut(values: np.ndarray, step: int) -> Iterator[memoryview]:
    # A dtype's name does not tell its byte order; the file's is little-endian.
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    data = values.reshape(-1).view(np.uint8).data
    for first in range(0, len(data), step):
        yield data[first : first + step]


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`: the system may take less than asked for at a time."""
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the disk begin with what was written: it works while the next is copied.

    A hint: what fails, or a system that has no such call, shows in the sync at the end.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's ``sync_file_range(2)``, which Python's library lacks."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = _find_sync_file_range()


def _check_layout(
    path: Path, shards: Sequence[Shard], offsets: Mapping[str, int]
) -> None:
    size = path.stat().st_size
    with h5py.File(path, "r", locking=False) as file:
        if _offsets(file, shards) != offsets:
            raise CheckpointError(f"{path} is not laid out as it was written")
    for shard in shards:
        nbytes = prod(shard.shape) * fmt.itemsize(shard.dtype)
        if shard.name in offsets and offsets[shard.name] + nbytes > size:
            raise CheckpointError(
                f"{path} has {size} bytes, '{shard.name}' ends beyond that"
            )
