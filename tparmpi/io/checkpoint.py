"""Saving and loading models: plain HDF5, any layout to any other, whole or not at all.

Rank 0 alone looks at the folder; every decision is told to all ranks, and every error
of one rank is raised on all. ``docs/checkpoint-format.md`` describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from tparmpi.comm import agree, long_work, world
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import publish
from tparmpi.io.inspection import (
    Difference,
    Summary,
    TensorSummary,
    ValueDifference,
    diff,
    inspect,
    verify,
)
from tparmpi.io.planner import (
    Box,
    Piece,
    TensorDescription,
    blocks_of,
    digest_of,
    make_plan,
)
from tparmpi.io.reader import HDF5_ERRORS, BlockReader, Index, read_index
from tparmpi.io.report import LoadReport, Wanted, compare, refuse_mismatch
from tparmpi.io.writer import Header, Shard, write_data_file, write_index
from tparmpi.sharding import Partial
from tparmpi.tensors import Tensor

__all__ = [
    "Difference",
    "HasState",
    "HasSteps",
    "LoadReport",
    "Summary",
    "TensorSummary",
    "ValueDifference",
    "checkpoints",
    "diff",
    "inspect",
    "latest",
    "load",
    "prune",
    "save",
    "step_path",
    "verify",
]

Result = TypeVar("Result")
Descriptions = dict[str, TensorDescription]


class HasState(Protocol):
    """A model: named tensors, the same names in the same order on every rank."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the tensors by name."""


class HasSteps(HasState, Protocol):
    """An optimizer: named tensors and a count of steps."""

    steps: int


def save(
    path: str | Path,
    model: HasState,
    optimizer: HasSteps | None = None,
    *,
    step: int = 0,
    seed: int | None = None,
    position: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint and publish it whole, replacing one of the same name.

    Only a checkpoint (a folder with its files and nothing else) or an empty folder is
    replaced; a symbolic link to a checkpoint is, the checkpoint it leads to stays.
    Collective over all ranks, also those that are no members of the model's devices.

    Parameters
    ----------
    path : str or Path
        The checkpoint's folder, for example ``runs/a/checkpoints/step-00001000``.
    model : object with state_dict()
    optimizer : object with state_dict() and steps, optional
        Its tensors are stored beside the model's.
    step : int
    seed : int, optional
    position : int, optional
        Global number of the next training sample.
    extra : mapping, optional
        Anything that JSON can hold, up to 16 MiB of it.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    CheckpointError
        On every rank, if one rank cannot do its part (its disk is full, it cannot see
        the folder), if anything but a checkpoint has the name, if a tensor is a pending
        sum or cannot be stored, or if ranks disagree about what is saved. What had the
        name is left as it was.
    """

    def prepare() -> tuple[Path, Header, dict[str, Tensor], Descriptions]:
        header = _header(step, seed, position, optimizer, extra)
        named = _state(model, optimizer)
        described = {name: _describe(name, tensor) for name, tensor in named.items()}
        return _new_path(path), header, named, described

    path, header, named, description = _on_all_ranks(prepare)
    everyone = world()
    digest = digest_of(description.values())
    told = everyone.all_gather_object((digest, publish.new_save_id()))
    _refuse_disagreement("save", [theirs for theirs, _ in told])
    header = replace(header, save_id=told[0][1])
    plan = make_plan(description.values())
    saving = f"save the checkpoint {path}"
    temp = publish.temporary(path, header.save_id)
    _on_rank_zero(saving, lambda: _prepare(path, temp))
    try:
        checksums = _write_shards(saving, temp, header.save_id, named, plan)
        _on_rank_zero(
            saving, lambda: _publish(temp, path, header, description, plan, checksums)
        )
    except CheckpointError:
        # What cannot be removed now, the next save removes.
        _on_rank_zero(saving, lambda: publish.discard(temp))
        raise
    return path


def load(
    path: str | Path,
    model: HasState,
    optimizer: HasSteps | None = None,
    *,
    strict: bool = True,
) -> LoadReport:
    """Read a checkpoint into a model, whatever layout either has.

    Collective over all ranks. Each rank reads its own blocks only and verifies their
    checksums. Nothing is written to the model or the optimizer before every rank has
    read all it needs, for which each holds a second copy of its blocks for a moment.

    Parameters
    ----------
    path : str or Path
        The checkpoint's folder.
    model : object with state_dict()
    optimizer : object with state_dict() and steps, optional
        Without it, the checkpoint's optimizer state is skipped.
    strict : bool, default True
        Whether tensors that one side lacks, or that differ in shape or dtype, are an
        error; else they are left as they are and the report names them.

    Returns
    -------
    LoadReport

    Raises
    ------
    CheckpointError
        On every rank; the model and the optimizer are as they were.
    """

    def prepare() -> tuple[Path, dict[str, Tensor], Wanted]:
        named = _state(model, optimizer)
        wanted = {
            name: (tensor.shape, fmt.supported_dtype(name, tensor.dtype))
            for name, tensor in named.items()
        }
        return _path(path), named, wanted

    path, named, wanted = _on_all_ranks(prepare)
    _refuse_disagreement("load", world().all_gather_object(_digest(wanted)))
    index = _on_rank_zero(f"load {path}", lambda: read_index(path))
    report = compare(path, index, wanted, optimizer is not None)
    if strict:
        refuse_mismatch(report, index, wanted)
    arrays = _read_blocks(path, index, named, report.applied)
    for name, array in arrays.items():
        named[name].write_local(array)
    if optimizer is not None and index.header.optimizer_steps is not None:
        optimizer.steps = index.header.optimizer_steps
    return report


def latest(folder: str | Path) -> Path | None:
    """The published checkpoint of the highest step in a folder, None if there is none.

    Collective over all ranks: rank 0 looks, the others are told.
    """
    found = checkpoints(folder)
    return found[-1] if found else None


def checkpoints(folder: str | Path) -> list[Path]:
    """All published checkpoints in a folder, by rising step. Collective over all ranks.

    One that an interrupted save of the same step has moved aside is among them.
    """
    found = _on_rank_zero(
        f"list the checkpoints in {folder}", lambda: publish.published(Path(folder))
    )
    return [path for _, path in found]


def prune(folder: str | Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints. Collective over all ranks.

    An old one in whose folder lies anything but a checkpoint's own files stays. Of a
    symbolic link only the link is removed.

    Parameters
    ----------
    folder : str or Path
    keep : int
        At least 1.

    Returns
    -------
    list of Path
        Those removed.

    Raises
    ------
    CheckpointError
        `keep` is below 1 or no integer, or one cannot be removed.
    """
    keep = fmt.integer("keep", keep)
    if keep < 1:
        raise CheckpointError(
            f"at least 1 checkpoint must be kept, not {keep}: a run resumes from it"
        )

    def remove() -> list[Path]:
        old = [path for _, path in publish.published(Path(folder))[:-keep]]
        old = [path for path in old if publish.obstacle(path) is None]
        for path in old:
            publish.withdraw(path)
        return old

    return _on_rank_zero(f"remove old checkpoints from {folder}", remove)


def step_path(folder: str | Path, step: int) -> Path:
    """Where a step's checkpoint lies in a folder: ``folder/step-00001000``. Local.

    Raises
    ------
    CheckpointError
        The step is negative or no integer.
    """
    return Path(folder) / publish.step_name(step)


def _state(model: HasState, optimizer: HasState | None) -> dict[str, Tensor]:
    named = fmt.dataset_names(fmt.MODEL, model.state_dict())
    if optimizer is not None:
        named |= fmt.dataset_names(fmt.OPTIMIZER, optimizer.state_dict())
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"'{name}' is a {type(tensor).__name__}; a checkpoint holds tensors"
            )
        if any(isinstance(placement, Partial) for placement in tensor.layout):
            raise CheckpointError(
                f"'{name}' is a pending sum (Partial), whose value no rank has yet; "
                "call with_sharding(Replicate()) on it first"
            )
    return named


def _describe(name: str, tensor: Tensor) -> TensorDescription:
    dtype = fmt.supported_dtype(name, tensor.dtype)
    return TensorDescription(
        name, tensor.shape, dtype, fmt.itemsize(dtype), blocks_of(tensor.spec)
    )


def _header(
    step: int,
    seed: int | None,
    position: int | None,
    optimizer: HasSteps | None,
    extra: Mapping[str, Any] | None,
) -> Header:
    steps = None if optimizer is None else fmt.integer("steps", optimizer.steps)
    seed = None if seed is None else fmt.integer("seed", seed)
    position = None if position is None else fmt.integer("position", position)
    try:
        extra = dict({} if extra is None else extra)
        size = len(json.dumps(extra))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"extra must be plain JSON: {error}") from error
    if size > fmt.MAX_TEXT_BYTES:
        raise CheckpointError(
            f"extra has {size} bytes as JSON, a checkpoint holds {fmt.MAX_TEXT_BYTES}"
        )
    return Header("", fmt.integer("step", step), seed, position, steps, extra)


def _path(path: str | Path) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise CheckpointError(
            f"a checkpoint's path must be a text or a Path, it is {path!r}"
        ) from error


def _new_path(path: str | Path) -> Path:
    new = _path(path)
    if new.name in ("", ".."):
        raise CheckpointError(
            f"cannot save a checkpoint to {str(path)!r}: that names no folder of its "
            f"own; give a new one in it, such as {publish.step_name(0)}"
        )
    return new


def _digest(wanted: Wanted) -> str:
    descriptions = (
        TensorDescription(name, shape, dtype, fmt.itemsize(dtype), ())
        for name, (shape, dtype) in wanted.items()
    )
    return digest_of(descriptions)


def _refuse_disagreement(what: str, digests: list[str]) -> None:
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"{what}: rank {others[0]} has other tensors (names, shapes, dtypes or "
            "layouts) than rank 0; every rank must build the whole model, as shells "
            "where it is no member"
        )


def _on_all_ranks(work: Callable[[], Result]) -> Result:
    """Do local work on every rank; one that refuses makes all refuse."""
    result: Result | None = None
    problem: CheckpointError | None = None
    try:
        result = work()
    except CheckpointError as error:
        problem = error
    agree(problem)
    return cast(Result, result)


def _on_rank_zero(what: str, work: Callable[[], Result]) -> Result:
    """Do work on rank 0; give its result to all ranks, or raise its error on all."""
    everyone = world()
    result: Result | None = None
    problem: str | None = None
    cause: Exception | None = None
    if everyone.rank == 0:
        try:
            with long_work(what):
                result = work()
        except (CheckpointError, *HDF5_ERRORS) as error:
            problem, cause = _sentence(what, error), error
    result, problem = everyone.broadcast_object((result, problem))
    if problem is not None:
        raise CheckpointError(problem) from cause
    return result


def _sentence(what: str, error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"cannot {what}: {fmt.reason(error)}"


def _prepare(path: Path, temp: Path) -> None:
    publish.check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    publish.clear_leftovers(path.parent)
    temp.mkdir()


def _write_shards(
    what: str,
    temp: Path,
    save_id: str,
    named: Mapping[str, Tensor],
    plan: Mapping[str, tuple[Piece, ...]],
) -> dict[str, dict[int, np.ndarray]]:
    """Write this rank's file; return everyone's checksums by tensor and writer."""
    everyone = world()
    shards = [
        Shard(name, named[name].dtype.name, piece.box.shape, _fetch(named[name], piece))
        for name, pieces in plan.items()
        for piece in pieces
        if piece.writer == everyone.rank
    ]
    own: dict[str, np.ndarray] = {}
    problem: CheckpointError | None = None
    try:
        if shards:
            path = temp / fmt.data_name(save_id, everyone.rank)
            with long_work(what):
                own = write_data_file(path, save_id, shards)
    except (CheckpointError, *HDF5_ERRORS) as error:
        problem = CheckpointError(f"rank {everyone.rank}: {_sentence(what, error)}")
    agree(problem)
    merged: dict[str, dict[int, np.ndarray]] = {name: {} for name in plan}
    for rank, theirs in enumerate(everyone.all_gather_object(own)):
        for name, checksums in theirs.items():
            merged[name][rank] = checksums
    return merged


def _fetch(tensor: Tensor, piece: Piece) -> Callable[[], np.ndarray]:
    def fetch() -> np.ndarray:
        spec = tensor.spec
        own = piece.box.of(tensor.local, spec.local_offset)
        host: np.ndarray = spec.place.backend.to_host(own)
        return host

    return fetch


def _publish(
    temp: Path,
    path: Path,
    header: Header,
    tensors: Descriptions,
    plan: Mapping[str, tuple[Piece, ...]],
    checksums: Mapping[str, Mapping[int, np.ndarray]],
) -> None:
    write_index(temp / fmt.INDEX_NAME, header, tensors, plan, checksums)
    fmt.sync(temp)
    publish.publish(temp, path, header.save_id)


def _read_blocks(
    path: Path, index: Index, named: Mapping[str, Tensor], names: list[str]
) -> dict[str, np.ndarray]:
    """Each tensor's block on this rank, once every rank has read all of its own."""
    arrays: dict[str, np.ndarray] = {}
    problem: CheckpointError | None = None
    try:
        with long_work(f"load {path}"), BlockReader(path, index) as reader:
            for name in names:
                tensor = named[name]
                if not tensor.is_shell:
                    spec = tensor.spec
                    box = Box(tuple(spec.local_offset), tuple(spec.local_shape))
                    arrays[name] = reader.read(name, box)
    except CheckpointError as error:
        problem = error
    agree(problem)
    return arrays
