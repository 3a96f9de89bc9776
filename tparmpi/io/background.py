"""Saving while the program goes on: from a private copy, in a thread of its own.

That thread makes no MPI call. What the ranks have to tell each other they tell in calls
of the main thread: that all have written, whereupon rank 0's thread writes the index
and publishes, and that it has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tparmpi.comm import agree, before_exit, long_work, world
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import pending, saving
from tparmpi.io.chunked import Compression
from tparmpi.io.saving import Part, Save
from tparmpi.io.snapshot import Snapshot
from tparmpi.io.state import HasState, HasSteps
from tparmpi.io.writer import Shard


class BackgroundSaver:
    """Saves checkpoints while the program goes on.

    ::

        with tpm.checkpoint.BackgroundSaver() as saver:
            for step in range(1, steps + 1):
                train_one_step()
                saver.poll()
                if step % 100 == 0:
                    path = tpm.checkpoint.step_path(folder, step)
                    saver.save(path, model, optimizer, step=step)

    :meth:`save` returns when this rank has copied what it writes; a thread writes the
    copy. A checkpoint is published by the first :meth:`poll`, at a step's end for
    example, that finds that all ranks have written; what went wrong on one is raised on
    all there. One save is under way at a time: the next one waits for it, and so do
    ``tpm.checkpoint.save`` and ``load``, the end of the ``with`` block and that of the
    program. A program that is killed leaves the checkpoints before, and a temporary
    folder that the next save removes.

    The memory of the copy, the bytes that this rank writes, is kept for the next save
    until :meth:`close`. Making a saver is local, every method collective over all
    ranks.
    """

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._published: list[Path] = []
        self._running: _Running | None = None

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error other ranks may never come here.
        if kind is None:
            self.close()

    @property
    def under_way(self) -> Path | None:
        """The checkpoint that is being saved, None if there is none. Local."""
        return None if self._running is None else self._running.job.path

    def save(
        self,
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
        """Begin to save a checkpoint; the program may change the tensors at once.

        Waits for the save before, if there is one. Collective over all ranks.

        Parameters
        ----------
        path, model, optimizer, step, seed, position, extra, compression
            As for :func:`tparmpi.io.checkpoint.save`.

        Returns
        -------
        Path
            `path`, where the checkpoint will be.

        Raises
        ------
        CheckpointError
            On every rank: as :func:`tparmpi.io.checkpoint.save` does; if a rank has no
            memory for the copy; or if the save before failed. Nothing is begun then.
        """
        job, parts = saving.begin(
            path, model, optimizer, step, seed, position, extra, compression
        )
        shards: list[Shard] = []
        problem: CheckpointError | None = None
        try:
            shards = self._snapshot.take(parts)
        except MemoryError:
            problem = _no_room(job, parts)
        try:
            agree(problem)
        except CheckpointError:
            job.discard()
            raise
        before_exit(_end)
        self._running = _Running(job, shards)
        pending.current = self
        return job.path

    def poll(self) -> list[Path]:
        """Take the save under way a step further, without waiting for what is written.

        Costs one small message between the ranks while a save is under way, none
        otherwise. Collective over all ranks.

        Returns
        -------
        list of Path
            The checkpoints that were published since the last call of this method or
            :meth:`wait`.

        Raises
        ------
        CheckpointError
            On every rank, if one could not write; no checkpoint is published, what had
            its name is as it was.
        """
        if self._running is not None:
            self._advance(self._running)
        published, self._published = self._published, []
        return published

    def wait(self) -> list[Path]:
        """Wait until the save under way is published. Collective over all ranks.

        Returns
        -------
        list of Path
            As :meth:`poll` does.

        Raises
        ------
        CheckpointError
            As :meth:`poll` does.
        """
        self.finish()
        return self.poll()

    def finish(self) -> None:
        """Wait as :meth:`wait` does, and leave what was published to the next call."""
        while self._running is not None:
            self._running.wait()
            self._advance(self._running)

    def close(self) -> None:
        """Wait as :meth:`wait` does, and give the memory of the copy back.

        The saver may be used again. Collective over all ranks.
        """
        self.finish()
        self._snapshot.free()

    def abandon(self) -> None:
        """Give up the save under way, for when other ranks may be gone. Local.

        What it left, the next save removes.
        """
        if self._running is not None:
            self._running.cancel()
            self._forget()

    def _advance(self, running: _Running) -> None:
        mine = np.array([running.done, running.failed], np.int64)
        done, failed = world().all_reduce(mine).tolist()
        if failed:
            self._give_up(running)
        elif done < world().size:
            return
        elif not running.written:
            running.publish()
        else:
            self._forget()
            self._published.append(running.job.path)

    def _give_up(self, running: _Running) -> None:
        with long_work(running.job.what):
            problem = running.cancel()
        self._forget()
        try:
            # Only now no rank writes any more.
            agree(problem)
        finally:
            running.job.discard()

    def _forget(self) -> None:
        self._running = pending.current = None


class _Cancelled(Exception):
    """Ends the writing of a save that has failed elsewhere."""


class _Running:
    """This rank's part of a save, in a thread."""

    def __init__(self, job: Save, shards: Sequence[Shard]) -> None:
        self.job = job
        self.written = False
        """Whether all ranks have written, so that the rest is rank 0's."""
        self._cancelled = False
        checked = [replace(s, fetch=self._unless_cancelled(s.fetch)) for s in shards]
        self._future: Future[Any] = _in_thread(
            lambda: job.write(checked, threads=_threads())
        )

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def failed(self) -> bool:
        return self.done and self._future.exception() is not None

    def wait(self) -> None:
        with long_work(self.job.what):
            wait([self._future])

    def publish(self) -> None:
        """Let rank 0 publish what all have written. Collective over all ranks."""
        told = world().all_gather_object(self._future.result())
        self.written = True
        if world().rank == 0:
            self._future = _in_thread(lambda: self.job.publish(told))

    def cancel(self) -> Exception | None:
        """End the thread soon, and return what went wrong on this rank. Local."""
        self._cancelled = True
        error = self._future.exception()
        if isinstance(error, Exception) and not isinstance(error, _Cancelled):
            return error
        return None

    def _unless_cancelled(
        self, fetch: Callable[[], np.ndarray]
    ) -> Callable[[], np.ndarray]:
        def fetch_or_end() -> np.ndarray:
            if self._cancelled:
                raise _Cancelled
            return fetch()

        return fetch_or_end


def _threads() -> int:
    """Half as many as a save in the foreground has: the program goes on beside them."""
    return max(1, fmt.threads() // 2)


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    executor = ThreadPoolExecutor(1, "tparmpi-save")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def _no_room(job: Save, parts: Sequence[Part]) -> CheckpointError:
    nbytes = sum(part.nbytes for part in parts)
    return CheckpointError(
        f"rank {world().rank}: cannot {job.what} in the background: there is no memory "
        f"for a copy of {nbytes:,} bytes; save in the foreground"
    )


def _end(code: int) -> None:
    """Finish, or give up, what the end of the program finds unfinished."""
    saver = pending.current
    if saver is None:
        return
    if not code:
        saver.finish()
        return
    path = saver.under_way
    saver.abandon()
    if world().rank == 0:
        print(
            f"the background save of {path} was given up, as the program "
            f"ended with code {code}; call wait() before such an end",
            file=sys.stderr,
        )
