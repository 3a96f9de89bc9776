"""Measures checkpoints beside plain files of the same bytes, in one run, in turns.

Other programs on a machine only ever make a disk slower, so the fastest of the rounds
counts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tparmpi.comm import Group, world
from tparmpi.comm.peers import ask
from tparmpi.errors import CheckpointError
from tparmpi.io.agreement import on_all_ranks, on_rank_zero
from tparmpi.io.background import BackgroundSaver
from tparmpi.io.index import read_index
from tparmpi.io.loading import load, own_box, read_blocks
from tparmpi.io.reader import BlockReader, read_at
from tparmpi.io.saving import save
from tparmpi.io.sources import views_of
from tparmpi.io.writer import write_at
from tparmpi.sharding import Shard, chunk
from tparmpi.tensors import Tensor, from_local

TENSORS = 4
"""So many, of float32, are what is saved."""
COLUMNS = 1024
SAVED = "saved"
_PIECE_BYTES = 8 << 20
_PEER_TURNS = 3


class State:
    """Tensors of `nbytes` in all, each split along a dim over the ranks of a group."""

    def __init__(self, group: Group, nbytes: int, dim: int = 0) -> None:
        shape = (max(group.size, nbytes // (4 * TENSORS * COLUMNS)), COLUMNS)
        own = list(shape)
        own[dim] = chunk(shape[dim], group.size, group.rank)[1]
        values = np.arange(own[0] * own[1], dtype=np.float32).reshape(own)
        self._tensors = {
            f"w{number}": from_local(values + number, group, Shard(dim), shape=shape)
            for number in range(TENSORS)
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by their names."""
        return self._tensors

    @property
    def blocks(self) -> list[memoryview]:
        """The bytes of this rank's blocks."""
        tensors = self._tensors.values()
        return [t.array.reshape(-1).view(np.uint8).data for t in tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's blocks."""
        return sum(map(len, self.blocks))


@contextmanager
def scratch(folder: str | Path, nbytes: int) -> Iterator[Path]:
    """A new folder in a folder, removed at the end. Collective over all ranks.

    Raises
    ------
    CheckpointError
        It cannot be made, or the disk has no room for `nbytes`.
    """

    def make() -> Path:
        free = shutil.disk_usage(folder).free
        if free < nbytes:
            raise CheckpointError(
                f"bench: {folder} has room for {free} bytes, {nbytes} are needed; "
                "measure fewer (--mib) or elsewhere (--folder)"
            )
        return Path(tempfile.mkdtemp(prefix="tparmpi-bench-", dir=folder)).resolve()

    path = on_rank_zero(f"measure in {folder}", make)
    try:
        yield path
    finally:
        if world().rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def saves(folder: Path, state: State, rounds: int) -> dict[str, float]:
    """Saves beside plain writes of the same bytes by the same ranks, both synced.

    Collective over all ranks. Leaves a checkpoint in the folder, and each rank's
    plain file.

    Returns
    -------
    dict
        ``s``, ``plain_s``; ``gbytes_per_s``, of all ranks' bytes; ``ratio``, how many
        times as fast as plain.
    """
    path = folder / SAVED

    def clear(name: str) -> None:
        if name == "plain_s":
            _plain(folder).unlink(missing_ok=True)
        else:
            _clear(path)

    works: dict[str, Callable[[], object]] = {
        "s": lambda: save(path, state),
        "plain_s": lambda: on_all_ranks(
            f"measure in {folder}", lambda: _write(_plain(folder), state)
        ),
    }
    return _compared(_in_turns(works, rounds, before=clear), _total(state))


def loads(folder: Path, state: State, rounds: int) -> dict[str, float]:
    """Loads beside plain reads of the same bytes, and what checksums cost.

    Collective over all ranks. Of the files of :func:`saves`, which the system's page
    cache holds where it has room.

    Returns
    -------
    dict
        ``s``, ``plain_s``, ``gbytes_per_s``, ``ratio`` as for saves;
        ``verified_s`` and ``unverified_s`` of its reads alone, with and without taking
        checksums; ``verification``, the part that these add.
    """
    path = folder / SAVED
    index = read_index(path)
    views = views_of(index)
    named = {f"model/{name}": tensor for name, tensor in state.state_dict().items()}
    blocks = [(views[name], tensor) for name, tensor in named.items()]

    def unverified() -> None:
        with BlockReader(path, index, verified=False) as reader:
            read_blocks(path, reader, blocks)

    def verified() -> None:
        with BlockReader(path, index) as reader:
            read_blocks(path, reader, blocks)

    works: dict[str, Callable[[], object]] = {
        "s": lambda: load(path, state),
        "plain_s": lambda: _read(_plain(folder), state),
        "verified_s": verified,
        "unverified_s": unverified,
    }
    found = _compared(_in_turns(works, rounds), _total(state))
    found["verification"] = found["verified_s"] / found["unverified_s"] - 1
    return found


def columns(folder: Path, state: State, rounds: int) -> dict[str, float]:
    """Loads into tensors that are split by columns, from the checkpoint by rows.

    Collective over all ranks.

    Returns
    -------
    dict
        ``s``; ``gbytes_per_s`` of bytes needed; ``amplification``, bytes read by those
        needed, of the reads that fill the tensors.
    """
    path = folder / SAVED
    index = read_index(path)
    with BlockReader(path, index) as reader:
        for name, tensor in state.state_dict().items():
            reader.read_into(f"model/{name}", own_box(tensor), tensor.array)
        read = _all(reader.bytes_read)
    total = _total(state)
    found = _in_turns({"s": lambda: load(path, state)}, rounds)
    return {
        **found,
        "gbytes_per_s": total / found["s"] / 1e9,
        "amplification": read / total,
    }


def pauses(folder: Path, state: State, rounds: int) -> dict[str, float]:
    """How long a background save keeps the program, beside a copy of its tensors.

    Collective over all ranks. The memory of the private copy is there already, as it is
    from the second save on; the copy beside it is NumPy's, into memory that is there.

    Returns
    -------
    dict
        ``s``, ``copy_s``; ``ratio``, how many times as long as the copy.
    """
    path = folder / SAVED
    targets = [np.zeros(len(block), np.uint8) for block in state.blocks]

    def copy() -> None:
        for target, block in zip(targets, state.blocks, strict=True):
            np.copyto(target, np.frombuffer(block, np.uint8))

    with BackgroundSaver() as saver:

        def finish(name: str) -> None:
            saver.wait()
            if name == "s":
                _clear(path)

        works: dict[str, Callable[[], object]] = {
            "s": lambda: saver.save(path, state),
            "copy_s": copy,
        }
        found = _in_turns(works, rounds, before=finish)
    return {**found, "ratio": found["s"] / found["copy_s"]}


def beside(folder: Path, state: State, command: str, rounds: int) -> dict[str, Any]:
    """Another library's saves and loads of the same tensors, in turns with ours.

    Collective over all ranks. Its program is started several times, with a folder and
    the number of bytes; see :func:`tparmpi.comm.peers.ask`. Its two numbers are the
    microseconds of its fastest save and load.

    Returns
    -------
    dict
        ``name``; ``save`` and ``load``, each with ``s``, ``peer_s`` and ``ratio``.
    """
    path, total = folder / SAVED, _total(state)
    ours = {"save": float("inf"), "load": float("inf")}
    theirs = dict(ours)
    for _ in range(_PEER_TURNS):
        said = ask(world(), command, str(folder / "peer"), str(total))
        found = _in_turns({"load": lambda: load(path, state)}, rounds)
        found |= _in_turns(
            {"save": lambda: save(path, state)}, rounds, lambda name: _clear(path)
        )
        for name, us in zip(("save", "load"), said["us"], strict=True):
            theirs[name] = min(theirs[name], us / 1e6)
            ours[name] = min(ours[name], found[name])
    return {
        "name": said["name"],
        **{
            name: {"s": s, "peer_s": theirs[name], "ratio": theirs[name] / s}
            for name, s in ours.items()
        },
    }


def _in_turns(
    works: dict[str, Callable[[], object]],
    rounds: int,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, float]:
    """The seconds of each work, the fastest of the rounds.

    Collective over all ranks; a time is that of the slowest rank. `before` is told
    the name of each before it, and not counted; nor is a first round more.
    """
    everyone = world()
    found = dict.fromkeys(works, float("inf"))
    for number in range(rounds + 1):
        for name, work in works.items():
            before(name)
            everyone.barrier()
            start = time.perf_counter()
            work()
            took = np.array(time.perf_counter() - start)
            slowest = float(everyone.all_reduce(took, "max"))
            if number:
                found[name] = min(found[name], slowest)
    return found


def _compared(found: dict[str, float], nbytes: int) -> dict[str, float]:
    return {
        **found,
        "gbytes_per_s": nbytes / found["s"] / 1e9,
        "ratio": found["plain_s"] / found["s"],
    }


def _clear(path: Path) -> None:
    if world().rank == 0:
        shutil.rmtree(path, ignore_errors=True)


def _plain(folder: Path) -> Path:
    return folder / f"plain-{world().rank}"


def _write(path: Path, state: State) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        offset = 0
        for block in state.blocks:
            for first in range(0, len(block), _PIECE_BYTES):
                write_at(descriptor, block[first : first + _PIECE_BYTES], offset)
                offset += len(block[first : first + _PIECE_BYTES])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, state: State) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        offset = 0
        for block in state.blocks:
            for first in range(0, len(block), _PIECE_BYTES):
                read_at(descriptor, block[first : first + _PIECE_BYTES], offset)
                offset += len(block[first : first + _PIECE_BYTES])
    finally:
        os.close(descriptor)


def _total(state: State) -> int:
    return _all(state.nbytes)


def _all(number: int) -> int:
    """The sum over all ranks."""
    return int(world().all_reduce(np.array(number)))
