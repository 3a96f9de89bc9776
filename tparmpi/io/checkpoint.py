"""Saving and loading models: plain HDF5, any layout to any other, whole or not at all.

Rank 0 alone looks at the folder; every decision is told to all ranks, and every error
of one rank is raised on all. ``docs/checkpoint-format.md`` describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tparmpi.comm import agree, long_work, world
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import publish
from tparmpi.io.agreement import (
    on_all_ranks,
    on_rank_zero,
    refuse_disagreement,
    sentence,
)
from tparmpi.io.copies import convert, export
from tparmpi.io.inspection import (
    Difference,
    Summary,
    TensorSummary,
    ValueDifference,
    diff,
    inspect,
    verify,
)
from tparmpi.io.loading import load
from tparmpi.io.planner import (
    Piece,
    TensorDescription,
    blocks_of,
    digest_of,
    make_plan,
)
from tparmpi.io.report import LoadReport
from tparmpi.io.state import HasState, HasSteps, path_of, state_of
from tparmpi.io.transforms import Interleave, Merge, Split, Transpose, Unflatten
from tparmpi.io.untrusted import HDF5_ERRORS
from tparmpi.io.writer import Header, Shard, write_data_file, write_index
from tparmpi.tensors import Tensor

__all__ = [
    "Difference",
    "HasState",
    "HasSteps",
    "Interleave",
    "LoadReport",
    "Merge",
    "Split",
    "Summary",
    "TensorSummary",
    "Transpose",
    "Unflatten",
    "ValueDifference",
    "checkpoints",
    "convert",
    "diff",
    "export",
    "inspect",
    "latest",
    "load",
    "prune",
    "save",
    "step_path",
    "verify",
]

Descriptions = dict[str, TensorDescription]


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
        named = state_of(model, optimizer)
        described = {name: _describe(name, tensor) for name, tensor in named.items()}
        return _new_path(path), header, named, described

    path, header, named, description = on_all_ranks(prepare)
    everyone = world()
    digest = digest_of(description.values())
    told = everyone.all_gather_object((digest, publish.new_save_id()))
    refuse_disagreement("save", [theirs for theirs, _ in told])
    header = replace(header, save_id=told[0][1])
    plan = make_plan(description.values())
    saving = f"save the checkpoint {path}"
    temp = publish.temporary(path, header.save_id)
    on_rank_zero(saving, lambda: _prepare(path, temp))
    try:
        checksums = _write_shards(saving, temp, header.save_id, named, plan)
        on_rank_zero(
            saving, lambda: _publish(temp, path, header, description, plan, checksums)
        )
    except CheckpointError:
        # What cannot be removed now, the next save removes.
        on_rank_zero(saving, lambda: publish.discard(temp))
        raise
    return path


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
    found = on_rank_zero(
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

    return on_rank_zero(f"remove old checkpoints from {folder}", remove)


def step_path(folder: str | Path, step: int) -> Path:
    """Where a step's checkpoint lies in a folder: ``folder/step-00001000``. Local.

    Raises
    ------
    CheckpointError
        The step is negative or no integer.
    """
    return Path(folder) / publish.step_name(step)


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


def _new_path(path: str | Path) -> Path:
    new = path_of(path)
    if new.name in ("", ".."):
        raise CheckpointError(
            f"cannot save a checkpoint to {str(path)!r}: that names no folder of its "
            f"own; give a new one in it, such as {publish.step_name(0)}"
        )
    return new


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
        problem = CheckpointError(f"rank {everyone.rank}: {sentence(what, error)}")
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
