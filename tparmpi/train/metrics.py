"""`metrics.jsonl`: one JSON object a line, one line a step.

A training line has `step` and `loss`, an evaluation line `step` and `val_loss`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tparmpi.errors import RunFolderError, reason


class MetricsFile:
    """A metrics file that is being written, by one rank.

    Every line is one unbuffered append, so that a kill loses none that was written.
    """

    def __init__(self, path: Path, step: int) -> None:
        """Open `path`, keeping the lines of the first `step` steps. Local.

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
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            end = 0
            for offset, line in _whole_lines(path.read_bytes()):
                if line["step"] > step:
                    break
                self.loss = line.get("loss", self.loss)
                if "val_loss" in line:
                    self.evaluated, self.val_loss = line["step"], line["val_loss"]
                end = offset
            os.ftruncate(self._file, end)
        except OSError as error:
            raise RunFolderError(f"cannot open {path}: {reason(error)}") from error

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
    """All whole lines of a metrics file. Local."""
    return [line for _, line in _whole_lines(path.read_bytes())]


def _whole_lines(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line with the offset of its end, up to the first that a kill cut short."""
    end = 0
    for text in data.splitlines(keepends=True):
        end += len(text)
        try:
            line = json.loads(text)
        except ValueError:
            return
        if not text.endswith(b"\n") or not isinstance(line, dict) or "step" not in line:
            return
        yield end, line
