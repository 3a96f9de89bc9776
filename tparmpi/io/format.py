"""The checkpoint format's constants, names and number types.

``docs/checkpoint-format.md`` describes the format in prose.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from tparmpi import errors
from tparmpi.backend import dtypes
from tparmpi.errors import CheckpointError
from tparmpi.io.checksums import crc32

FORMAT = "tparmpi checkpoint"
VERSION = 1
INDEX_NAME = "index.h5"
BLOCK_BYTES = 1 << 20
MODEL = "model"
OPTIMIZER = "optimizer"
# HDF5 1.10 introduced virtual datasets; every later library reads what it wrote.
HDF5_VERSIONS = ("v110", "v110")

SAVE_ID = re.compile(r"[0-9a-f]{16}")
DATA_NAME = re.compile(r"data-([0-9a-f]{16})-([0-9]{5,10})\.h5")
# '%' is left out because HDF5 expands it in the names of virtual sources, lone
# surrogates because UTF-8 has no bytes for them.
_COMPONENT = re.compile(r"[^\x00-\x1f\x7f/.%\ud800-\udfff]+")
INT64 = range(-(1 << 63), 1 << 63)
MAX_DEPTH = 64
_MOST_THREADS = 4
MAX_TEXT_BYTES = 16 << 20

DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
)


def data_name(save_id: str, writer: int) -> str:
    """Name of the data file that a world rank writes."""
    return f"data-{save_id}-{writer:05d}.h5"


def dataset_names(part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by their dataset path: ``blocks.0.w`` is ``<part>/blocks/0/w``.

    Raises
    ------
    CheckpointError
        A name is no text or has an empty or unusable component, or two names meet in
        one path.
    """
    named: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"a tensor's name must be a text, {name!r} is of type "
                f"{type(name).__name__}"
            )
        parameter, slash, buffer = name.partition("/")
        components = parameter.split(".") + ([buffer] if slash else [])
        if not all(_COMPONENT.fullmatch(component) for component in components):
            raise CheckpointError(
                f"{name!r} cannot be saved under that name: each part between dots "
                "needs at least one character, and none of '/', '%', control "
                "characters and those that UTF-8 cannot write"
            )
        if len(components) >= MAX_DEPTH:
            raise CheckpointError(
                f"'{name}' cannot be saved: its name has {len(components)} parts, a "
                f"checkpoint's names have fewer than {MAX_DEPTH}"
            )
        named["/".join([part, *components])] = tensor
    inner = {name[:at] for name in named for at, c in enumerate(name) if c == "/"}
    clash = next((name for name in named if name in inner), None)
    if clash is not None or len(named) < len(tensors):
        raise CheckpointError(
            f"two tensors' names meet in one path of the checkpoint ({clash or part})"
        )
    return named


def checked_name(name: str) -> bool:
    """Whether a path found in a file is one this format can have written."""
    return all(_COMPONENT.fullmatch(component) for component in name.split("/"))


def supported_dtype(name: str, dtype: np.dtype[Any]) -> str:
    """The stored name of a tensor's dtype.

    Raises
    ------
    CheckpointError
        The format has no type for it.
    """
    if dtype.name not in DTYPES:
        raise CheckpointError(
            f"'{name}' has dtype {dtype.name}, which checkpoints cannot hold; they "
            f"hold {', '.join(sorted(DTYPES))}"
        )
    return str(dtype.name)


def integer(name: str, value: Any, allowed: range = INT64) -> int:
    """A number that a program gave, as an int; NumPy's integers are taken too.

    Raises
    ------
    CheckpointError
        It is of another type, a float for example, or not among the `allowed`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number not in allowed:
        kind = "an integer of 64 bits"
        if allowed != INT64:
            kind = f"an integer from {allowed[0]} to {allowed[-1]}"
        raise CheckpointError(f"{name} must be {kind}, it is {value!r}")
    return number


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return int(dtypes.dtype(dtype).itemsize)


@cache
def file_type(dtype: str) -> h5t.TypeID:
    """The HDF5 type of a stored dtype: little-endian, plain for every HDF5 program.

    bfloat16 is a 16-bit float described to HDF5 (sign 15, exponent 7-14 biased by
    127, mantissa 0-6), which h5py reads as float32. Booleans and complex numbers are
    h5py's: an enumeration of FALSE and TRUE, a compound of r and i.
    """
    if dtype == "bfloat16":
        half = h5t.IEEE_F32LE.copy()
        half.set_fields(15, 7, 8, 0, 7)
        half.set_size(2)
        half.set_ebias(127)
        return half
    if dtype.startswith("complex"):
        part = h5t.IEEE_F32LE if dtype == "complex64" else h5t.IEEE_F64LE
        size = part.get_size()
        compound = h5t.create(h5t.COMPOUND, 2 * size)
        compound.insert(b"r", 0, part)
        compound.insert(b"i", size, part)
        return compound
    return h5t.py_create(np.dtype(dtype).newbyteorder("<"))


def fill_value(dtype: str) -> np.ndarray:
    """What is read where a data file is missing: NaN wherever the type has one."""
    if dtype == "bfloat16":
        return np.array(np.nan, np.float32)
    kind = np.dtype(dtype)
    if kind.kind == "c":
        return np.array(complex(np.nan, np.nan), kind)
    return np.array(np.nan if kind.kind == "f" else 0, kind)


def dataspace(shape: tuple[int, ...]) -> h5s.SpaceID:
    """An HDF5 dataspace, scalar for the empty shape."""
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


def create_dataset(
    file: h5py.File,
    name: str,
    dtype: str,
    space: h5s.SpaceID,
    properties: h5p.PropDCID,
) -> h5d.DatasetID:
    """Create a dataset and the groups on its path, without time stamps."""
    properties.set_obj_track_times(False)
    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5t.CSET_UTF8)
    path = name.encode()
    return h5d.create(file.id, path, file_type(dtype), space, properties, links)


def text_attribute(place: h5py.HLObject, name: str, text: str) -> None:
    """Write text as a fixed-length UTF-8 attribute (variable length needs a heap)."""
    data = text.encode()
    kind = h5py.string_dtype("utf-8", max(1, len(data)))
    place.attrs.create(name, data, dtype=kind)


def threads() -> int:
    """Threads that move and check bytes at once, by the cores this process may use."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def block_count(nbytes: int) -> int:
    """Checksums that `nbytes` of file order need."""
    return -(-nbytes // BLOCK_BYTES)


def block_checksums(data: memoryview) -> list[int]:
    """CRC-32 (ISO 3309, as in zlib) of each 1 MiB block; the last may be shorter."""
    return [
        crc32(data[first : first + BLOCK_BYTES])
        for first in range(0, len(data), BLOCK_BYTES)
    ]


def reason(error: BaseException) -> str:
    """What went wrong, in one line: HDF5 hides the system's words in a long text."""
    if isinstance(error, MemoryError):
        return errors.reason(error)
    # A KeyError's own text is its message in quotes.
    quoted = isinstance(error, KeyError) and error.args
    text = str(error.args[0]) if quoted else str(error)
    system = re.search(r"error message = '([^']*)'", text)
    if system:
        return system[1]
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return text.partition("\n")[0]


def sync(path: str | os.PathLike[str]) -> None:
    """Force a file's or folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
