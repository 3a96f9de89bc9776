"""The training loop: from a configuration and a run folder to a trained model."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import tparmpi as tpm
from tparmpi import comm
from tparmpi.errors import (
    RunFolderError,
    TparmpiError,
    UsageError,
    counted,
)
from tparmpi.io import checkpoint
from tparmpi.io.text import TextData
from tparmpi.optim import AdamW, clip_norm, schedules
from tparmpi.parallel import Pipeline, reduce_gradients
from tparmpi.sharding.chunks import chunk, chunk_sizes
from tparmpi.train.config import RunConfig
from tparmpi.train.layout import Layout, choose_layout
from tparmpi.train.lock import Lock
from tparmpi.train.metrics import MetricsFile
from tparmpi.train.model import TokenLoss, memory_for, place_model
from tparmpi.train.newest import load_newest
from tparmpi.train.progress import Reporter, reporter
from tparmpi.train.ranks import Boundary, from_rank_zero
from tparmpi.train.run_folder import RunFolder
from tparmpi.train.saves import Saves, check_compression
from tparmpi.train.signals import StopSignals

VALIDATION_TOKENS = 1 << 16
"""How much of the validation text one evaluation reads, spread over all of it."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `loss` and `val_loss` are the last ones, in nats per token, None before the first.
    `seconds` are those of this start. `stopped` says that it ended early, with a
    checkpoint to go on from.
    """

    run: str
    step: int
    steps: int
    loss: float | None
    val_loss: float | None
    seconds: float
    stopped: bool

    def as_dict(self) -> dict[str, Any]:
        """The fields, as JSON holds them. Local."""
        return asdict(self)


def train(
    config: RunConfig,
    path: Path,
    *,
    stream: TextIO | None,
    signals: StopSignals | None = None,
) -> Outcome:
    """Train in the run folder `path` until `config.train.steps` steps are done.

    Goes on from the newest checkpoint there. On the same layout the losses are bit for
    bit those of a run that was never interrupted. Collective over all ranks; every rank
    gives the same configuration.

    Parameters
    ----------
    config, path
        What to train and where it is kept.
    stream
        Where rank 0 shows the progress; None where there is no such place.
    signals
        Where it is noted that the run shall stop early; by default entered here.

    Raises
    ------
    UsageError
        A layout that does not fit the ranks, or a folder with a run of another model.
    RunFolderError
        The folder is in use or cannot be written.
    DataError, CheckpointError
        The text cannot be read; a checkpoint cannot be read or written.
    DeviceError
        There is not enough memory for the model.
    """
    config = config.resolved()
    world = comm.world()
    layout = choose_layout(
        world.size,
        config.model.n_head,
        tp=config.parallel.tp,
        dp=config.parallel.dp,
        pp=config.parallel.pp,
    )
    config = config.replace({"parallel.tp": layout.tp, "parallel.dp": layout.dp})
    folder = RunFolder(path)
    with contextlib.ExitStack() as stack:
        if signals is None:
            signals = stack.enter_context(StopSignals())
        show = reporter(stream) if world.rank == 0 else Reporter()
        stack.callback(show.close)
        # What may be refused is made before the folder is touched.
        training = Training(config, layout, signals, show)
        held = stack.enter_context(_claimed(folder, config, show))
        stack.callback(training.close)
        with training.memory():
            training.open(folder, held)
            return training.run()


@contextlib.contextmanager
def _claimed(
    folder: RunFolder, config: RunConfig, show: Reporter
) -> Iterator[list[Lock]]:
    """The folder's lock, in a list that is empty on all ranks but rank 0."""
    held: list[Lock] = []

    def claim() -> None:
        held.append(folder.claim(config, show.say))

    from_rank_zero(claim)
    try:
        yield held
    finally:
        for lock in held:
            lock.release()


class Training:
    """A run between its first and its last step. Every method is collective."""

    def __init__(
        self, config: RunConfig, layout: Layout, signals: StopSignals, show: Reporter
    ) -> None:
        self._config = config
        self._layout = layout
        self._show = show
        self._boundary = Boundary(signals)
        self._began = time.monotonic()
        self._step = 0
        self._evaluated = -1
        self._complete = self._exceeds = False
        self._loss: float | None = None
        self._val_loss: float | None = None
        self._metrics: MetricsFile | None = None

        self._model, self._placed = place_model(config, layout)
        self._pipeline = Pipeline(
            self._placed,
            config.parallel.schedule,
            config.parallel.microbatches,
            recompute=config.parallel.recompute,
        )
        self._parameters = list(self._model.parameters())
        with self.memory():
            self._optimizer = AdamW(
                self._model.named_parameters(),
                config.train.lr,
                weight_decay=config.train.weight_decay,
            )
        check_compression(config.checkpoint, self._model, self._optimizer)
        self._data = TextData(
            config.data.train, config.model.seq_len, config.data.validation
        )
        self._text = self._data.digest

    def memory(self) -> contextlib.AbstractContextManager[None]:
        """Where the memory does not suffice, this tells so in a sentence. Local."""
        return memory_for(self._model, 4, "training this model")

    def open(self, folder: RunFolder, held: list[Lock]) -> None:
        """Begin in `folder`, or go on from its newest checkpoint.

        Parameters
        ----------
        held
            The folder's lock on rank 0, nothing on the others.
        """
        self._folder = folder
        self._held = held
        newest = load_newest(folder.checkpoints, self._model, self._optimizer)
        for note in newest.notes:
            self._show.say(note)
        self._saves = Saves(self._config.checkpoint, folder.checkpoints, self._show.say)
        if newest.report is None:
            self._model.initialize(self._config.train.seed)
        else:
            self._resume(newest.report, {path.name for path in newest.damaged})
        recorded = from_rank_zero(self._open_files)
        self._evaluated, self._loss, self._val_loss = recorded

    def run(self) -> Outcome:
        """Do the steps that are left."""
        config = self._config.train
        self._introduce()
        # A run whose numbers run away is told so in a sentence of its own.
        with np.errstate(all="ignore"):
            if self._is_due(config.eval_every) and not self._complete:
                self._evaluate()
            while self._step < config.steps and not self._boundary.stop:
                self._advance()
                self._saves.poll()
                if self._is_due(config.eval_every) and not self._boundary.stop:
                    self._evaluate()
                if self._is_due(self._config.checkpoint.every) or self._boundary.stop:
                    self._save()
            self._saves.wait()
        return self._conclude()

    def close(self) -> None:
        """Close the metrics."""
        if self._metrics is not None:
            self._metrics.close()

    def _is_due(self, every: int) -> bool:
        last = self._step >= self._config.train.steps
        return last or (every > 0 and self._step > 0 and self._step % every == 0)

    def _is_complete(self) -> bool:
        """Whether every step was done and the last one validated, if it was asked."""
        if self._exceeds:
            return True
        steps = self._config.train.steps
        return self._step >= steps and self._evaluated >= self._step

    def _advance(self) -> None:
        """One optimizer step."""
        config = self._config.train
        began = time.perf_counter()
        loss = self._backward()
        lr = self._learning_rate()
        reduce_gradients(self._parameters)
        norm, scale = clip_norm(self._parameters, config.grad_clip or math.inf)
        self._optimizer.step(lr=lr, scale=scale)
        self._model.zero_grad()
        tokens = config.batch_size * self._config.model.seq_len
        self._boundary.meet()
        seconds = time.perf_counter() - began
        self._step += 1
        if not math.isfinite(loss):
            self._saves.wait()
            raise TparmpiError(
                f"the loss of step {self._step} is {loss}: the numbers have run away; "
                "begin another run (--run) with a smaller train.lr or a longer "
                "train.warmup"
            )
        self._loss = loss
        self._record(
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens_per_s=tokens / seconds,
            step_s=seconds,
        )
        self._show.step(self._step, loss=loss, lr=lr, tokens=tokens, step_s=seconds)

    def _backward(self) -> float:
        """Compute the gradients of the mean loss; return the loss."""
        config = self._config
        self._model.train()
        batch, seed = config.train.batch_size, config.train.seed
        first, count = self._own_rows(batch)
        samples = self._data.batch(seed, self._step * batch + first, count)
        tokens, targets = self._tensors(samples, batch)
        with tpm.random.scope(seed, self._step):
            return self._pipeline.forward_backward(tokens, targets, TokenLoss())

    def _own_rows(self, rows: int) -> tuple[int, int]:
        """This rank's part of a batch: first row and number of rows."""
        return chunk(
            rows,
            self._layout.dp,
            comm.world().rank // self._layout.tp % self._layout.dp,
        )

    def _tensors(self, samples: np.ndarray, rows: int) -> tuple[tpm.Tensor, tpm.Tensor]:
        """Tokens where the model takes them, and targets where the predictions are.

        Parameters
        ----------
        samples : ndarray of uint8, shape (own rows, seq_len + 1)
            This rank's, of `rows` in all.
        """
        samples = samples.astype(np.int64)
        shape = (rows, self._config.model.seq_len)
        placement = self._placed.placement
        tokens, targets = (
            tpm.from_local(part, place.inner(), shape=shape, dp=tpm.Shard(0))
            for part, place in (
                (samples[:, :-1], placement.input),
                (samples[:, 1:], placement.output),
            )
        )
        return tokens, targets

    def _learning_rate(self) -> float:
        config = self._config.train
        schedule = {
            "cosine": schedules.warmup_cosine,
            "constant": schedules.warmup_constant,
        }[config.lr_schedule]
        return schedule(
            self._step, lr=config.lr, warmup=config.warmup, steps=config.steps
        )

    def _evaluate(self) -> None:
        """Validate, unless it was done for this step; given up when asked to stop."""
        if self._evaluated >= self._step:
            return
        config = self._config
        batch = config.train.batch_size
        limit = math.ceil(VALIDATION_TOKENS / (batch * config.model.seq_len))
        self._model.eval()
        loss_sum, tokens = 0.0, 0
        for samples in self._data.validation_batches(batch, limit):
            first, count = self._own_rows(len(samples))
            own = samples[first : first + count]
            part = self._losses(*self._tensors(own, len(samples)))
            loss_sum += self._boundary.meet(part)[0]
            tokens += len(samples) * config.model.seq_len
            if self._boundary.stop:
                return
        self._evaluated = self._step
        self._val_loss = loss_sum / tokens
        self._record(val_loss=self._val_loss, val_tokens=tokens)
        self._show.say(f"step {self._step}: validation loss {self._val_loss:.4f}")

    def _losses(self, tokens: tpm.Tensor, targets: tpm.Tensor) -> float:
        """What this rank adds to the sum of the losses; one speaks for its replicas."""
        if len(self._placed.stages) > 1:
            mean = self._pipeline.evaluate(tokens, targets, TokenLoss())
            return mean * targets.size if tpm.world().rank == 0 else 0.0
        predictions = self._placed(tokens)
        output = self._placed.placement.output
        with tpm.no_grad():
            losses = tpm.cross_entropy(predictions, targets).sum()
        speaks = output.is_member and output.coordinates[output.axes.index("tp")] == 0
        return float(losses.local) if speaks else 0.0

    def _record(self, **values: Any) -> None:
        metrics = self._metrics
        if metrics is not None:
            self._boundary.attempt(lambda: metrics.write(self._step, **values))

    def _save(self) -> None:
        """Save a checkpoint of this step, unless there is one."""
        if self._saves.step == self._step:
            return
        self._boundary.meet()
        from_rank_zero(self._before_save)
        config = self._config.train
        self._saves.save(
            self._model,
            self._optimizer,
            step=self._step,
            seed=config.seed,
            position=self._step * config.batch_size,
            text=self._text,
            val_loss=self._val_loss if self._evaluated == self._step else None,
            last=self._boundary.stop or self._step >= config.steps,
        )

    def _before_save(self) -> None:
        if not all(lock.is_held() for lock in self._held):
            raise RunFolderError(
                f"another job has taken {self._folder.path} over, since this one was "
                "not heard of for long: nothing more is saved by this one"
            )
        if self._metrics is not None:
            self._metrics.sync()

    def _resume(self, report: checkpoint.LoadReport, damaged: set[str]) -> None:
        if report.extra.get("text") != self._text:
            raise UsageError(
                f"the text of data.train ({self._config.data.train}) or its validation "
                f"part is not what the run in {self._folder.path} began with: give the "
                "same text to resume it, or another folder with --run"
            )
        self._step = report.step
        recorded = report.extra.get("damaged")
        if isinstance(recorded, list):
            damaged |= {name for name in recorded if isinstance(name, str)}
        self._saves.begin(report.step, damaged)
        if self._step > self._config.train.steps:
            # What is recorded must not say less than what was done.
            self._exceeds = True
            self._config = self._config.replace({"train.steps": self._step})

    def _open_files(self) -> tuple[int, float | None, float | None]:
        """For rank 0; what the metrics say of the evaluated step and both losses."""
        self._folder.record(self._config)
        metrics = MetricsFile(self._folder.metrics, self._step, self._show.say)
        self._metrics = metrics
        return metrics.evaluated, metrics.loss, metrics.val_loss

    def _introduce(self) -> None:
        config = self._config
        size = sum(parameter.size for parameter in self._parameters)
        kind = self._placed.placement.input.kind
        self._show.say(
            f"{config.model.kind} with {counted(size, 'parameter')} on "
            f"{counted(comm.world().size, 'rank')} ({kind}, {self._layout}),"
            f" text {config.data.train}, run folder {self._folder.path}"
        )
        self._complete = self._is_complete()
        if self._step and not self._complete:
            self._show.say(f"resuming after step {self._step}")
        most = chunk_sizes(config.train.batch_size, self._layout.dp)[0]
        empty = config.parallel.microbatches - most
        if empty > 0:
            self._show.say(
                f"parallel.microbatches is {config.parallel.microbatches} but no rank "
                f"has more than {counted(most, 'row')} of a batch: "
                f"{empty} of the microbatches always empty"
            )
        stages = self._layout.pp
        if config.parallel.microbatches < stages:
            self._show.say(
                f"parallel.microbatches is {config.parallel.microbatches} for "
                f"{stages} stages, which mostly wait for one another: several for each "
                "stage are faster"
            )
        self._show.start(self._step, config.train.steps)

    def _conclude(self) -> Outcome:
        steps = self._config.train.steps
        done = self._is_complete()
        self._boundary.meet()
        seconds = time.monotonic() - self._began
        path, taken = self._folder.path, counted(self._step, "step")
        if self._complete:
            self._show.say(f"{path} already has {taken}, nothing to do")
        elif done:
            self._show.say(f"done: {taken} in {path}")
        else:
            self._show.say(
                f"stopped after step {self._step} of {steps}, saved in "
                f"{path}: the same command resumes"
            )
        return Outcome(
            run=str(self._folder.path),
            step=self._step,
            steps=steps,
            loss=self._loss,
            val_loss=self._val_loss,
            seconds=seconds,
            stopped=not done,
        )
