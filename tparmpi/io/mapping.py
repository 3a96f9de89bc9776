"""Renames and transforms from a TOML file, for other programs' weights. Local."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.transforms import (
    Drop,
    Interleave,
    Merge,
    Renames,
    Split,
    Transform,
    Transpose,
    Unflatten,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KINDS: Mapping[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (Split, Merge, Transpose, Unflatten, Interleave, Drop)
}
_TEXT, _TEXTS = "a text", "a list of texts"
_NUMBER, _NUMBERS = "a whole number", "a list of whole numbers"
# Every field of every transform, by what it holds.
_FIELDS = {
    "pattern": _TEXT,
    "target": _TEXT,
    "targets": _TEXTS,
    "patterns": _TEXTS,
    "dim": _NUMBER,
    "groups": _NUMBER,
    "parts": _NUMBER,
    "sizes": _NUMBERS,
    "axes": _NUMBERS,
}


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """How the weights of another program become those of a model here.

    Attributes
    ----------
    transforms : list of Split, Merge, Transpose, Unflatten, Interleave and Drop
    remap : list of (str, str)
    """

    transforms: list[Transform]
    remap: Renames


def read_mapping(path: str | Path) -> WeightMapping:
    r"""Read what :func:`load` and :func:`convert` take as `transforms` and `remap`.

    The file has a table ``[[transforms]]`` for each transform, in order, with its kind
    and its arguments, and pairs of texts in ``remap``::

        remap = [['^h\.', 'blocks.']]

        [[transforms]]
        kind = "split"
        pattern = '(h\.\d+\.attn)\.c_attn\.(\w+)'
        targets = ['\1.q.\2', '\1.k.\2', '\1.v.\2']
        dim = -1

    Raises
    ------
    CheckpointError
        The file cannot be read, is no TOML, or has a key or a value that none of them
        takes.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {fmt.reason(error)}") from error
    _refuse_unknown(str(path), tables, ("remap", "transforms"))
    pairs, listed = tables.get("remap", []), tables.get("transforms", [])
    if not isinstance(pairs, list) or not all(
        _is(_TEXTS, pair) and len(pair) == 2 for pair in pairs
    ):
        raise CheckpointError(
            f"{path}: remap must be a list of pairs [regex, replacement] of texts"
        )
    if not isinstance(listed, list) or not all(isinstance(t, dict) for t in listed):
        raise CheckpointError(
            f"{path}: transforms must be tables, each under [[transforms]]"
        )
    transforms = [
        _transform(f"{path}: transform {number}", dict(table))
        for number, table in enumerate(listed, 1)
    ]
    return WeightMapping(transforms, [(regex, new) for regex, new in pairs])


def _transform(where: str, table: dict[str, Any]) -> Transform:
    kind = table.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(
            f"{where}: kind must be one of {', '.join(_KINDS)}, it is {kind!r}"
        )
    maker = _KINDS[kind]
    fields = {field.name: field for field in dataclasses.fields(maker)}
    where = f"{where} ({kind})"
    _refuse_unknown(where, table, fields)
    for name, value in table.items():
        if not _is(_FIELDS[name], value):
            raise CheckpointError(
                f"{where}: {name} must be {_FIELDS[name]}, it is {value!r}"
            )
    for name, field in fields.items():
        if name not in table and field.default is dataclasses.MISSING:
            raise CheckpointError(f"{where}: it needs {name}")
    made: Transform = maker(**table)
    return made


def _is(what: str, value: Any) -> bool:
    if what in (_TEXTS, _NUMBERS):
        one = _TEXT if what == _TEXTS else _NUMBER
        return isinstance(value, list) and all(_is(one, element) for element in value)
    return type(value) is (str if what == _TEXT else int)


def _refuse_unknown(
    where: str, table: Mapping[str, Any], known: Collection[str]
) -> None:
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = (
                f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            )
            raise CheckpointError(f"{where} has no key {name!r}; {remedy}")
