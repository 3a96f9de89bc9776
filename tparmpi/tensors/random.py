"""Random numbers that do not depend on the layout.

Every number is a function of (seed, stream, step, global index), drawn from the
counter-based generator Philox4x64-10 (see `tparmpi.backend.random`). The stream is a
module's path and the number of its call; the index counts elements of the *global
batch*, so that microbatches, accumulation and data parallelism change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from tparmpi.tensors.spec import Spec

Key = tuple[int, int]
Rows = Sequence[tuple[int, int]]


def stream_key(*parts: int | str) -> Key:
    """Return the generator's key for a stream named by `parts`. Local."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


class scope:
    """Context that fixes what random operators draw.

    Parameters
    ----------
    seed, step
        Parts of every stream's name.
    rows
        Which rows of the global batch the rows of tensors are, for a part of it such as
        a microbatch: runs of (first row, number of rows), in order, the same on all
        ranks. None, or of other length than the tensor: the tensor's own rows.

    Entering restarts the numbering of calls, so that the same calls draw the same
    numbers.
    """

    def __init__(self, seed: int = 0, step: int = 0, rows: Rows | None = None) -> None:
        self.seed = seed
        self.step = step
        self.rows = None if rows is None else tuple(rows)
        self.calls: dict[str, int] = {}
        self.unnamed = ""

    def __enter__(self) -> scope:
        self.calls.clear()
        _scopes.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _scopes.pop()

    def next_key(self, stream: str) -> Key:
        """Return the key of the next call on `stream`."""
        stream = stream or self.unnamed
        call = self.calls.get(stream, 0)
        self.calls[stream] = call + 1
        return stream_key(self.seed, stream, call, self.step)


_scopes = [scope()]


def current() -> scope:
    """Return the innermost scope; outside of any, one with seed 0 and step 0."""
    return _scopes[-1]


class unnamed:
    """Context that names the streams of random operators that are given none.

    A layer draws the same numbers wherever the layers before it are.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._scope = current()
        self._before = self._scope.unnamed
        self._scope.unnamed = self._stream

    def __exit__(self, *_: object) -> None:
        self._scope.unnamed = self._before


State = tuple[int, int, "Rows | None", dict[str, int], str]


def state() -> State:
    """Return what the next numbers drawn depend on, for `replay`. Local."""
    now = current()
    return now.seed, now.step, now.rows, dict(now.calls), now.unnamed


class replay:
    """Context in which the numbers that followed a `state` are drawn once more."""

    def __init__(self, state: State) -> None:
        seed, step, rows, calls, stream = state
        self._scope = scope(seed, step, rows)
        self._scope.calls = dict(calls)
        self._scope.unnamed = stream

    def __enter__(self) -> None:
        _scopes.append(self._scope)

    def __exit__(self, *_: object) -> None:
        _scopes.pop()


def keep_mask(key: Key, spec: Spec, p: float, rows: Rows | None) -> Any:
    """Return this rank's block of a mask that is False with probability `p`. Local.

    Parameters
    ----------
    rows
        See `scope`.
    """
    backend = spec.place.backend
    start, extent, shape = spec.local_offset, spec.local_shape, spec.shape
    if not shape or rows is None or sum(count for _, count in rows) != shape[0]:
        return backend.random_keep(key, shape, start, extent, p)
    parts = []
    for first, count in _within(rows, start[0], extent[0]):
        parts.append(
            backend.random_keep(
                key,
                (first + count, *shape[1:]),
                (first, *start[1:]),
                (count, *extent[1:]),
                p,
            )
        )
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return backend.random_keep(key, shape, start, extent, p)
    return backend.xp.concatenate(parts)


def _within(rows: Rows, start: int, extent: int) -> Iterator[tuple[int, int]]:
    """The runs of the rows number `start` to ``start + extent`` of `rows`."""
    for first, count in rows:
        skipped = min(start, count)
        taken = min(extent, count - skipped)
        if taken > 0:
            yield first + skipped, taken
        start -= skipped
        extent -= taken


def draw(
    distribution: str,
    seed: int,
    name: str,
    spec: Spec,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Any:
    """Return this rank's block of initial values for the tensor called `name`. Local.

    The same on every layout, bit for bit.

    Parameters
    ----------
    distribution
        ``"normal"`` (mean 0, deviation 1) or ``"uniform"`` (over 0 to 1).
    scale, shift
        The values are multiplied by `scale`, then `shift` is added.
    """
    backend = spec.place.backend
    function = {"normal": backend.random_normal, "uniform": backend.random_uniform}
    array = function[distribution](
        stream_key(seed, "initial", name),
        spec.shape,
        spec.local_offset,
        spec.local_shape,
        spec.dtype,
    )
    array *= scale
    array += shift
    return array
