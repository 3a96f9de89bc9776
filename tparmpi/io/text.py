"""Text as bytes: which part is held out, which window is which sample.

Every text is a sequence of byte tokens (vocabulary 256). The order of samples is a
pure function of (seed, epoch, global sample number): nothing is counted or stored, so
a run resumed on any number of ranks reads exactly the samples that come next.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tparmpi.comm import long_work, world
from tparmpi.errors import DataError, counted
from tparmpi.io.text_files import Bytes, joined, place_of

Indices = npt.NDArray[np.uint64]

VOCABULARY = 256
HELD_OUT_PERIOD = 1 << 20
DEFAULT_HELD_OUT = 0.05

_FEISTEL_ROUNDS = 6


class TextData:
    """A training text and a held-out text, cut into windows of byte tokens.

    Parameters
    ----------
    source : str or Path
        A file, a folder (every text file below it, without run folders and what is
        hidden), a glob (without run folders), or ``"stdlib"``: the ``.py`` files of the
        running Python's standard library, without site-packages and tests.
    seq_len : int
        Tokens a sample is trained on; a sample holds ``seq_len + 1`` bytes, of which
        the first ``seq_len`` are inputs and the last ``seq_len`` are targets.
    validation : float, str, Path or None, default None
        A fraction in (0, 1) of the source to hold out, or a source of its own.
        None holds out 0.05.

    Raises
    ------
    DataError
        A source is missing, unreadable, or shorter than one sample; a fraction is
        outside (0, 1). On every rank alike.

    Notes
    -----
    Collective over all ranks: rank 0 reads the files, the others are sent the bytes,
    so that no rank can train on another text. Everything else is local.
    """

    def __init__(
        self,
        source: str | Path,
        seq_len: int,
        validation: float | str | Path | None = None,
    ) -> None:
        if seq_len < 1:
            raise DataError(f"a sample needs at least 1 token, seq_len is {seq_len}")
        text, size = _read_on_rank_zero(source)
        place = place_of(source)
        name = f"the text {place}"
        if validation is None or isinstance(validation, (int, float)):
            fraction = DEFAULT_HELD_OUT if validation is None else float(validation)
            train, held_out = hold_out(text, fraction)
            share = f"{100 * fraction:.3g} % of {counted(size, 'byte')}"
            held_name = f"the part of {place} held out for validation ({share})"
            held_size = len(held_out)
            if size > seq_len:
                name, size = f"what is left of {place} to train on", len(train)
        else:
            train = text
            held_out, held_size = _read_on_rank_zero(validation)
            held_name = f"the validation text {place_of(validation)}"
        self.seq_len = seq_len
        self.train = Windows(train, seq_len, name, size)
        self.validation = Windows(held_out, seq_len, held_name, held_size)

    @property
    def digest(self) -> str:
        """SHA-256 over both texts, in hexadecimal: equal for equal data. Local."""
        digest = hashlib.sha256()
        for windows in (self.train, self.validation):
            digest.update(len(windows.tokens).to_bytes(8, "little"))
            digest.update(windows.tokens.data)
        return digest.hexdigest()

    def batch(self, seed: int, sample_first: int, count: int) -> Bytes:
        """Training samples ``sample_first ... sample_first + count - 1``. Local.

        Parameters
        ----------
        seed : int
            Chooses the order.
        sample_first : int
            Global number of the first sample, counted from the start of the run.
        count : int
            How many, 0 or more.

        Returns
        -------
        ndarray of uint8, shape (count, seq_len + 1)
        """
        return self.train.batch(seed, sample_first, count)

    def validation_batches(
        self, batch_size: int, max_batches: int | None = None
    ) -> Iterator[Bytes]:
        """Held-out windows, each once, in a fixed order. Local.

        Parameters
        ----------
        batch_size : int
            Samples in a batch; the last batch may have fewer.
        max_batches : int or None, default None
            With a limit, the windows taken are spread evenly over the held-out text.

        Yields
        ------
        ndarray of uint8, shape (at most batch_size, seq_len + 1)
        """
        total = len(self.validation)
        wanted = total if max_batches is None else min(total, max_batches * batch_size)
        chosen = np.arange(wanted, dtype=np.int64) * total // max(wanted, 1)
        for first in range(0, wanted, batch_size):
            yield self.validation.take(chosen[first : first + batch_size])


class Windows:
    """One text cut into windows of ``seq_len + 1`` bytes that share only their ends.

    An epoch shifts all windows by a drawn offset and visits them in a drawn order.
    Both are computed, not stored: the order is a permutation by a keyed Feistel
    network, walked until it falls inside the range (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). ``len()`` is the number of samples in an epoch.

    Raises
    ------
    DataError
        The text is shorter than one sample.
    """

    def __init__(
        self,
        tokens: Bytes,
        seq_len: int,
        name: str = "the text",
        size: int | None = None,
    ) -> None:
        if len(tokens) < seq_len + 1:
            size = len(tokens) if size is None else size
            raise DataError(
                f"{name} has {counted(size, 'byte')}, one sample needs {seq_len + 1:,} "
                "(model.seq_len and the byte that follows); give more text or a "
                "smaller model.seq_len"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)
        # One window fewer than fit, so that most offsets leave the count unchanged.
        self._count = max(1, (len(tokens) - seq_len) // seq_len)
        self._offsets = min(seq_len, len(tokens) - self._count * seq_len)

    def __len__(self) -> int:
        return self._count

    def take(self, windows: npt.NDArray[np.int64]) -> Bytes:
        """Copy windows by number, without offset; shape (count, seq_len + 1)."""
        return self._windows[windows * self.seq_len]

    def batch(self, seed: int, sample_first: int, count: int) -> Bytes:
        """Copy samples by global number; see :meth:`TextData.batch`."""
        if sample_first < 0 or count < 0:
            raise DataError(
                f"samples {sample_first} ... + {count}: neither may be negative"
            )
        starts = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, position = divmod(sample_first + filled, self._count)
            taken = min(count - filled, self._count - position)
            starts[filled : filled + taken] = self._starts(seed, epoch, position, taken)
            filled += taken
        return self._windows[starts]

    def _starts(
        self, seed: int, epoch: int, position: int, count: int
    ) -> npt.NDArray[np.int64]:
        keys = _keys(seed, epoch)
        offset = int(keys[-1]) % self._offsets
        positions = np.arange(position, position + count, dtype=np.uint64)
        order = permuted(positions, self._count, keys[:-1]).astype(np.int64)
        return order * self.seq_len + offset


def permuted(positions: Indices, count: int, keys: Indices) -> Indices:
    """Where a keyed permutation of ``range(count)`` sends each position. Local."""
    half = np.uint64(math.isqrt(count - 1) + 1)
    result = _feistel(positions, half, keys)
    outside = np.flatnonzero(result >= count)
    while len(outside):
        result[outside] = _feistel(result[outside], half, keys)
        outside = outside[result[outside] >= count]
    return result


def _feistel(values: Indices, half: np.uint64, keys: Indices) -> Indices:
    """Permute ``range(half * half)``; the halves are digits to the base `half`."""
    left, right = np.divmod(values, half)
    for key in keys:
        left, right = right, (left + _mixed(right ^ key) % half) % half
    return left * half + right


def _mixed(values: Indices) -> Indices:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> Indices:
    digest = hashlib.blake2b(
        f"sample order {seed} {epoch}".encode(), digest_size=8 * (_FEISTEL_ROUNDS + 1)
    )
    return np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64)


def hold_out(text: Bytes, fraction: float) -> tuple[Bytes, Bytes]:
    """Split a text into a training part and a held-out part. Local.

    The text is cut into equal periods of about 1 MiB (one, if it is shorter), and the
    last ``fraction`` of each period is held out: both parts then resemble each other,
    which the mere tail of a sorted list of files does not.

    Parameters
    ----------
    text : ndarray of uint8, shape (bytes,)
    fraction : float
        In (0, 1).

    Returns
    -------
    train, held_out : ndarray of uint8

    Raises
    ------
    DataError
        The fraction is outside (0, 1).
    """
    if not 0.0 < fraction < 1.0:
        raise DataError(
            f"the held-out fraction must lie between 0 and 1, it is {fraction:g}"
        )
    periods = max(1, len(text) // HELD_OUT_PERIOD)
    bounds = [len(text) * i // periods for i in range(periods + 1)]
    kept, held = [], []
    for first, end in itertools.pairwise(bounds):
        cut = end - round(fraction * (end - first))
        kept.append(text[first:cut])
        held.append(text[cut:end])
    return np.concatenate(kept), np.concatenate(held)


def _read_on_rank_zero(source: str | Path) -> tuple[Bytes, int]:
    """Every rank's copy of the tokens, and the bytes that the files have."""
    everyone = world()
    text: Bytes | None = None
    size = 0
    problem: str | None = None
    if everyone.rank == 0:
        try:
            with long_work(f"read {source}"):
                text, size = joined(source)
        except DataError as error:
            problem = str(error)
    problem, size = everyone.broadcast_object((problem, size))
    if problem is not None:
        raise DataError(problem)
    tokens: Bytes = everyone.broadcast(text)
    return tokens, size
