"""Walking HDF5 files that may be damaged or hostile. Local: no MPI here.

Only regular files are opened, only hard links are followed, each object is met once,
and only attributes of a fixed small size are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
from h5py import h5a, h5t

from tparmpi.errors import CheckpointError, DamagedCheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.patience import is_passing, patiently, words

# What h5py raises for files that are cut, damaged or made to confuse it.
HDF5_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError)


class Refused(Exception):
    """Why a file is not read; always turned into a CheckpointError with its path."""


class OtherVersion(Refused):
    """A file that is whole but of a version that this program does not read."""


def open_file(path: Path) -> h5py.File:
    """Open a regular file for reading, without a lock."""

    def opened() -> h5py.File:
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise Refused("it is not a regular file")
        # A published file never changes, so it needs no lock; some shared file systems
        # refuse locks.
        return h5py.File(path, "r", locking=False)

    return patiently(opened, path)


@contextmanager
def told(path: Path, needed: str = "") -> Iterator[None]:
    """Errors of a file of a checkpoint, in a sentence that names it.

    Parameters
    ----------
    needed
        What follows where the file is missing.

    Raises
    ------
    DamagedCheckpointError
        It is missing or cannot be what was written.
    CheckpointError
        It cannot be read for another reason, and may be whole.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing{needed}") from error
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {fmt.reason(error)}") from error
    except HDF5_ERRORS as error:
        if isinstance(error, OSError) and is_passing(error):
            raise CheckpointError(f"{path} cannot be read: {words(error)}") from error
        raise DamagedCheckpointError(
            f"{path} cannot be read: {fmt.reason(error)}"
        ) from error
    except OtherVersion as refused:
        raise CheckpointError(f"{path} is refused: {refused}") from refused
    except Refused as refused:
        raise DamagedCheckpointError(f"{path} is refused: {refused}") from refused


def open_data_file(path: Path, save_id: str) -> h5py.File:
    """Open a data file of a save for reading."""
    file = open_file(path)
    try:
        if text(file, "save_id") != save_id:
            raise Refused("it belongs to another save")
    except BaseException:
        file.close()
        raise
    return file


def datasets(file: h5py.File) -> list[tuple[str, h5py.Dataset]]:
    """Every dataset below the root by hard links alone, each met once."""
    found: list[tuple[str, h5py.Dataset]] = []
    met: set[Any] = set()
    pending: list[tuple[str, h5py.Group]] = [("", file["/"])]
    while pending:
        path, group = pending.pop()
        for key in group:
            name = f"{path}/{key}" if path else key
            child = _child(group, key, name)
            address = h5py.h5o.get_info(child.id).addr
            if address in met or name.count("/") >= fmt.MAX_DEPTH:
                raise Refused(f"'{name}' is linked twice or nested too deeply")
            met.add(address)
            if isinstance(child, h5py.Dataset):
                found.append((name, child))
            else:
                pending.append((name, child))
    return sorted(found, key=lambda item: item[0])


def walk(
    file: h5py.File, name: str, groups: dict[str, h5py.Group]
) -> h5py.Group | h5py.Dataset:
    """What lies at a path, by hard links alone; `groups` keeps those on the way."""
    *parents, last = name.split("/")
    path = ""
    if path not in groups:
        groups[path] = file["/"]
    for component in parents:
        place, path = groups[path], f"{path}/{component}"
        if path not in groups:
            group = _known_child(place, component, name)
            if not isinstance(group, h5py.Group):
                raise Refused(f"it has no '{name}'")
            groups[path] = group
    return _known_child(groups[path], last, name)


def _known_child(group: h5py.Group, key: str, name: str) -> h5py.Group | h5py.Dataset:
    if key not in group:
        raise Refused(f"it has no '{name}'")
    return _child(group, key, name)


def _child(group: h5py.Group, key: str, name: str) -> h5py.Group | h5py.Dataset:
    if not fmt.checked_name(key):
        raise Refused(f"{name!r} is not a name that a checkpoint can hold")
    if group.get(key, getclass=True, getlink=True) is not h5py.HardLink:
        raise Refused(f"'{name}' is a soft or external link")
    child = group[key]
    if not isinstance(child, h5py.Group | h5py.Dataset):
        raise Refused(f"'{name}' is neither a group nor a dataset")
    return child


def attribute(place: h5py.HLObject, name: str) -> h5a.AttrID | None:
    """An attribute, unread, or None."""
    if not h5a.exists(place.id, name.encode()):
        return None
    return h5a.open(place.id, name.encode())


def text(place: h5py.HLObject, name: str) -> str:
    """An attribute that is a text of fixed length."""
    found = attribute(place, name)
    if found is None:
        raise Refused(f"the attribute {name} is missing")
    kind = found.get_type()
    if (
        not isinstance(kind, h5t.TypeStringID)
        or kind.is_variable_str()
        or found.shape != ()
        or kind.get_size() > fmt.MAX_TEXT_BYTES
    ):
        raise Refused(f"the attribute {name} is not a text of fixed length")
    return bytes(place.attrs[name]).decode()


def integer(place: h5py.HLObject, name: str) -> int | None:
    """An attribute that is a 64-bit integer, or None."""
    found = attribute(place, name)
    if found is None:
        return None
    if found.shape != () or not found.get_type().equal(h5t.STD_I64LE):
        raise Refused(f"the attribute {name} is not a 64-bit integer")
    return int(place.attrs[name])
