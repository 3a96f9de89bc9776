"""Looking at checkpoints: what is in one, whether it is whole, how two differ.

Local, without ranks and without MPI.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tparmpi.errors import CheckpointError, counted
from tparmpi.io import format as fmt
from tparmpi.io import publish, staging
from tparmpi.io.index import Index, StoredTensor, read_index
from tparmpi.io.planner import Box
from tparmpi.io.reader import BlockReader
from tparmpi.io.slabs import slabs
from tparmpi.io.untrusted import open_data_file, told

_SHOWN = 4
_HEADER = ("step", "seed", "position", "optimizer_steps", "extra")


@dataclass(frozen=True)
class TensorSummary:
    """A tensor of a checkpoint: its shape, its dtype, its bytes."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Summary:
    """What a checkpoint holds.

    Attributes
    ----------
    path : Path
    save_id : str
        The 16 digits in its data files' names.
    step : int
    seed, position, optimizer_steps : int or None
    extra : dict
        As given to :func:`save`.
    files : list of str
        Names of its data files.
    tensors : dict
        `TensorSummary` by path in the checkpoint: ``"model/blocks/0/mlp/up/weight"``.
    """

    path: Path
    save_id: str
    step: int
    seed: int | None
    position: int | None
    optimizer_steps: int | None
    extra: dict[str, Any]
    files: list[str]
    tensors: dict[str, TensorSummary]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Elements of the model's tensors."""
        return sum(
            tensor.nbytes // fmt.itemsize(tensor.dtype)
            for name, tensor in self.tensors.items()
            if name.startswith(f"{fmt.MODEL}/")
        )


@dataclass(frozen=True)
class ValueDifference:
    """How the elements of one tensor differ in two checkpoints.

    Attributes
    ----------
    name : str
    count : int
        Elements whose bytes differ.
    size : int
        Elements of the tensor.
    largest : float
        The largest absolute difference; NaN where one side alone is not finite.
    """

    name: str
    count: int
    size: int
    largest: float


@dataclass
class Difference:
    """How two checkpoints differ; as a truth value, whether they do.

    Attributes
    ----------
    only_first, only_second : list of str
        Tensors that the other one lacks.
    other : list of str
        Sentences about shapes and dtypes, and what is recorded beside the tensors.
    values : list of ValueDifference
        Tensors of one shape and dtype whose bytes differ.
    same : int
        Tensors that are equal, byte for byte.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    same: int = 0

    def __bool__(self) -> bool:
        return bool(self.only_first or self.only_second or self.other or self.values)


def inspect(path: str | Path) -> Summary:
    """What a checkpoint holds, by its index alone. Local.

    Raises
    ------
    CheckpointError
        There is no checkpoint, or its index is damaged.
    """
    folder = Path(path)
    index = read_index(folder)
    header = index.header
    return Summary(
        folder,
        header.save_id,
        header.step,
        header.seed,
        header.position,
        header.optimizer_steps,
        dict(header.extra),
        _files(index),
        {name: _summary(tensor) for name, tensor in index.tensors.items()},
    )


def verify(path: str | Path, *, threads: int | None = None) -> list[str]:
    """Read every byte of a checkpoint and say what is wrong with it. Local.

    Parameters
    ----------
    path : str or Path
        The checkpoint's folder.
    threads : int, optional
        Data files that are read at once; by default one for each usable core.

    Returns
    -------
    list of str
        One sentence for each damaged, missing or foreign part; empty for a checkpoint
        that is whole.
    """
    folder = Path(path)
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return [str(error)]
    files = _files(index)
    threads = threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda name: _verify_file(folder, index, name), files)
        problems = [problem for several in found for problem in several]
    for name in sorted(set(os.listdir(folder)) - {fmt.INDEX_NAME, *files}):
        problems.append(f"{folder / name} is no part of the checkpoint")
    return problems


def diff(first: str | Path, second: str | Path) -> Difference:
    """How two checkpoints differ, whatever layouts they were saved from. Local.

    Raises
    ------
    CheckpointError
        One of them cannot be read.
    """
    paths = Path(first), Path(second)
    one, two = map(read_index, paths)
    found = Difference(
        only_first=[name for name in one.tensors if name not in two.tensors],
        only_second=[name for name in two.tensors if name not in one.tensors],
        other=[
            f"{name} is {getattr(one.header, name)} and {getattr(two.header, name)}"
            for name in _HEADER
            if getattr(one.header, name) != getattr(two.header, name)
        ],
    )
    with BlockReader(paths[0], one) as left, BlockReader(paths[1], two) as right:
        for name, tensor in one.tensors.items():
            if name not in two.tensors:
                continue
            kinds = [(t.shape, t.dtype) for t in (tensor, two.tensors[name])]
            if kinds[0] != kinds[1]:
                words = " and ".join(f"{dtype} {shape}" for shape, dtype in kinds)
                found.other.append(f"'{name}' is {words}")
                continue
            values = _compare(tensor, left, right)
            if values is None:
                found.same += 1
            else:
                found.values.append(values)
    return found


def find(path: str | Path) -> list[Path]:
    """The checkpoints that a path stands for, by rising step. Local.

    Those that have lost their index are among them: who looks at them is told.

    Parameters
    ----------
    path : str or Path
        A checkpoint's folder, a run's folder, or a folder of checkpoints.

    Raises
    ------
    CheckpointError
        There is none.
    """
    folder = Path(path)
    inner = folder / "checkpoints"
    try:
        if (folder / fmt.INDEX_NAME).is_file() or publish.is_headless(folder):
            return [folder]
        within = inner if inner.is_dir() else folder
        found = sorted([*publish.published(within), *publish.headless(within)])
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {fmt.reason(error)}") from error
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {folder}; give a run's folder or a checkpoint's"
        )
    return [checkpoint for _, checkpoint in found]


def flaw(path: str | Path) -> str | None:
    """What a look at a checkpoint's folder shows to be wrong with it. Local.

    The index is read and checked; data files are opened, which shows that one is
    missing, cut, or of another save. :func:`verify` reads them.

    Returns
    -------
    str or None
        A sentence. None if nothing is wrong as far as can be seen.
    """
    folder = Path(path)
    try:
        index = read_index(folder)
        for name in _files(index):
            with told(folder / name):
                open_data_file(folder / name, index.header.save_id).close()
    except CheckpointError as error:
        return str(error)
    return None


def _files(index: Index) -> list[str]:
    tensors = index.tensors.values()
    return sorted({piece.file for tensor in tensors for piece in tensor.pieces})


def _summary(tensor: StoredTensor) -> TensorSummary:
    size = Box((0,) * len(tensor.shape), tensor.shape).size
    return TensorSummary(tensor.shape, tensor.dtype, size * fmt.itemsize(tensor.dtype))


def _verify_file(folder: Path, index: Index, file_name: str) -> list[str]:
    stored = {
        tensor.name: piece
        for tensor in index.tensors.values()
        for piece in tensor.pieces
        if piece.file == file_name
    }
    problems = []
    with BlockReader(folder, index) as blocks:
        try:
            strangers = set(blocks.datasets(file_name)) - set(stored)
        except CheckpointError as error:
            # Nothing in it can be read.
            return [f"{error}; in it: {_listed(list(stored))}"]
        for name in sorted(strangers):
            problems.append(
                f"{folder / file_name} holds '{name}', unknown to the index"
            )
        for name, piece in stored.items():
            try:
                blocks.check(name, piece.box)
            except CheckpointError as error:
                problems.append(str(error))
    return problems


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {counted(more, 'more tensor')}" if more > 0 else shown


def _compare(
    tensor: StoredTensor, left: BlockReader, right: BlockReader
) -> ValueDifference | None:
    count, largest = 0, 0.0
    for box in _slabs(tensor):
        a, b = left.read(tensor.name, box), right.read(tensor.name, box)
        # Bytes, not values: an equal NaN is no difference, a signed zero is one.
        differs = (_bytes(a) != _bytes(b)).any(axis=1)
        if differs.any():
            count += int(differs.sum())
            gap = _gap(a.reshape(-1)[differs], b.reshape(-1)[differs])
            largest = float(np.maximum(largest, gap))
    if not count:
        return None
    size = Box((0,) * len(tensor.shape), tensor.shape).size
    return ValueDifference(tensor.name, count, size, largest)


def _slabs(tensor: StoredTensor) -> Iterator[Box]:
    whole = Box((0,) * len(tensor.shape), tensor.shape)
    if whole.size:
        limit = max(1, staging.SLAB_BYTES // fmt.itemsize(tensor.dtype))
        yield from slabs(tensor.shape, whole, limit)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute difference."""
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.max(np.abs(a.astype(wide) - b.astype(wide))))
