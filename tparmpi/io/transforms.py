"""How another program's tensors become this one's: renamed, split, merged, turned.

Names are those of parameters, with dots: ``blocks.0.attn.q.weight``, and for an
optimizer's tensors ``blocks.0.attn.q.weight.m``. Pure: nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.views import Joined, Permuted, Rows, Unflattened, View

Views = dict[str, View]
Renames = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]


class Transform(Protocol):
    """Takes some named tensors out and puts others in."""

    def apply(self, views: Mapping[str, View]) -> Views:
        """The tensors that are there afterwards; the same ones if nothing matches."""


@dataclass(frozen=True)
class Split:
    r"""One stored tensor becomes several, as fused projections do.

    Parameters
    ----------
    pattern : str
        A regular expression that a name must match whole.
    targets : sequence of str
        The parts' names, with the pattern's groups: ``r"blocks.\1.attn.q.weight"``.
    dim : int, default 0
    groups : int, default 1
        Into how many equal groups the dim falls, each with its own piece of every part:
        the number of heads where each head has its query, key and value beside each
        other.
    sizes : sequence of int, optional
        Indices of each part in one group; equal ones by default.
    """

    pattern: str
    targets: Sequence[str]
    dim: int = 0
    groups: int = 1
    sizes: Sequence[int] | None = None

    def apply(self, views: Mapping[str, View]) -> Views:
        """The tensors that are there afterwards."""
        result: Views = {}
        for name, view in views.items():
            match = _match(self.pattern, name)
            if match is None:
                _put(result, name, view)
                continue
            dim = _dim(self, name, view, self.dim)
            group = _divide(self, name, view.shape[dim], self.groups)
            sizes = self.sizes
            if sizes is None:
                equal = _divide(self, name, group, len(self.targets))
                sizes = [equal] * len(self.targets)
            if len(sizes) != len(self.targets) or sum(sizes) != group:
                raise CheckpointError(
                    f"{self} does not fit '{name}': its sizes must be "
                    f"{len(self.targets)} numbers that add up to {group}"
                )
            grid = np.arange(view.shape[dim]).reshape(self.groups, group)
            parts = np.split(grid, np.cumsum(sizes)[:-1], axis=1)
            for target, index in zip(self.targets, parts, strict=True):
                part = Rows(view, dim, index.reshape(-1))
                _put(result, _expand(match, target), part)
        return result


@dataclass(frozen=True)
class Merge:
    """Several stored tensors become one, side by side along a dim.

    Parameters
    ----------
    patterns : sequence of str
        One regular expression for each part, in order; tensors whose `target` is the
        same belong together.
    target : str
        The whole's name, with the groups of its parts' patterns.
    dim : int, default 0
    groups : int, default 1
        Into how many groups the result falls, each with its piece of every part.
    """

    patterns: Sequence[str]
    target: str
    dim: int = 0
    groups: int = 1

    def apply(self, views: Mapping[str, View]) -> Views:
        """The tensors that are there afterwards."""
        result: Views = {}
        found: dict[str, dict[int, str]] = {}
        for name, view in views.items():
            for number, pattern in enumerate(self.patterns):
                match = _match(pattern, name)
                if match is not None:
                    parts = found.setdefault(_expand(match, self.target), {})
                    if number in parts:
                        raise CheckpointError(
                            f"{self}: '{parts[number]}' and '{name}' are both part "
                            f"{number} of one tensor"
                        )
                    parts[number] = name
                    break
            else:
                _put(result, name, view)
        for target, parts in found.items():
            absent = [p for n, p in enumerate(self.patterns) if n not in parts]
            if absent:
                raise CheckpointError(
                    f"{self}: '{target}' lacks the part that matches {absent[0]!r}"
                )
            names = [parts[number] for number in range(len(self.patterns))]
            _put(result, target, self._joined(names, [views[name] for name in names]))
        return result

    def _joined(self, names: Sequence[str], parts: Sequence[View]) -> View:
        first = parts[0]
        dim = _dim(self, names[0], first, self.dim)
        for name, part in zip(names, parts, strict=True):
            rest = [(*p.shape[:dim], *p.shape[dim + 1 :]) for p in (first, part)]
            if part.dtype != first.dtype or rest[0] != rest[1]:
                raise CheckpointError(
                    f"{self}: '{names[0]}' is {first.dtype} {first.shape} and '{name}' "
                    f"{part.dtype} {part.shape}; merged tensors differ in dim {dim} "
                    "alone"
                )
        joined = Joined(tuple(parts), dim)
        if self.groups == 1:
            return joined
        pieces, begin = [], 0
        for name, part in zip(names, parts, strict=True):
            size = _divide(self, name, part.shape[dim], self.groups)
            end = begin + part.shape[dim]
            pieces.append(np.arange(begin, end).reshape(self.groups, size))
            begin = end
        return Rows(joined, dim, np.concatenate(pieces, axis=1).reshape(-1))


@dataclass(frozen=True)
class Transpose:
    """A stored tensor's dims in another order.

    Parameters
    ----------
    pattern : str
        A regular expression that a name must match whole.
    axes : sequence of int, optional
        As for ``numpy.transpose``; reversed by default.
    """

    pattern: str
    axes: Sequence[int] | None = None

    def apply(self, views: Mapping[str, View]) -> Views:
        """The tensors that are there afterwards."""
        result: Views = {}
        for name, view in views.items():
            if _match(self.pattern, name) is not None:
                ndim = len(view.shape)
                axes = tuple(reversed(range(ndim)) if self.axes is None else self.axes)
                if sorted(axes) != list(range(ndim)):
                    raise CheckpointError(
                        f"{self} does not fit '{name}', whose shape is {view.shape}"
                    )
                view = Permuted(view, axes)
            _put(result, name, view)
        return result


@dataclass(frozen=True)
class Unflatten:
    """One dim of a stored tensor becomes several: heads and their widths.

    Parameters
    ----------
    pattern : str
        A regular expression that a name must match whole.
    dim : int
    sizes : sequence of int
        The new dims' sizes, whose product is the old one's.
    """

    pattern: str
    dim: int
    sizes: Sequence[int]

    def apply(self, views: Mapping[str, View]) -> Views:
        """The tensors that are there afterwards."""
        result: Views = {}
        for name, view in views.items():
            if _match(self.pattern, name) is not None:
                dim = _dim(self, name, view, self.dim)
                if (
                    min(self.sizes, default=0) < 1
                    or prod(self.sizes) != view.shape[dim]
                ):
                    raise CheckpointError(
                        f"{self} does not fit '{name}': the product of its sizes must "
                        f"be {view.shape[dim]}"
                    )
                view = Unflattened(view, dim, tuple(self.sizes))
            _put(result, name, view)
        return result


@dataclass(frozen=True)
class Interleave:
    """Within each group of a dim, parts that follow each other become interleaved.

    With ``groups`` heads and 2 parts, a head's first and second half become pairs of
    neighbours, the other convention for rotary positions; with half a head's width as
    `parts` it goes the other way.

    Parameters
    ----------
    pattern : str
        A regular expression that a name must match whole.
    groups : int
    parts : int, default 2
    dim : int, default 0
    """

    pattern: str
    groups: int
    parts: int = 2
    dim: int = 0

    def apply(self, views: Mapping[str, View]) -> Views:
        """The tensors that are there afterwards."""
        result: Views = {}
        for name, view in views.items():
            if _match(self.pattern, name) is not None:
                dim = _dim(self, name, view, self.dim)
                group = _divide(self, name, view.shape[dim], self.groups)
                rest = _divide(self, name, group, self.parts)
                rows = np.arange(view.shape[dim])
                grid = rows.reshape(self.groups, self.parts, rest)
                view = Rows(view, dim, grid.transpose(0, 2, 1).reshape(-1))
            _put(result, name, view)
        return result


@dataclass(frozen=True)
class Drop:
    """Stored tensors are left out, as other programs' masks and counters are.

    Unlike the others it may match nothing.

    Parameters
    ----------
    pattern : str
        A regular expression that a name must match whole.
    """

    pattern: str

    def apply(self, views: Mapping[str, View]) -> Views:
        """The tensors that are there afterwards."""
        return {n: v for n, v in views.items() if _match(self.pattern, n) is None}


def arrange(
    views: Mapping[str, View], transforms: Sequence[Transform], remap: Renames
) -> Views:
    """Apply transforms, in order, and then renames to tensors by their paths. Pure.

    Raises
    ------
    CheckpointError
        A pattern is no regular expression, a transform matches no tensor or one that it
        does not fit, or two tensors would have one name.
    """
    result: Views = {}
    matched = [False] * len(transforms)
    for part in (fmt.MODEL, fmt.OPTIMIZER):
        named = {
            path.removeprefix(f"{part}/").replace("/", "."): view
            for path, view in views.items()
            if path.startswith(f"{part}/")
        }
        for number, transform in enumerate(transforms):
            changed = transform.apply(named)
            same = changed.keys() == named.keys() and all(
                changed[name] is named[name] for name in named
            )
            matched[number] |= not same
            named = changed
        renamed: Views = {}
        for name, view in named.items():
            _put(renamed, _renamed(name, remap), view)
        for name, view in renamed.items():
            path = f"{part}/{name.replace('.', '/')}"
            if not fmt.checked_name(path):
                raise CheckpointError(f"{name!r} is no name that a tensor can have")
            result[path] = view
    for transform, found in zip(transforms, matched, strict=True):
        if not found and not isinstance(transform, Drop):
            raise CheckpointError(
                f"{transform} matches no tensor; names have dots, and a pattern must "
                "match one whole"
            )
    return result


def _renamed(name: str, remap: Renames) -> str:
    for pattern, replacement in remap:
        try:
            name = re.sub(pattern, replacement, name)
        except (re.error, IndexError, TypeError) as error:
            raise CheckpointError(
                f"remap: {(pattern, replacement)!r} is no regular expression and its "
                f"replacement: {error}"
            ) from error
    return name


def _put(views: Views, name: str, view: View) -> None:
    if name in views:
        raise CheckpointError(
            f"two tensors of the checkpoint would both be called '{name}'; change "
            "remap or transforms so that each has its own name"
        )
    views[name] = view


def _match(pattern: str, name: str) -> re.Match[str] | None:
    try:
        return re.fullmatch(pattern, name)
    except re.error as error:
        raise CheckpointError(
            f"{pattern!r} is no regular expression: {error}"
        ) from error


def _expand(match: re.Match[str], target: str) -> str:
    try:
        return match.expand(target)
    except (re.error, IndexError) as error:
        raise CheckpointError(
            f"{target!r} does not go with {match.re.pattern!r}: {error}"
        ) from error


def _dim(transform: Transform, name: str, view: View, dim: int) -> int:
    ndim = len(view.shape)
    if not -ndim <= dim < ndim:
        raise CheckpointError(
            f"{transform} does not fit '{name}', whose shape is {view.shape}"
        )
    return dim % ndim


def _divide(transform: Transform, name: str, size: int, parts: int) -> int:
    if parts < 1 or size % parts:
        raise CheckpointError(
            f"{transform} does not fit '{name}': {size} is not {parts} equal parts"
        )
    return size // parts
