"""Saving a checkpoint: agreed on by all ranks, written by each, published by rank 0.

Between the agreement at the beginning and the one before the publication no rank calls
MPI, so a save may go on in the background (:mod:`tparmpi.io.background`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tparmpi.comm import agree, long_work, world
from tparmpi.errors import CheckpointError, TparmpiError
from tparmpi.io import format as fmt
from tparmpi.io import pending, publish
from tparmpi.io.agreement import (
    on_all_ranks,
    on_rank_zero,
    rank_sentence,
    refuse_disagreement,
    sentence,
)
from tparmpi.io.chunked import Compression, Levels
from tparmpi.io.planner import (
    Piece,
    TensorDescription,
    blocks_of,
    digest_of,
    make_plan,
)
from tparmpi.io.state import HasState, HasSteps, path_of, state_of
from tparmpi.io.untrusted import HDF5_ERRORS
from tparmpi.io.writer import Header, Shard, write_data_file, write_index
from tparmpi.tensors import Tensor

Checksums = dict[str, np.ndarray]
"""Block checksums of one rank's file, by dataset name."""


def save(
    path: str | Path,
    model: HasState,
    optimizer: HasSteps | None = None,
    *,
    step: int = 0,
    seed: int | None = None,
    position: int | None = None,
    extra: Mapping[str, Any] | None = None,
    compression: Compression = None,
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
    compression : str, int or mapping, optional
        ``"gzip"`` or one of its levels, 1 to 9: tensors are stored as h5py's
        ``compression="gzip", shuffle=True`` stores them. A mapping says so for each
        pattern of names: the first that matches a tensor's whole counts, ``"none"`` or
        None stores it plain, as those are that match none. Names are those of
        parameters, with dots, and ``….weight.m`` for an optimizer's; a pattern that
        matches no tensor is refused. Scalars are never compressed.

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
    job, parts = begin(path, model, optimizer, step, seed, position, extra, compression)
    own: Checksums = {}
    problem: Exception | None = None
    try:
        with long_work(job.what):
            own = job.write([part.shard() for part in parts])
    except CheckpointError as error:
        problem = error
    try:
        agree(problem)
        told = world().all_gather_object(own)
        on_rank_zero(job.what, lambda: job.publish(told))
    except CheckpointError:
        job.discard()
        raise
    return job.path


@dataclass(frozen=True)
class Part:
    """What one rank writes of one tensor."""

    name: str
    tensor: Tensor
    piece: Piece
    level: int

    @property
    def array(self) -> Any:
        """The elements, on their device: a view of the tensor."""
        spec = self.tensor.spec
        return self.piece.box.of(self.tensor.local, spec.local_offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.piece.box.size * self.tensor.dtype.itemsize

    def shard(self) -> Shard:
        """A shard that fetches the elements when they are written. Local."""
        to_host = self.tensor.spec.place.backend.to_host
        return self.shard_of(lambda: self.array, to_host)

    def shard_of(
        self,
        fetch: Callable[[], Any],
        to_host: Callable[[Any], np.ndarray] = np.asarray,
    ) -> Shard:
        """A shard of these elements or a copy of them. Local."""
        shape, dtype = self.piece.box.shape, self.tensor.dtype.name
        return Shard(self.name, dtype, shape, fetch, to_host, level=self.level)


@dataclass(frozen=True)
class Save:
    """One save under way; the same on all ranks. Its methods but `discard` are local.

    Attributes
    ----------
    path, temp : Path
        The checkpoint's name, and where it is written before it has it.
    header : Header
    tensors, plan : mapping
        Each tensor, and who writes which pieces of it, by dataset name.
    """

    path: Path
    temp: Path
    header: Header
    tensors: Mapping[str, TensorDescription]
    plan: Mapping[str, tuple[Piece, ...]]

    @property
    def what(self) -> str:
        """What is done, for messages."""
        return f"save the checkpoint {self.path}"

    def write(
        self, shards: Sequence[Shard], *, threads: int | None = None
    ) -> Checksums:
        """Write, sync and check this rank's file, if it has shards.

        Parameters
        ----------
        shards, threads
            As for :func:`write_data_file`.

        Raises
        ------
        CheckpointError
            The disk is full or fails, or the written file is not what was meant.
        """
        if not shards:
            return {}
        path = self.temp / fmt.data_name(self.header.save_id, world().rank)
        try:
            return write_data_file(path, self.header.save_id, shards, threads=threads)
        except (TparmpiError, MemoryError, *HDF5_ERRORS) as error:
            raise CheckpointError(rank_sentence(self.what, error)) from error

    def publish(self, checksums: Sequence[Checksums]) -> None:
        """Write the index, make all of it durable, and give it its name; for rank 0.

        Parameters
        ----------
        checksums
            Each rank's, in rank order.

        Raises
        ------
        CheckpointError
            The disk is full or fails. What had the name has it again.
        """
        by_tensor: dict[str, dict[int, np.ndarray]] = {name: {} for name in self.plan}
        for rank, theirs in enumerate(checksums):
            for name, numbers in theirs.items():
                by_tensor[name][rank] = numbers
        index = self.temp / fmt.INDEX_NAME
        try:
            write_index(index, self.header, self.tensors, self.plan, by_tensor)
            fmt.sync(self.temp)
            publish.publish(self.temp, self.path, self.header.save_id)
        except (MemoryError, *HDF5_ERRORS) as error:
            raise CheckpointError(sentence(self.what, error)) from error

    def discard(self) -> None:
        """Remove what was written so far. Collective over all ranks.

        What cannot be removed now, the next save removes.
        """
        on_rank_zero(self.what, lambda: publish.discard(self.temp))


def begin(
    path: str | Path,
    model: HasState,
    optimizer: HasSteps | None,
    step: int,
    seed: int | None,
    position: int | None,
    extra: Mapping[str, Any] | None,
    compression: Compression,
) -> tuple[Save, list[Part]]:
    """Agree on a save, and make its temporary folder. Collective over all ranks.

    Parameters
    ----------
    path, model, optimizer, step, seed, position, extra, compression
        As for :func:`save`.

    Returns
    -------
    tuple
        The save, and what this rank is to write.

    Raises
    ------
    CheckpointError
        As :func:`save` does; no temporary folder is left.
    """

    def prepare() -> tuple[
        Path, Header, dict[str, Tensor], list[TensorDescription], Levels
    ]:
        header = _header(step, seed, position, optimizer, extra)
        named = state_of(model, optimizer)
        described = [_describe(name, tensor) for name, tensor in named.items()]
        levels = Levels(compression)
        levels.check(named)
        return _new_path(path), header, named, described, levels

    pending.finish()
    new, header, named, described, levels = on_all_ranks(
        f"save the checkpoint {path}", prepare
    )
    everyone = world()
    told = everyone.all_gather_object((digest_of(described), publish.new_save_id()))
    refuse_disagreement("save", [theirs for theirs, _ in told])
    header = replace(header, save_id=told[0][1])
    job = Save(
        new,
        publish.temporary(new, header.save_id),
        header,
        {tensor.name: tensor for tensor in described},
        make_plan(described),
    )
    on_rank_zero(job.what, lambda: _make_room(job))
    return job, [
        Part(name, named[name], piece, levels.of(name))
        for name, pieces in job.plan.items()
        for piece in pieces
        if piece.writer == everyone.rank
    ]


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
        text = json.dumps(dict({} if extra is None else extra))
        # A copy, which the program cannot change while it is saved.
        copied = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"extra must be plain JSON: {error}") from error
    if len(text) > fmt.MAX_TEXT_BYTES:
        raise CheckpointError(
            f"extra has {len(text)} bytes as JSON, a checkpoint holds "
            f"{fmt.MAX_TEXT_BYTES}"
        )
    return Header("", fmt.integer("step", step), seed, position, steps, copied)


def _new_path(path: str | Path) -> Path:
    new = path_of(path)
    if new.name in ("", ".."):
        raise CheckpointError(
            f"cannot save a checkpoint to {str(path)!r}: that names no folder of its "
            f"own; give a new one in it, such as {publish.step_name(0)}"
        )
    return new


def _make_room(job: Save) -> None:
    publish.check_replaceable(job.path)
    job.path.parent.mkdir(parents=True, exist_ok=True)
    publish.clear_leftovers(job.path.parent)
    job.temp.mkdir()
