"""How a checkpoint folder appears, is replaced and disappears, whole each time.

A save happens in ``<name>.<save id>.tmp`` and is renamed to ``<name>`` at its end; a
folder that has that name is first renamed to ``<name>.<save id>.aside``. So whatever
is called ``<name>`` is complete, and a program killed between two renames leaves the
previous one aside, from where it is taken back. Local: rank 0 alone calls these.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from tparmpi.io import format as fmt

STEP_NAME = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>tmp|aside)")


def step_name(step: int) -> str:
    """Folder name of a step: ``step-00001000``."""
    return f"step-{step:08d}"


def new_save_id() -> str:
    """16 random hexadecimal digits, which tell one save's files from all others."""
    return secrets.token_hex(8)


def temporary(path: Path, save_id: str) -> Path:
    """Where a checkpoint is written before it is published."""
    return path.with_name(f"{path.name}.{save_id}.tmp")


def clear_leftovers(parent: Path) -> None:
    """Take back what an interrupted save moved aside; remove what it left half done.

    Only names of the two forms above are touched. No other save may be running in the
    same folder.
    """
    for path in sorted(parent.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if not match or path.is_symlink() or not path.is_dir():
            continue
        original = path.with_name(match["name"])
        if match["kind"] == "aside" and not original.exists():
            os.rename(path, original)
            fmt.sync(parent)
        else:
            shutil.rmtree(path)


def publish(temp: Path, path: Path, save_id: str) -> None:
    """Give a complete, synced temporary folder its name; replace what has the name.

    If anything fails, the folder that had the name has it again.
    """
    aside = path.with_name(f"{path.name}.{save_id}.aside")
    replaced = path.exists()
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
        shutil.rmtree(aside, ignore_errors=True)


def withdraw(path: Path) -> None:
    """Remove a published checkpoint: its name goes first, at once."""
    temp = temporary(path, new_save_id())
    os.rename(path, temp)
    shutil.rmtree(temp)


def published(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of the loadable checkpoints in a folder, oldest first.

    One that an interrupted save has moved aside counts while nothing has its name.
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
        if not leftover or not path.with_name(leftover["name"]).exists():
            found[int(match[1])] = path
    return sorted(found.items())
