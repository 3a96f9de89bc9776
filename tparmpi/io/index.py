"""A checkpoint's index: what is stored, in which pieces, in which files.

Nothing in it is believed before it is checked: the virtual mapping is read as data and
never read through, its files are names of this save's own, its pieces fill each tensor.
Local: no MPI here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5s, h5t

from tparmpi.errors import CheckpointError, DamagedCheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.patience import is_listed
from tparmpi.io.planner import Box, fills
from tparmpi.io.untrusted import (
    OtherVersion,
    Refused,
    attribute,
    datasets,
    integer,
    open_file,
    text,
    told,
)
from tparmpi.io.writer import Header


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
    with _opened(folder) as file:
        header = _read_header(file)
        tensors: dict[str, StoredTensor] = {}
        for name, dataset in datasets(file):
            tensors[name] = _read_tensor(name, dataset, header.save_id)
    return Index(header, tensors)


def read_header(folder: Path) -> Header:
    """Read what ``index.h5`` records beside the tensors, and nothing else. Local.

    Raises
    ------
    CheckpointError
        As for :func:`read_index`.
    """
    with _opened(folder) as file:
        return _read_header(file)


@contextmanager
def _opened(folder: Path) -> Iterator[h5py.File]:
    path = folder / fmt.INDEX_NAME
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    if not path.exists() and not is_listed(path):
        raise DamagedCheckpointError(
            f"{folder} is not a checkpoint: it has no {fmt.INDEX_NAME}"
        )
    with told(path), open_file(path) as file:
        yield file


def _read_header(file: h5py.File) -> Header:
    if text(file, "format") != fmt.FORMAT:
        raise Refused("it is not a tparmpi checkpoint")
    version = integer(file, "format_version")
    if version != fmt.VERSION:
        raise OtherVersion(
            f"its format has version {version}, this tparmpi reads version "
            f"{fmt.VERSION}; use a newer tparmpi"
        )
    if integer(file, "crc_block_bytes") != fmt.BLOCK_BYTES:
        raise Refused(f"crc_block_bytes is not {fmt.BLOCK_BYTES}")
    save_id = text(file, "save_id")
    if not fmt.SAVE_ID.fullmatch(save_id):
        raise Refused("save_id is not 16 hexadecimal digits")
    step, extra = integer(file, "step"), json.loads(text(file, "extra"))
    if step is None or not isinstance(extra, dict):
        raise Refused("step or extra is missing")
    seed, position = integer(file, "seed"), integer(file, "position")
    steps = integer(file, "optimizer_steps")
    return Header(save_id, step, seed, position, steps, extra)


def _read_tensor(name: str, dataset: h5py.Dataset, save_id: str) -> StoredTensor:
    dtype = text(dataset, "dtype")
    if dtype not in fmt.DTYPES:
        raise Refused(f"'{name}' has the unknown dtype {dtype!r}")
    if not dataset.id.get_type().equal(fmt.file_type(dtype)):
        raise Refused(f"'{name}' is not stored as its dtype {dtype}")
    if dataset.id.get_space().get_simple_extent_type() == h5s.NULL:
        raise Refused(f"'{name}' has no shape")
    if dataset.maxshape != dataset.shape:
        raise Refused(f"'{name}' has no fixed shape")
    properties = dataset.id.get_create_plist()
    if properties.get_layout() != h5d.VIRTUAL:
        raise Refused(f"'{name}' is not a virtual dataset")
    shape, size = dataset.shape, fmt.itemsize(dtype)
    mapping = [
        _read_mapping(name, shape, properties, number, save_id)
        for number in range(properties.get_virtual_count())
    ]
    mapping.sort(key=lambda entry: entry[0])
    if not fills(shape, tuple(box for box, _ in mapping)):
        raise Refused(f"the pieces of '{name}' do not fill its shape exactly once")
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
        raise Refused(f"'{name}' is said to lie in {file!r}, not in a file of its own")
    if properties.get_virtual_dsetname(number) != name:
        raise Refused(f"'{name}' is mapped to a dataset of another name")
    if properties.get_virtual_srcspace(number).get_select_type() != h5s.SEL_ALL:
        raise Refused(f"'{name}' is mapped to a part of a dataset")
    return _mapped_box(name, shape, properties.get_virtual_vspace(number)), file


def _mapped_box(name: str, shape: tuple[int, ...], space: h5s.SpaceID) -> Box:
    if space.get_select_type() == h5s.SEL_ALL:
        return Box((0,) * len(shape), shape)
    if space.get_select_type() != h5s.SEL_HYPERSLABS or not (
        space.is_regular_hyperslab()
    ):
        raise Refused(f"the mapping of '{name}' is not a rectangular block")
    start, stride, count, block = space.get_regular_hyperslab()
    for step, times, extent in zip(stride, count, block, strict=True):
        if times != 1 and step != extent:
            raise Refused(f"the mapping of '{name}' has gaps")
    extents = tuple(int(c * b) for c, b in zip(count, block, strict=True))
    return Box(tuple(map(int, start)), extents)


def _checksums(dataset: h5py.Dataset, name: str, count: int) -> np.ndarray:
    found = attribute(dataset, "crc32")
    if (
        found is None
        or count * 4 > dataset.file.id.get_filesize()
        or found.shape != (count,)
        or not found.get_type().equal(h5t.STD_U32LE)
    ):
        raise Refused(f"'{name}' does not have its {count} checksums")
    return np.asarray(dataset.attrs["crc32"], np.uint32)
