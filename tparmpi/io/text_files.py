"""Which files a text consists of, and their bytes. Local: one rank reads for all."""

from __future__ import annotations

import glob
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tparmpi.errors import DataError, reason

Bytes = npt.NDArray[np.uint8]

SEPARATOR = b"\n"

_LEFT_OUT_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
# These hold the paths and compiler flags of one machine, so two machines with the same
# Python would otherwise train on different text.
_LEFT_OUT_PREFIX = "_sysconfigdata"
# What a run writes beside its checkpoints; config.toml.new becomes config.toml.
_RUN_FILES = ("config.toml", "metrics.jsonl", "lock")
_RUN_CHECKPOINTS = "checkpoints"
_RUN_NAMES = frozenset({*_RUN_FILES, _RUN_CHECKPOINTS, "config.toml.new"})


def text_files(source: str | Path) -> list[Path]:
    """The files of a source, in the order in which they are joined. Local.

    A folder gives every regular file below it except hidden ones, those in hidden
    folders, and binary ones (a zero byte in the first 8 KiB). A folder and a glob leave
    out run folders, whose files change from one start of a run to the next; of a run
    folder that is itself the source only the run's own files. Order is that of the
    paths' parts, so it does not depend on the file system.

    Raises
    ------
    DataError
        Nothing is there, or the source is no path.
    """
    if str(source) == "stdlib":
        return _stdlib_files()
    path = _path_of(source)
    try:
        return _found(path, source)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot look for text in {place_of(source)}: {reason(error)}"
        ) from error


def _found(path: Path, source: str | Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in _below(path, _hidden) if not _hidden(p.name)]
        found = [p for p in _outside_runs(found, path) if not _binary(p)]
        if not found:
            raise DataError(
                f"the folder {place_of(source)} holds no text file (hidden and binary "
                "ones and run folders do not count); give a file, another folder or a "
                "glob"
            )
        return found
    matches = (Path(name) for name in glob.glob(str(path), recursive=True))
    found = sorted((p for p in matches if p.is_file()), key=lambda p: p.parts)
    found = _outside_runs(found, _fixed_part(path))
    if found:
        return found
    if glob.has_magic(str(path)):
        raise DataError(
            f"no file matches {place_of(source)}; * stands for a part of one name, ** "
            "for any folders, files in run folders do not count, and a relative path "
            "counts from the current directory"
        )
    raise DataError(
        f"there is no file or folder {place_of(source)}; give a text file, a folder, "
        "a glob or 'stdlib'"
    )


def read_text(source: str | Path) -> Bytes:
    """All files of a source, each followed by a newline, as byte tokens. Local.

    Raises
    ------
    DataError
        Nothing is there, a file cannot be read, or there is no byte in any.
    """
    return joined(source)[0]


def joined(source: str | Path) -> tuple[Bytes, int]:
    """The byte tokens, and how many bytes the files themselves have."""
    pieces = []
    for path in text_files(source):
        try:
            pieces.append(path.read_bytes())
        except (OSError, MemoryError) as error:
            raise DataError(f"cannot read {_shown(path)}: {reason(error)}") from error
    size = sum(map(len, pieces))
    if size == 0:
        alone = len(pieces) == 1
        raise DataError(
            f"{place_of(path if alone else source)} is empty"
            f"{'' if alone else f', all {len(pieces)} files of it'}; give a text"
        )
    try:
        text = b"".join(piece + SEPARATOR for piece in pieces)
    except MemoryError as error:
        raise DataError(f"cannot read {place_of(source)}: {reason(error)}") from error
    return np.frombuffer(text, dtype=np.uint8), size


def place_of(source: str | Path) -> str:
    """How a message names a source: by its absolute path."""
    if str(source) == "stdlib":
        return "stdlib"
    try:
        return _shown(Path(source).expanduser().absolute())
    except (OSError, RuntimeError):
        # No such user on this rank, or no current folder any more.
        return _shown(source)


def _shown(path: str | Path) -> str:
    """A path as any terminal and any log can take it."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _path_of(source: str | Path) -> Path:
    if not isinstance(source, (str, Path)):
        raise DataError(
            f"the path of a text must be a text or a Path, it is {source!r}"
        )
    if not str(source):
        raise DataError(
            "the path of the text is empty; give a text file, a folder, a glob or "
            "'stdlib'"
        )
    if _shown(source) != str(source):
        raise DataError(
            f"the path {_shown(source)} has bytes that are no UTF-8, so no "
            "configuration can record it; give the text another name"
        )
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"cannot find the home folder that {source} begins with; give the whole "
            "path"
        ) from error


def _outside_runs(files: list[Path], root: Path) -> list[Path]:
    """Those that no run has written, as far as their place below `root` tells."""
    is_run = cache(_is_run)

    def of_a_run(file: Path) -> bool:
        inner = file.relative_to(root).parts
        if inner[0] in _RUN_NAMES and is_run(root):
            return True
        folders = itertools.accumulate(inner[:-1], Path.joinpath, initial=root)
        return any(map(is_run, itertools.islice(folders, 1, None)))

    return [file for file in files if not of_a_run(file)]


def _is_run(folder: Path) -> bool:
    """Whether a run was started in a folder, however far it came."""
    has = {name for name in _RUN_FILES if (folder / name).is_file()}
    if (folder / _RUN_CHECKPOINTS).is_dir():
        return bool(has)
    return has >= {"config.toml", "metrics.jsonl"}


def _fixed_part(pattern: Path) -> Path:
    """The folder in which all matches of a glob lie."""
    parts = itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts)
    fixed = Path(*parts)
    return fixed if len(fixed.parts) < len(pattern.parts) else fixed.parent


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])

    def left_out(folder: str) -> bool:
        return folder in _LEFT_OUT_FOLDERS or folder.startswith("config-")

    found = [
        path
        for path in _below(root, left_out)
        if path.suffix == ".py" and not path.name.startswith(_LEFT_OUT_PREFIX)
    ]
    if not found:
        raise DataError(
            f"this Python ({sys.executable}) has no .py files in {root}; name a text "
            "file, folder or glob instead of 'stdlib'"
        )
    return found


def _below(root: Path, left_out: Callable[[str], bool]) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not left_out(name)]
        found += [Path(folder, name) for name in names]
    return sorted((p for p in found if p.is_file()), key=lambda p: p.parts)


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(8192)
    except OSError as error:
        raise DataError(f"cannot read {_shown(path)}: {reason(error)}") from error
