"""Private copies of what a rank saves, made at the speed of memory. Local."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tparmpi.comm import pages
from tparmpi.io import format as fmt
from tparmpi.io import slabs
from tparmpi.io.planner import Box
from tparmpi.io.saving import Part
from tparmpi.io.writer import Shard

_ALIGNMENT = 64
# Below this a thread's turn costs more than the copy.
_SLAB_BYTES = 4 << 20


class Snapshot:
    """Memory for copies of the same size again and again.

    A system gives fresh memory many times slower than it copies, so the memory of one
    copy is that of the next, until :meth:`free`.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._memory.nbytes

    def free(self) -> None:
        """Give the memory back. Local."""
        self._memory = np.empty(0, np.uint8)

    def reserve(self, nbytes: int) -> None:
        """Have memory for copies of so many bytes in all. Local.

        Raises
        ------
        MemoryError
            There is not as much.
        """
        if nbytes > self._memory.nbytes:
            self.free()
            self._memory = pages.allocate(nbytes)

    def take(self, parts: Sequence[Part]) -> list[Shard]:
        """Copy the parts' elements; the copies before are overwritten. Local.

        Returns
        -------
        list of Shard
            In the order of `parts`, on the host, sharing nothing with the tensors.

        Raises
        ------
        MemoryError
            There is not enough memory.
        """
        *starts, end = itertools.accumulate(map(_room, parts), initial=0)
        self.reserve(end)
        shards = []
        work: list[Callable[[], object]] = []
        for part, start in zip(parts, starts, strict=True):
            source = part.array
            memory = self._memory[start : start + part.nbytes]
            target = memory.view(source.dtype).reshape(source.shape)
            shards.append(part.shard_of(_giving(target)))
            work += _copies(part, source, target)
        if len(work) > 1:
            with ThreadPoolExecutor(fmt.threads()) as pool:
                for done in [pool.submit(copy) for copy in work]:
                    done.result()
        elif work:
            work[0]()
        return shards


def _room(part: Part) -> int:
    """Bytes from a part's copy to the next one."""
    return -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT


def _copies(
    part: Part, source: np.ndarray, target: np.ndarray
) -> list[Callable[[], object]]:
    """Copy what is small or on a device; return the rest as work for threads."""
    backend = part.tensor.spec.place.backend
    # A device's current stream belongs to the calling thread.
    if not isinstance(source, np.ndarray) or source.nbytes <= _SLAB_BYTES:
        backend.to_host(source, target)
        return []
    whole = Box((0,) * source.ndim, source.shape)
    boxes = slabs.slabs(source.shape, whole, _SLAB_BYTES // source.dtype.itemsize)
    return [_copying(box.of(source), box.of(target)) for box in boxes]


def _copying(source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
    return lambda: np.copyto(target, source, casting="no")


def _giving(array: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: array
