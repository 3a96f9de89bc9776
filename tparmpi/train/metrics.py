"""`metrics.jsonl`: one JSON object a line, one line a step.

A training line has `step` and `loss`, an evaluation line `step` and `val_loss`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tparmpi.errors import RunFolderError, reason


class MetricsFile:
    """A metrics file that is being written, by one rank.

    Every line is one unbuffered append, so that a kill loses none that was written.
    """

    def __init__(self, path: Path, step: int, note: Callable[[str], None]) -> None:
        """Open `path`, keeping the lines of the first `step` steps. Local.

        A file of which nothing would be kept is moved aside, and so is one with damaged
        lines; `note` is given one sentence about it. A last line that a kill cut short
        is dropped.

        Raises
        ------
        RunFolderError
            The file cannot be opened or cut.
        """
        self.path = path
        self.evaluated = -1
        """The last step that has an evaluation line; -1 where there is none."""
        self.loss: float | None = None
        """The last step's; None where there is none."""
        self.val_loss: float | None = None
        """The last evaluation's; None where there is none."""
        try:
            kept = self._keep(step, note)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            os.ftruncate(self._file, kept)
        except OSError as error:
            raise RunFolderError(
                f"cannot open {path}: {reason(error)}; make room or mend the folder, "
                "or give another with --run"
            ) from error

    def _keep(self, step: int, note: Callable[[str], None]) -> int:
        """Leave the lines to keep at the file's beginning; returns their bytes."""
        if not self.path.exists():
            return 0
        lines = _lines(self.path.read_bytes())
        damaged = [
            str(number)
            for number, (_, line) in enumerate(lines, start=1)
            if line is None and number < len(lines)
        ]
        kept = []
        for text, line in lines:
            if line is None or line["step"] > step:
                continue
            kept.append(text)
            self.loss = line.get("loss", self.loss)
            if "val_loss" in line:
                self.evaluated, self.val_loss = line["step"], line["val_loss"]
        data = b"".join(kept)
        if damaged:
            aside = _free_name(self.path)
            new = self.path.with_name(f"{self.path.name}.new")
            _write(new, data)
            os.link(self.path, aside)
            new.replace(self.path)
            note(
                f"{self.path} had damaged lines ({', '.join(damaged[:5])}"
                f"{', ...' if len(damaged) > 5 else ''}): they are left out, the whole "
                f"file is kept as {aside}"
            )
        elif not kept and any(line for _, line in lines):
            aside = _free_name(self.path)
            self.path.rename(aside)
            note(
                f"{self.path} is of a run that left no checkpoint: it is kept as "
                f"{aside}, this run begins anew"
            )
        return len(data)

    def write(self, step: int, **values: Any) -> None:
        """Append one line; numbers that are not finite are written as null. Local.

        Raises
        ------
        RunFolderError
            It cannot be written, on a full disk for example.
        """
        line = {"step": step} | {
            name: None
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for name, value in values.items()
        }
        data = (json.dumps(line) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._refusal(error) from error

    def sync(self) -> None:
        """Have everything on the disk, before a checkpoint that relies on it. Local."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        """Close the file. Local."""
        os.close(self._file)

    def _refusal(self, error: OSError) -> RunFolderError:
        return RunFolderError(
            f"cannot write {self.path}: {reason(error)}; make room or mend the folder, "
            "then the same command resumes from the newest checkpoint"
        )


def read(path: Path) -> list[dict[str, Any]]:
    """All undamaged lines of a metrics file. Local."""
    return [line for _, line in _lines(path.read_bytes()) if line is not None]


def _lines(data: bytes) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Each line's text with what it says, None where it is damaged."""
    return [(text, _parsed(text)) for text in data.splitlines(keepends=True)]


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not text.endswith(b"\n") or not isinstance(line, dict):
        return None
    numbers = (line.get(name) for name in ("loss", "val_loss"))
    whole = type(line.get("step")) is int and all(
        number is None or type(number) in (int, float) for number in numbers
    )
    return line if whole else None


def _free_name(path: Path) -> Path:
    """A name beside `path` that nothing has yet."""
    numbered = (path.with_name(f"{path.name}.old-{n}") for n in itertools.count(1))
    return next(name for name in numbered if not os.path.lexists(name))


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
