"""Writing one data file, and the index over all of them. Local: no MPI here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.planner import Box, Piece, TensorDescription

WRITE_BYTES = 8 * fmt.BLOCK_BYTES

Checksums = np.ndarray


@dataclass(frozen=True)
class Shard:
    """One dataset of a data file: a name, what it is, and how to get its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]


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
    path: Path, save_id: str, shards: Sequence[Shard]
) -> dict[str, Checksums]:
    """Write, sync and check one rank's data file. Local.

    HDF5 lays out contiguous datasets and tells where they lie; their bytes are then
    written with plain positioned writes from several threads, which take the checksums.

    Parameters
    ----------
    path : Path
        Must not exist.
    save_id : str
    shards : sequence of Shard

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
    offsets = _lay_out(path, save_id, shards)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with ThreadPoolExecutor(fmt.threads()) as pool:
            checksums = {
                shard.name: _write_shard(descriptor, offsets[shard.name], shard, pool)
                for shard in shards
            }
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


def _lay_out(path: Path, save_id: str, shards: Sequence[Shard]) -> dict[str, int]:
    with _create(path, save_id) as file:
        for shard in shards:
            properties = h5p.create(h5p.DATASET_CREATE)
            properties.set_layout(h5d.CONTIGUOUS)
            properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5d.FILL_TIME_NEVER)
            space = fmt.dataspace(shard.shape)
            fmt.create_dataset(file, shard.name, shard.dtype, space, properties)
        return _offsets(file, shards)


def _offsets(file: h5py.File, shards: Sequence[Shard]) -> dict[str, int]:
    return {shard.name: file[shard.name].id.get_offset() for shard in shards}


def _write_shard(
    descriptor: int, offset: int, shard: Shard, pool: ThreadPoolExecutor
) -> Checksums:
    values = np.asarray(shard.fetch(), order="C")
    if values.shape != shard.shape or values.dtype.name != shard.dtype:
        raise CheckpointError(
            f"'{shard.name}' changed while it was saved: {values.dtype.name} "
            f"{values.shape} instead of {shard.dtype} {shard.shape}"
        )
    # A dtype's name does not tell its byte order; the file's is little-endian.
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    data = values.reshape(-1).view(np.uint8).data

    def write(first: int) -> list[int]:
        part = data[first : first + WRITE_BYTES]
        checksums = fmt.block_checksums(part)
        write_at(descriptor, part, offset + first)
        return checksums

    parts = range(0, len(data), WRITE_BYTES)
    # A thread's turn costs more than a small tensor.
    written = map(write, parts) if len(parts) < 2 else pool.map(write, parts)
    return np.array([number for numbers in written for number in numbers], np.uint32)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`: the system may take less than asked for at a time."""
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _check_layout(
    path: Path, shards: Sequence[Shard], offsets: Mapping[str, int]
) -> None:
    size = path.stat().st_size
    with h5py.File(path, "r", locking=False) as file:
        if _offsets(file, shards) != offsets:
            raise CheckpointError(f"{path} is not laid out as it was written")
    for shard in shards:
        nbytes = prod(shard.shape) * fmt.itemsize(shard.dtype)
        if offsets[shard.name] + nbytes > size:
            raise CheckpointError(
                f"{path} has {size} bytes, '{shard.name}' ends beyond that"
            )
