"""The checkpoints that a run saves: when they are there, and which of them stay."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tparmpi.errors import CheckpointError, UsageError
from tparmpi.io import checkpoint
from tparmpi.io.chunked import Levels
from tparmpi.io.state import state_of
from tparmpi.nn import Module
from tparmpi.optim import Optimizer
from tparmpi.train.config import CheckpointSection

VALIDATION_LOSS = "val_loss"
"""The entry of a checkpoint's ``extra`` for the validation loss of its step."""


def check_compression(
    config: CheckpointSection, model: Module, optimizer: Optimizer
) -> None:
    """Refuse what no save of these could be compressed by. Local.

    Raises
    ------
    UsageError
        A pattern matches no tensor; alike on all ranks.
    """
    try:
        Levels(config.compression).check(state_of(model, optimizer))
    except CheckpointError as error:
        raise UsageError(f"checkpoint.{error}") from error


class Saves:
    """Saves the steps of one run. Every method is collective over all ranks.

    Parameters
    ----------
    config
        Which checkpoints stay, and whether training goes on while one is written.
    folder
        Where the steps' folders are.
    say
        Shows a sentence.

    Attributes
    ----------
    step : int
        The last one that was saved, or is being saved.
    """

    def __init__(
        self, config: CheckpointSection, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._folder = folder
        self._say = say
        self._saver = checkpoint.BackgroundSaver()
        self._published = 0
        self._damaged: set[str] = set()
        """Names of checkpoints known to be damaged."""
        self.step = 0

    def begin(self, step: int, damaged: Iterable[str]) -> None:
        """Go on after the checkpoint of a step; others are known to be damaged."""
        self.step = self._published = step
        self._damaged.update(damaged)

    def save(
        self,
        model: Module,
        optimizer: Optimizer,
        *,
        step: int,
        seed: int,
        position: int,
        text: str,
        val_loss: float | None,
        last: bool,
    ) -> None:
        """Save a step, once the one before is published.

        Parameters
        ----------
        text
            Digest of what the run reads.
        val_loss
            Of this step, if it was validated.
        last
            Whether nothing will be left to do meanwhile, so that it is waited for.
        """
        self.wait()
        path = checkpoint.step_path(self._folder, step)
        extra: dict[str, Any] = {"text": text}
        if val_loss is not None and math.isfinite(val_loss):
            extra[VALIDATION_LOSS] = val_loss
        if damaged := self._damaged - {path.name}:
            extra["damaged"] = sorted(damaged)
        in_background = self._config.background and not last
        begin = self._saver.save if in_background else checkpoint.save
        with self._telling_the_way_on():
            begin(
                path,
                model,
                optimizer,
                step=step,
                seed=seed,
                position=position,
                extra=extra,
                compression=self._config.compression,
            )
        self.step = step
        if not in_background:
            self._note(path)

    def poll(self) -> None:
        """Publish what all ranks have written."""
        self._take_in(self._saver.poll)

    def wait(self) -> None:
        """Wait until all that was saved is published."""
        self._take_in(self._saver.wait)

    def _take_in(self, published: Callable[[], list[Path]]) -> None:
        with self._telling_the_way_on():
            paths = published()
        for path in paths:
            self._note(path)

    def _note(self, path: Path) -> None:
        """Note that the checkpoint saved last is there; remove older ones."""
        self._published = self.step
        self._damaged.discard(path.name)
        self._say(f"step {self._published}: saved {path}{self._prune(path)}")

    def _prune(self, newest: Path) -> str:
        """Remove old checkpoints; returns what is to be said of the newest."""
        config = self._config
        by = VALIDATION_LOSS if config.keep_best else None
        if config.keep:
            checkpoint.prune(
                self._folder,
                config.keep,
                keep_every=config.keep_every,
                keep_best=by,
                damaged=self._damaged,
            )
        if by is None or checkpoint.best(self._folder, by) != newest:
            return ""
        return ", the lowest validation loss so far"

    @contextlib.contextmanager
    def _telling_the_way_on(self) -> Iterator[None]:
        """Say in an error of a save from where the run may go on. Local."""
        try:
            yield
        except CheckpointError as error:
            step = self._published
            how = f"resumes after step {step}" if step else "begins anew"
            raise CheckpointError(
                f"{error}; make room or mend the folder, then the same command {how}"
            ) from error
