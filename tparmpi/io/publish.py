"""How a checkpoint folder appears, is replaced and disappears, whole each time.

A save happens in ``<name>.<save id>.tmp`` and is renamed to ``<name>`` at its end; a
checkpoint that has that name is first renamed to ``<name>.<save id>.aside``. So
whatever is called ``<name>`` is complete, and a program killed between two renames
leaves the previous one aside, from where it is taken back.

Only files that a save can have written are ever removed, one by one by their names,
and no symbolic link is followed to remove anything. Local: rank 0 alone calls these.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.index import read_index

STEP_NAME = re.compile(r"step-([0-9]{8,18})")
_STEPS = range(10**18)
_LEFTOVER = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>tmp|aside)", re.DOTALL)


def step_name(step: int) -> str:
    """Folder name of a step: ``step-00001000``.

    Raises
    ------
    CheckpointError
        The step is negative or no integer.
    """
    return f"step-{fmt.integer('step', step, _STEPS):08d}"


def new_save_id() -> str:
    """16 random hexadecimal digits, which tell one save's files from all others."""
    return secrets.token_hex(8)


def temporary(path: Path, save_id: str) -> Path:
    """Where a checkpoint is written before it is published."""
    return path.with_name(f"{path.name}.{save_id}.tmp")


def obstacle(path: Path) -> str | None:
    """Why a folder must not be replaced or removed as a checkpoint, None if it may.

    A checkpoint may: an index, data files, nothing else. So may an empty folder.
    """
    if not path.is_dir():
        return "is not a folder" if path.exists() else "is a link to nothing"
    names, others = _contents(path)
    if others:
        return f"is not a checkpoint alone: it holds '{others[0]}'"
    if not names:
        return "is a link to an empty folder" if path.is_symlink() else None
    if names == [fmt.INDEX_NAME]:
        # The name alone could be another program's.
        try:
            read_index(path)
        except CheckpointError:
            return "is not a checkpoint: it holds an index.h5 of another kind"
    return None


def check_replaceable(path: Path) -> None:
    """Refuse to save where anything but a checkpoint is.

    Raises
    ------
    CheckpointError
        With what is there. An empty folder may be replaced.
    """
    found = obstacle(path) if os.path.lexists(path) else None
    if found is not None:
        raise CheckpointError(
            f"{path} exists and {found}; save to another name, or to a new one in it, "
            f"such as {path / step_name(0)}"
        )


def clear_leftovers(parent: Path) -> None:
    """Take back what an interrupted save moved aside; remove what it left half done.

    Only names of the two forms above are touched, and folders that hold nothing but a
    checkpoint's files. No other save may be running in the same folder.
    """
    for path in sorted(parent.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if not match or not _is_leftover(path, match["kind"]):
            continue
        original = path.with_name(match["name"])
        if match["kind"] == "tmp" or (original / fmt.INDEX_NAME).is_file():
            _remove(path)
        elif not os.path.lexists(original):
            os.rename(path, original)
            fmt.sync(parent)


def publish(temp: Path, path: Path, save_id: str) -> None:
    """Give a complete, synced temporary folder its name; replace what has the name.

    If anything fails, the folder that had the name has it again.

    Raises
    ------
    CheckpointError
        What has the name is not a checkpoint.
    """
    aside = path.with_name(f"{path.name}.{save_id}.aside")
    check_replaceable(path)
    replaced = os.path.lexists(path)
    if replaced:
        os.rename(path, aside)
    try:
        os.rename(temp, path)
        try:
            fmt.sync(path.parent)
        except BaseException:
            os.rename(path, temp)
            raise
    except BaseException:
        if replaced:
            os.rename(aside, path)
        raise
    if replaced:
        # The new one stands; what cannot be removed now, the next save removes.
        discard(aside)


def discard(path: Path) -> None:
    """Remove a leftover as far as that is possible now."""
    with contextlib.suppress(OSError):
        _remove(path)


def withdraw(path: Path) -> None:
    """Remove a published checkpoint: its name goes first, at once."""
    if path.is_symlink():
        path.unlink()
        return
    temp = temporary(path, new_save_id())
    os.rename(path, temp)
    _remove(temp)


def published(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of the loadable checkpoints in a folder, oldest first.

    One that an interrupted save has moved aside counts while no other has its name.
    """
    if not folder.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover and leftover["kind"] == "tmp":
            continue
        match = STEP_NAME.fullmatch(leftover["name"] if leftover else path.name)
        if not match or not (path / fmt.INDEX_NAME).is_file():
            continue
        if leftover:
            original = path.with_name(leftover["name"])
            if (original / fmt.INDEX_NAME).is_file():
                continue
        found[int(match[1])] = path
    return sorted(found.items())


def headless(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of what was published in a folder and has lost its index."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = STEP_NAME.fullmatch(path.name)
        if match and is_headless(path):
            found.append((int(match[1]), path))
    return sorted(found)


def is_headless(path: Path) -> bool:
    """Whether a folder holds data files of a checkpoint but no index."""
    if not path.is_dir() or os.path.lexists(path / fmt.INDEX_NAME):
        return False
    return any(fmt.DATA_NAME.fullmatch(name) for name in os.listdir(path))


def _contents(folder: Path) -> tuple[list[str], list[str]]:
    """Names of a folder's entries: those that a save can have written, all others."""
    own, others = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            named = entry.name == fmt.INDEX_NAME or fmt.DATA_NAME.fullmatch(entry.name)
            if named and entry.is_file(follow_symlinks=False):
                own.append(entry.name)
            else:
                others.append(entry.name)
    return sorted(own), sorted(others)


def _is_leftover(path: Path, kind: str) -> bool:
    if path.is_symlink():
        return kind == "aside"
    return path.is_dir() and not _contents(path)[1]


def _remove(path: Path) -> None:
    """Remove a link, or a checkpoint's own files and then their folder, now empty."""
    if path.is_symlink():
        path.unlink()
        return
    # Without its index it is no checkpoint any more, however far this comes.
    for name in sorted(_contents(path)[0], key=lambda name: name != fmt.INDEX_NAME):
        os.unlink(path / name)
    os.rmdir(path)
