"""Reading safetensors files, one or several with an index, part by part. Local.

The format is `safetensors <https://github.com/huggingface/safetensors>`_'s; its library
checks each file's header against the file. Names of files in an index are taken only
where they name a file beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import staging
from tparmpi.io.planner import Box
from tparmpi.io.slabs import slabs
from tparmpi.io.writer import Header

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20

# Their names for the types, by ours.
KINDS = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of a safetensors file: the file, its key there, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    key: str


@dataclass(frozen=True)
class Weights:
    """Safetensors files, as a checkpoint's index is: safe to send to other ranks."""

    header: Header
    tensors: dict[str, StoredWeight]

    def open(self, path: Path) -> WeightsReader:
        """A reader of their tensors. Local."""
        return WeightsReader(path if path.is_dir() else path.parent, self)


class WeightsReader:
    """Reads parts of tensors; a context manager that keeps the files open. Local."""

    def __init__(self, folder: Path, weights: Weights) -> None:
        self._folder = folder
        self._weights = weights
        self._files: dict[str, Any] = {}

    def __enter__(self) -> WeightsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()

    def read(self, name: str, box: Box) -> np.ndarray:
        """The part `box` of a tensor, as a fresh array in its own dtype.

        Raises
        ------
        CheckpointError
            A file is missing, cut or changed.
        """
        tensor = self._weights.tensors[name]
        dtype = dtypes.dtype(tensor.dtype)
        if not box.size:
            return np.empty(box.shape, dtype)
        with self._file(tensor) as file:
            if not tensor.shape:
                found = file.get_tensor(tensor.key)
            else:
                found = file.get_slice(tensor.key)[box.slices()]
            values = np.asarray(found)
            if values.shape != box.shape or values.dtype != dtype:
                raise self._changed(tensor)
        return values

    def read_into(self, name: str, box: Box, target: np.ndarray) -> None:
        """Read the part `box` of a tensor to where it is wanted, by bounded parts.

        Raises
        ------
        CheckpointError
            As for :meth:`read`.
        """
        if not box.size:
            return
        limit = max(1, staging.SLAB_BYTES // target.itemsize)
        whole = Box((0,) * len(box.shape), box.shape)
        for slab in slabs(box.shape, whole, limit):
            start = zip(box.offset, slab.offset, strict=True)
            part = Box(tuple(a + b for a, b in start), slab.shape)
            slab.of(target)[...] = self.read(name, part)

    def check(self, name: str, box: Box) -> None:
        """Find out whether a tensor's file is there and as it was; it has no checksums.

        Raises
        ------
        CheckpointError
            As for :meth:`read`.
        """
        tensor = self._weights.tensors[name]
        with self._file(tensor) as file:
            part = file.get_slice(tensor.key)
            found = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
            if found != (tensor.shape, tensor.dtype):
                raise self._changed(tensor)

    @contextmanager
    def _file(self, tensor: StoredWeight) -> Iterator[Any]:
        path = self._folder / tensor.file
        with _told(path):
            if tensor.file not in self._files:
                self._files[tensor.file] = _open(path)
            yield self._files[tensor.file]

    def _changed(self, tensor: StoredWeight) -> CheckpointError:
        path = self._folder / tensor.file
        return CheckpointError(f"{path} changed while '{tensor.key}' was read")


def is_weights(path: Path) -> bool:
    """Whether a path is of safetensors files and not of a checkpoint. Local."""
    if path.is_dir():
        return not (path / fmt.INDEX_NAME).exists() and bool(_candidates(path))
    return path.name.endswith((SUFFIX, INDEX_SUFFIX))


def read_weights(path: Path) -> Weights:
    """Read and check the headers of safetensors files. Local.

    Parameters
    ----------
    path : Path
        A ``.safetensors`` file, a ``.safetensors.index.json``, or a folder that holds
        one of either.

    Raises
    ------
    CheckpointError
        They cannot be read, hold a type that checkpoints lack, or do not fit the index.
        The library is not installed.
    """
    if path.is_dir():
        found = _candidates(path)
        if len(found) > 1:
            raise CheckpointError(
                f"{path} holds {found[0].name} and {found[1].name}; give one of them"
            )
        path = found[0]
    if path.name.endswith(INDEX_SUFFIX):
        placed = _read_index(path)
        files = sorted(set(placed.values()))
    else:
        placed, files = None, [path.name]
    weights: dict[str, StoredWeight] = {}
    metadata: dict[str, str] = {}
    for name in files:
        for key, weight in _read_file(path.parent / name, metadata).items():
            if key in weights or (placed is not None and placed.get(key) != name):
                raise CheckpointError(
                    f"{path.parent / name} holds '{key}', which is of another file"
                )
            weights[key] = weight
    missing = sorted(set(placed or ()) - set(weights))
    if missing:
        raise CheckpointError(
            f"{path} names '{missing[0]}', but {(placed or {})[missing[0]]} lacks it"
        )
    tensors = {
        name: StoredWeight(name, weight.shape, weight.dtype, weight.file, weight.key)
        for name, weight in fmt.dataset_names(fmt.MODEL, weights).items()
    }
    step = metadata.get("step", "")
    number = int(step) if step.isascii() and step.isdecimal() and len(step) < 19 else 0
    header = Header("", number, extra={"metadata": metadata} if metadata else {})
    return Weights(header, dict(sorted(tensors.items())))


def safetensors() -> Any:
    """The safetensors library.

    Raises
    ------
    CheckpointError
        It is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise CheckpointError(
            "safetensors files need the safetensors library: "
            "pip install 'tparmpi[safetensors]'"
        ) from error
    return safetensors


def _candidates(folder: Path) -> list[Path]:
    """The index where there is one, else all files of weights."""
    names = sorted(folder.iterdir())
    indexes = [path for path in names if path.name.endswith(INDEX_SUFFIX)]
    return indexes or [path for path in names if path.name.endswith(SUFFIX)]


def _read_index(path: Path) -> dict[str, str]:
    with _told(path):
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} is too large for an index")
        content = json.loads(path.read_text(encoding="utf-8"))
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(placed, dict):
        raise CheckpointError(f"{path} is no index: it has no weight_map")
    for name in placed.values():
        if (
            not isinstance(name, str)
            or not name.endswith(SUFFIX)
            or Path(name).name != name
        ):
            raise CheckpointError(
                f"{path} is refused: {name!r} is no file of weights beside it"
            )
    return placed


def _read_file(path: Path, metadata: dict[str, str]) -> dict[str, StoredWeight]:
    found = {}
    with _told(path):
        file = _open(path)
        metadata.update(file.metadata() or {})
        for key in file.keys():  # noqa: SIM118 - the file is no mapping
            part = file.get_slice(key)
            kind = part.get_dtype()
            if kind not in _DTYPES:
                raise CheckpointError(
                    f"'{key}' in {path} has dtype {kind}, which checkpoints cannot hold"
                )
            shape = tuple(part.get_shape())
            found[key] = StoredWeight(key, shape, _DTYPES[kind], path.name, key)
    return found


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return safetensors().safe_open(path, framework="np")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of a file, in a sentence."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (
        OSError,
        ValueError,
        RecursionError,
        safetensors().SafetensorError,
    ) as error:
        raise CheckpointError(f"{path} cannot be read: {fmt.reason(error)}") from error
