"""The folder a run lives in: its configuration, metrics, checkpoints and lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tparmpi.errors import RunFolderError, UsageError, reason
from tparmpi.io import publish
from tparmpi.train import sources
from tparmpi.train.config import RunConfig, check_resumable
from tparmpi.train.lock import Lock

_MARK = "# The configuration of a run of tparmpi, written by `tparmpi train`.\n"
"""First line of the configurations written here, by which they are known again."""
_TRACES = ("checkpoints", "lock", "metrics.jsonl")
"""What is beside the configuration of a run that has begun."""


@dataclass(frozen=True)
class RunFolder:
    """Names of the files of one run. Making one touches no file."""

    path: Path

    @property
    def config(self) -> Path:
        """The configuration as it was resolved."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the step folders."""
        return self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        """Who writes here now."""
        return self.path / "lock"

    def claim(self, config: RunConfig, note: Callable[[str], None]) -> Lock:
        """Take the folder for a run with `config`, making it where it is new. Local.

        For one rank only; the others are told. Where there is a checkpoint to go on
        from, the recorded configuration is compared with `config`. `note` is given one
        sentence about a lock that was taken over.

        Raises
        ------
        UsageError
            The folder holds a run with other mathematics; it is left as it was.
        RunFolderError
            The folder is in use, cannot be written, or holds something else than a run;
            it is left as it was.
        """
        try:
            self._refuse_others()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"cannot make the run folder {self.path}: {reason(error)}; give "
                "another with --run"
            ) from error
        lock = Lock.take(self.lock, note)
        try:
            if publish.published(self.checkpoints):
                check_resumable(config, self.read_config(), str(self.path))
        except BaseException:
            lock.release()
            raise
        return lock

    def _refuse_others(self) -> None:
        """Refuse a folder that is neither empty nor of a run that has begun."""
        if not self.path.is_dir() or publish.published(self.checkpoints):
            return
        found = {path.name for path in self.path.iterdir()}
        found = {name for name in found if not name.startswith(".")}
        if self.config.name in found:
            with open(self.config, "rb") as file:
                marked = file.readline() == _MARK.encode()
            if marked and found.intersection(_TRACES):
                return
            strange = self.config.name
        else:
            # What a start leaves that ended before the configuration was written.
            strangers = sorted(name for name in found if not self._begins(name))
            if not strangers:
                return
            strange = strangers[0]
        raise RunFolderError(
            f"{self.path.absolute()} is not empty and no run folder: it holds "
            f"{strange}, which is not of a run; give a new or empty folder with --run"
        )

    def _begins(self, name: str) -> bool:
        """Whether a start makes something of that name before the configuration."""
        if name == self.checkpoints.name:
            inside = self.checkpoints.iterdir() if self.checkpoints.is_dir() else [None]
            return all(path and path.name.startswith("step-") for path in inside)
        return name == f"{self.config.name}.new" or name.split(".")[0] == "lock"

    def record(self, config: RunConfig) -> None:
        """Write the configuration of a run that has the folder. Local, for one rank.

        Raises
        ------
        RunFolderError
            It cannot be written; the old one stays.
        """
        _replace(self.config, _MARK + sources.to_toml(config))

    def read_config(self) -> RunConfig:
        """The recorded configuration. Local.

        Raises
        ------
        RunFolderError
            There is none, or it is damaged.
        """
        try:
            text = self.config.read_text(encoding="utf-8")
            return sources.resolve(toml=text, toml_name=str(self.config))
        except FileNotFoundError as error:
            raise RunFolderError(
                f"{self.path.absolute()} is no run folder: it has no config.toml; give "
                "the one that `tparmpi train` wrote, the value of its --run"
            ) from error
        except (OSError, UnicodeDecodeError, UsageError) as error:
            raise RunFolderError(
                f"cannot read {self.config}: {reason(error)}; bring it back from a "
                "copy, or begin another run with --run"
            ) from error


def _replace(path: Path, text: str) -> None:
    """Write a file so that there is always the old one or the new one, whole."""
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {reason(error)}; make room or mend the folder, then "
            "give the same command again"
        ) from error
