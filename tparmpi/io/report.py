"""What a load would do, decided before it does anything. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.views import View, castable
from tparmpi.io.writer import Header

Wanted = Mapping[str, tuple[tuple[int, ...], str]]

_SHOWN = 8


@dataclass
class LoadReport:
    """What a load did, and what the checkpoint records beside its tensors.

    Attributes
    ----------
    path : Path
        The checkpoint.
    step : int
    seed, position : int or None
        As given to :func:`save`.
    extra : dict
        As given to :func:`save`.
    applied : list of str
        Tensors that were read, by their path in the checkpoint.
    skipped : list of str
        Tensors in the checkpoint that belong to a part that was not asked for (the
        optimizer's, when no optimizer is given; what `only` leaves out).
    missing : list of str
        Tensors of the model or optimizer that the checkpoint lacks.
    unused : list of str
        Tensors in the checkpoint that the model or optimizer lacks.
    errors : list of str
        Sentences about tensors whose shape or dtype differs.
    """

    path: Path
    step: int
    seed: int | None
    position: int | None
    extra: dict[str, Any]
    applied: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def compare(
    path: Path,
    header: Header,
    stored: Mapping[str, View],
    wanted: Wanted,
    *,
    with_optimizer: bool,
    chosen: Callable[[str], bool],
    cast: bool,
) -> LoadReport:
    """Match a checkpoint's tensors with the shapes and dtypes wanted, by path."""
    report = LoadReport(
        path, header.step, header.seed, header.position, dict(header.extra)
    )
    for name, (shape, dtype) in wanted.items():
        if not chosen(name):
            continue
        if name not in stored:
            report.missing.append(name)
            continue
        differences = _differences(name, stored[name], shape, dtype, cast)
        report.errors += differences
        if not differences:
            report.applied.append(name)
    asked = {fmt.MODEL, fmt.OPTIMIZER} if with_optimizer else {fmt.MODEL}
    for name in stored:
        if not chosen(name):
            report.skipped.append(name)
        elif name not in wanted:
            part = name.partition("/")[0]
            (report.unused if part in asked else report.skipped).append(name)
    if with_optimizer and header.optimizer_steps is None:
        report.missing.append(f"{fmt.OPTIMIZER}_steps")
    return report


def _differences(
    name: str, stored: View, shape: tuple[int, ...], dtype: str, cast: bool
) -> list[str]:
    found = []
    if stored.shape != shape:
        found.append(
            f"'{name}' has shape {stored.shape} in the checkpoint and {shape} here"
        )
    if stored.dtype != dtype and not (cast and castable(stored.dtype, dtype)):
        remedy = " (dtype='cast' converts it)" if castable(stored.dtype, dtype) else ""
        found.append(
            f"'{name}' is {stored.dtype} in the checkpoint and {dtype} here{remedy}"
        )
    return found


def refuse_mismatch(
    report: LoadReport, stored: Mapping[str, View], wanted: Wanted
) -> None:
    """Raise a CheckpointError unless all that was wanted, and no more, was found."""
    reasons = []
    if report.missing:
        unclaimed = report.unused or list(stored)
        names = [_with_near(name, unclaimed) for name in report.missing]
        reasons.append(f"the checkpoint lacks {_listed(names)}")
    if report.unused:
        unmatched = report.missing or list(wanted)
        names = [_with_near(name, unmatched) for name in report.unused]
        reasons.append(f"the model has no place for {_listed(names)}")
    if report.errors:
        reasons.append(_listed(report.errors))
    if reasons:
        raise CheckpointError(
            f"{report.path} does not fit: {'; '.join(reasons)}. Nothing was loaded; "
            "build the model as it was saved, or pass strict=False to load what fits"
        )


def _with_near(name: str, candidates: Collection[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.8)
    return f"'{name}' (near: '{near[0]}')" if near else f"'{name}'"


def _listed(items: list[str]) -> str:
    shown = ", ".join(items[:_SHOWN])
    more = len(items) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
