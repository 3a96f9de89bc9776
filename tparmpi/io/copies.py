"""Copying checkpoints to other forms, without ranks and without a model. Local.

Tensors are read and written part by part: what is in memory at once is bounded, however
large the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import publish, staging, weights
from tparmpi.io.chunked import Compression, Levels
from tparmpi.io.planner import Block, Box, TensorDescription, make_plan
from tparmpi.io.slabs import slabs
from tparmpi.io.sources import SourceReader, open_source, read_source, views_of
from tparmpi.io.transforms import Renames, Transform, Views
from tparmpi.io.untrusted import HDF5_ERRORS
from tparmpi.io.views import View
from tparmpi.io.writer import Shard, write_at, write_data_file, write_index

_MAX_FILES = 10**5


def convert(
    source: str | Path,
    target: str | Path,
    *,
    files: int = 1,
    transforms: Sequence[Transform] = (),
    remap: Renames = (),
    compression: Compression = None,
) -> Path:
    """Copy a checkpoint, or safetensors files, to a checkpoint of `files` data files.

    Any checkpoint loads into any layout; a copy is for fewer or more files, to compress
    it or not, and to bring other programs' weights in. Local. Holds parts of a tensor,
    at most ``TPARMPI_STAGING_MIB`` together.

    Parameters
    ----------
    source : str or Path
        As for :func:`load`.
    target : str or Path
        The new checkpoint's folder.
    files : int, default 1
    transforms, remap
        As for :func:`load`.
    compression
        As for :func:`save`.

    Returns
    -------
    Path
        `target`.

    Raises
    ------
    CheckpointError
        The source cannot be read, the target exists or cannot be written; no target is
        left then.
    """
    origin, path = Path(source), Path(target)
    files = fmt.integer("files", files, range(1, _MAX_FILES + 1))
    levels = Levels(compression)
    found = read_source(origin)
    views = views_of(found, transforms, remap)
    levels.check(views)
    described = {name: _describe(name, view, files) for name, view in views.items()}
    plan = make_plan(described.values())
    header = replace(found.header, save_id=publish.new_save_id())
    with _new(path) as temp, open_source(origin, found) as blocks:
        temp.mkdir()
        checksums: dict[str, dict[int, np.ndarray]] = {name: {} for name in plan}
        for writer in range(files):
            shards = [
                Shard(
                    name,
                    views[name].dtype,
                    piece.box.shape,
                    partial(_Unread, views[name], blocks, piece.box),
                    # A view's own reading may take as much again, and twice.
                    step_bytes=staging.limit() // 4,
                    level=levels.of(name),
                )
                for name, pieces in plan.items()
                for piece in pieces
                if piece.writer == writer
            ]
            if shards:
                data = temp / fmt.data_name(header.save_id, writer)
                written = write_data_file(data, header.save_id, shards)
                for name, sums in written.items():
                    checksums[name][writer] = sums
        write_index(temp / fmt.INDEX_NAME, header, described, plan, checksums)
        fmt.sync(temp)
    return path


def export(
    source: str | Path, target: str | Path, *, max_file_bytes: int | None = None
) -> Path:
    """Copy a checkpoint's model to safetensors. Local.

    Names are the parameters' own, ``blocks.0.attn.q.weight``; the optimizer's tensors
    are left out, the step is in the files' metadata. Holds 16 MiB at a time.

    Parameters
    ----------
    source : str or Path
        The checkpoint's folder.
    target : str or Path
        A new file, ``model.safetensors``; or, with `max_file_bytes`, a new folder of
        ``model-00001-of-00003.safetensors`` and so on and
        ``model.safetensors.index.json``.
    max_file_bytes : int, optional
        Most bytes of tensors in one file, exceeded only by a tensor that is larger.

    Returns
    -------
    Path
        `target`.

    Raises
    ------
    CheckpointError
        The checkpoint cannot be read, a tensor has a dtype that safetensors lack, the
        target exists or cannot be written, or the library is not installed; no target
        is left then.
    """
    origin, path = Path(source), Path(target)
    weights.safetensors()
    found = read_source(origin)
    model = {
        name.removeprefix(f"{fmt.MODEL}/").replace("/", "."): view
        for name, view in views_of(found).items()
        if name.startswith(f"{fmt.MODEL}/")
    }
    for name, view in model.items():
        if view.dtype not in weights.KINDS:
            raise CheckpointError(
                f"safetensors cannot hold '{name}': it is {view.dtype}"
            )
    metadata = {"format": "pt", "step": str(found.header.step)}
    with _new(path) as temp, open_source(origin, found) as blocks:
        if max_file_bytes is None:
            if not path.name.endswith(weights.SUFFIX):
                raise CheckpointError(
                    f"{path} must end with {weights.SUFFIX}, or give the most bytes "
                    "of a file (--max-file-bytes), for a folder of several"
                )
            _write_file(temp, model, blocks, metadata)
        else:
            limit = fmt.integer("max_file_bytes", max_file_bytes, range(1, 1 << 62))
            temp.mkdir()
            _write_folder(temp, _grouped(model, limit), blocks, metadata)
    return path


def _write_folder(
    folder: Path,
    groups: Sequence[Views],
    blocks: SourceReader,
    metadata: Mapping[str, str],
) -> None:
    placed: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}{weights.SUFFIX}"
        _write_file(folder / name, group, blocks, metadata)
        placed |= dict.fromkeys(group, name)
        total += sum(map(_nbytes, group.values()))
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(placed.items())),
    }
    path = folder / f"model{weights.INDEX_SUFFIX}"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    fmt.sync(path)
    fmt.sync(folder)


def _write_file(
    path: Path, views: Views, blocks: SourceReader, metadata: Mapping[str, str]
) -> None:
    """Write and sync one file, and let the library check it.

    The library writes a file from whole tensors only, so the header is made here: its
    length in 8 bytes, JSON, then each tensor's elements in C order. Wide dtypes are
    first, so that all are aligned.
    """
    order = sorted(views, key=lambda name: (-fmt.itemsize(views[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        view, begin = views[name], end
        end += _nbytes(view)
        header[name] = {
            "dtype": weights.KINDS[view.dtype],
            "shape": view.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_at(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
        at = 8 + len(text)
        for name in order:
            for part in _parts(views[name], blocks):
                write_at(descriptor, part, at)
                at += len(part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with weights.safetensors().safe_open(path, framework="np") as file:
        if sorted(file.keys()) != sorted(views):
            raise CheckpointError(f"{path} is not what was written")


def _parts(view: View, blocks: SourceReader) -> Iterator[memoryview]:
    """The elements in C order, little-endian, in bounded parts."""
    whole = Box((0,) * len(view.shape), view.shape)
    if not whole.size:
        return
    limit = max(1, staging.SLAB_BYTES // fmt.itemsize(view.dtype))
    for box in slabs(view.shape, whole, limit):
        values = np.asarray(view.read(blocks, box), order="C")
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
        yield values.reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class _Unread:
    """A part of a view, as an array whose slices are read when they are taken."""

    view: View
    blocks: SourceReader
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return fmt.dtypes.dtype(self.view.dtype)

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        spans = index[: len(self.box.shape)]
        offset = (o + s.start for o, s in zip(self.box.offset, spans, strict=True))
        part = Box(tuple(offset), tuple(s.stop - s.start for s in spans))
        return self.view.read(self.blocks, part)


def _grouped(views: Views, limit: int) -> list[Views]:
    groups: list[Views] = []
    room = 0
    for name, view in sorted(views.items()):
        nbytes = _nbytes(view)
        if not groups or nbytes > room:
            groups.append({})
            room = limit
        groups[-1][name] = view
        room -= nbytes
    return groups or [{}]


def _nbytes(view: View) -> int:
    size = Box((0,) * len(view.shape), view.shape).size
    return size * fmt.itemsize(view.dtype)


def _describe(name: str, view: View, files: int) -> TensorDescription:
    whole = Box((0,) * len(view.shape), view.shape)
    blocks = (Block(whole, tuple(range(files))),) if whole.size else ()
    itemsize = fmt.itemsize(view.dtype)
    return TensorDescription(name, view.shape, view.dtype, itemsize, blocks)


@contextmanager
def _new(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` at the end, or is removed."""
    if path.name in ("", ".."):
        raise CheckpointError(f"{str(path)!r} names no file or folder of its own")
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists; give a new name")
    temp = publish.temporary(path, publish.new_save_id())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temp
        os.rename(temp, path)
        fmt.sync(path.parent)
    except BaseException as error:
        _remove(temp)
        if isinstance(error, HDF5_ERRORS):
            raise CheckpointError(
                f"cannot write {path}: {fmt.reason(error)}"
            ) from error
        raise


def _remove(temp: Path) -> None:
    """Remove what was written so far: all in it is this program's own."""
    if temp.is_dir():
        for entry in temp.iterdir():
            entry.unlink()
        temp.rmdir()
    else:
        temp.unlink(missing_ok=True)
