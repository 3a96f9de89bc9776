"""Where a configuration comes from: command line, environment, file, default.

A key given in several places takes its value from the first of these.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli_w

from tparmpi.config import Environment
from tparmpi.errors import UsageError
from tparmpi.train.config import (
    ENVIRONMENT_PREFIX,
    KEYS,
    SECTIONS,
    Key,
    RunConfig,
    check_samples,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ELSEWHERE = frozenset(
    f"{ENVIRONMENT_PREFIX}{field.name}".upper()
    for field in dataclasses.fields(Environment)
)
"""Variables that are no keys of a configuration."""
_INTERNAL = frozenset({"TPARMPI_RANK_PROCESS"})
"""Variables that the package sets for its own children."""

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a table",
}


def resolve(
    *,
    toml: str | None = None,
    toml_name: str = "config.toml",
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> RunConfig:
    """The configuration that these sources give together. Local.

    Parameters
    ----------
    toml, toml_name
        Text of a configuration file and its name for messages.
    environment
        Environment variables; `TPARMPI_<SECTION>_<KEY>` are read, and no other may
        begin with `TPARMPI_` but those of `tparmpi.config`.
    settings
        `section.key=value` texts of `--set`; a later one replaces an earlier one.
    flags
        Dotted key -> (flag, value) of the short flags, `{"parallel.tp": ("--tp", 2)}`.

    Raises
    ------
    UsageError
        An unknown key (with the nearest known one), a value of the wrong type or out
        of range, a flag and a `--set` that disagree; the message names the source.
    """
    given: dict[str, tuple[str, Any]] = {}
    if toml is not None:
        given.update(_from_toml(toml, toml_name))
    given.update(_from_environment(environment or {}))
    given.update(_from_command_line(settings, flags or {}))
    for name, (source, value) in given.items():
        complaint = KEYS[name].limits.complaint(value)
        if complaint:
            raise UsageError(f"{name} {complaint}, {source} gives {value!r}")
    config = RunConfig().replace({name: value for name, (_, value) in given.items()})
    config = config.resolved()
    check_samples(config)
    return config


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse variables that begin as the package's own and are none. Local.

    Raises
    ------
    UsageError
        With the nearest known one.
    """
    keys = tuple(key.variable for key in KEYS.values())
    known = (*sorted(_ELSEWHERE), *keys)
    for variable in environment:
        ours = variable.startswith(ENVIRONMENT_PREFIX)
        if ours and variable not in _INTERNAL.union(known):
            message = _unknown(variable, known, "the environment", "variable")
            raise UsageError(f"{message}; set that, or unset it")


def to_toml(config: RunConfig) -> str:
    """The configuration as the text of a TOML file. Local."""
    return tomli_w.dumps(config.as_dict())


def _from_toml(text: str, source: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not a TOML file: {error}") from error
    for section, table in tables.items():
        if not isinstance(table, dict):
            if section in SECTIONS:
                raise UsageError(
                    f"{section} must be a table, {source} gives {table!r}: write "
                    f"[{section}] on a line of its own and its keys below"
                )
            message = _unknown(section, tuple(KEYS), source, "key")
            raise UsageError(f"{message}, a key below a line with its [section]")
        if section not in SECTIONS:
            raise UsageError(_unknown(section, SECTIONS, source, "section"))
        for key, value in table.items():
            known = _known(f"{section}.{key}", source)
            yield known.name, (source, _typed(known, value, source))


def _from_environment(
    environment: Mapping[str, str],
) -> Iterator[tuple[str, tuple[str, Any]]]:
    check_environment(environment)
    for key in KEYS.values():
        if key.variable in environment:
            text = environment[key.variable]
            yield key.name, (key.variable, _parsed(key, text, key.variable))


def _from_command_line(
    settings: Sequence[str], flags: Mapping[str, tuple[str, Any]]
) -> dict[str, tuple[str, Any]]:
    given: dict[str, tuple[str, Any]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(
                f"--set {setting}: no '='; write --set section.key=value, "
                "for example --set model.n_layer=4"
            )
        known = _known(name.strip(), "--set")
        given[known.name] = "--set", _parsed(known, text.strip(), "--set")
    for name, (flag, value) in flags.items():
        if name in given and given[name][1] != value:
            raise UsageError(
                f"{flag} {value} and --set {name}={given[name][1]} disagree: "
                "give one of them"
            )
        given[name] = flag, value
    return given


def _known(name: str, source: str) -> Key:
    if name not in KEYS:
        raise UsageError(_unknown(name, tuple(KEYS), source, "key"))
    return KEYS[name]


def _unknown(name: str, known: Sequence[str], source: str, what: str) -> str:
    # The nearest of all rather than of the close ones: a hint is always given.
    nearest = max(known, key=lambda candidate: _likeness(name, candidate))
    return f"unknown {what} {name!r} in {source}; the nearest known one is {nearest!r}"


def _likeness(name: str, candidate: str) -> float:
    """How alike a name and a known one are, whole or without the latter's section."""
    name, candidate = name.lower(), candidate.lower()
    bare = candidate.removeprefix(ENVIRONMENT_PREFIX.lower())
    for section in SECTIONS:
        bare = bare.removeprefix(f"{section}.").removeprefix(f"{section}_")
    given = name.removeprefix(ENVIRONMENT_PREFIX.lower())
    return max(
        difflib.SequenceMatcher(None, name, candidate).ratio(),
        difflib.SequenceMatcher(None, given, bare).ratio(),
    )


def _typed(key: Key, value: Any, source: str) -> Any:
    """A value that TOML already gave a type."""
    if key.type is float and type(value) is int:
        return float(value)
    if type(value) not in key.types:
        kinds = " or ".join(_WORDS[kind] for kind in key.types)
        raise UsageError(f"{key.name} must be {kinds}, {source} gives {value!r}")
    return value


def _parsed(key: Key, text: str, source: str) -> Any:
    """A value given as text."""
    if len(key.types) > 1:
        return _typed(key, _toml_value(text), source)
    try:
        if key.type is bool:
            return {"true": True, "false": False}[text.lower()]
        return key.type(text)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{key.name} must be {_WORDS[key.type]}, {source} gives {text!r}"
        ) from error


def _toml_value(text: str) -> Any:
    """What the text is in a TOML file; text, where it is nothing there."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
