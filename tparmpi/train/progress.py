"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from typing import TextIO, cast

from tparmpi.train import output

LINE_SECONDS = 5.0
_SMOOTHING = 0.05
_FIXED = ("dumb", "unknown")
"""Kinds of terminals on which nothing that was written can be written over."""


class Reporter:
    """Shows nothing: the reporter of the ranks that do not print, and the others' base.

    It keeps a running mean of the seconds a step takes, for the time left.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._seconds = 0.0

    def start(self, step: int, steps: int) -> None:
        """Begin after `step` steps of `steps`. Local."""
        self._steps = steps

    def step(
        self, step: int, *, loss: float, lr: float, tokens: int, step_s: float
    ) -> None:
        """Show a finished step: its loss, learning rate, tokens and seconds. Local."""
        old = self._seconds or step_s
        self._seconds = old + _SMOOTHING * (step_s - old)
        left = clock((self._steps - step) * self._seconds)
        speed = tokens / self._seconds
        self._show(step, loss, f"lr {lr:.2e}  {speed:,.0f} tokens/s  {left} left")

    def say(self, text: str) -> None:
        """Show a line of text. Local."""

    def close(self) -> None:
        """Leave the terminal as it was. Local."""

    def _show(self, step: int, loss: float, rest: str) -> None:
        pass


class Lines(Reporter):
    """A line for the first and the last step, and one about every `LINE_SECONDS`.

    If nobody reads them any more the run goes on unseen.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream
        self._next = 0.0

    def say(self, text: str) -> None:
        """Print a line. Local."""
        output.write(self._stream, f"{text}\n")

    def _show(self, step: int, loss: float, rest: str) -> None:
        now = time.monotonic()
        if now >= self._next or step == self._steps:
            self._next = now + LINE_SECONDS
            self.say(f"step {step}/{self._steps}  loss {loss:.4f}  {rest}")


class Bar(Reporter):
    """A progress bar with loss, tokens per second and the time left."""

    def __init__(self, stream: TextIO) -> None:
        # Rich costs more than the rest of the command line together, and is needed on
        # a terminal only.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            console=Console(file=cast(TextIO, output.Unfailing(stream))),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("training", total=None, numbers="")

    def start(self, step: int, steps: int) -> None:
        """Show the bar. Local."""
        super().start(step, steps)
        self._bar.update(self._task, completed=step, total=steps)
        self._bar.start()

    def say(self, text: str) -> None:
        """Print a line above the bar. Local."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was. Local."""
        self._bar.stop()

    def _show(self, step: int, loss: float, rest: str) -> None:
        numbers = f"loss {loss:.4f}  {rest}"
        self._bar.update(self._task, completed=step, numbers=numbers)


def reporter(stream: TextIO | None) -> Reporter:
    """The reporter that suits a stream, None where there is no stream. Local."""
    moves = output.is_terminal(stream) and os.environ.get("TERM") not in _FIXED
    return Bar(stream) if stream is not None and moves else Lines(stream)


def clock(seconds: float) -> str:
    """A length of time as `m:ss` or `h:mm:ss`."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
