"""Text from a trained model, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tparmpi as tpm
from tparmpi import backend, comm
from tparmpi.errors import CheckpointError, RunFolderError, UsageError
from tparmpi.train.layout import choose_layout
from tparmpi.train.model import build_model, memory_for
from tparmpi.train.newest import load_newest
from tparmpi.train.ranks import from_rank_zero
from tparmpi.train.run_folder import RunFolder

_BYTES = 256


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Raises
    ------
    UsageError
        A negative number of tokens or temperature.
    """

    max_tokens: int = 200
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise UsageError(
                f"--max-tokens is {self.max_tokens}, it cannot be negative"
            )
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(
                f"--temperature is {self.temperature:g}, it must be 0 or a positive "
                "number"
            )

    def choose(self, logits: np.ndarray, index: int) -> int:
        """Token number `index` of the text, from logits (V,) in float64. Local.

        A function of the arguments and the seed only. Temperature 0 takes the first of
        the likeliest.
        """
        if self.temperature == 0.0:
            return int(np.argmax(logits))
        # A tiny temperature makes the unlikely ones infinitely so, which is what it
        # shall do.
        with np.errstate(over="ignore"):
            scaled = (logits - logits.max()) / self.temperature
        cumulative = np.cumsum(np.exp(scaled))
        key = tpm.random.stream_key(self.seed, "generate")
        (drawn,) = backend.get("cpu").random_uniform(
            key, (index + 1,), (index,), (1,), np.dtype("float64")
        )
        return int(np.searchsorted(cumulative, drawn * cumulative[-1], side="right"))


def generate(
    path: Path, prompt: str, sampling: Sampling, note: Callable[[str], None]
) -> Iterator[str]:
    """Yield the prompt and what the model in run folder `path` adds to it, in pieces.

    Every piece is the same on every rank. The model sees the last `seq_len` tokens.
    `note` is given a sentence about each checkpoint that is damaged and newer than the
    one that is taken. Collective over all ranks, as is each step of the iterator.

    Raises
    ------
    RunFolderError
        There is no run, or it has no checkpoint yet.
    CheckpointError
        It cannot be loaded, or gives no finite numbers.
    UsageError
        An empty prompt.
    """
    tokens = list(prompt.encode("utf-8", errors="surrogateescape"))
    if not tokens:
        raise UsageError("--prompt is empty: give at least one character to go on from")
    folder = RunFolder(path)
    config = from_rank_zero(folder.read_config)
    layout = choose_layout(comm.world().size, config.model.n_head, tp=None, dp=None)
    mesh = tpm.mesh(dp=layout.dp, tp=layout.tp)
    model = build_model(config, mesh)
    with memory_for(model, 1, "this model"):
        newest = load_newest(folder.checkpoints, model)
    if newest.report is None:
        raise RunFolderError(
            f"{path} has no checkpoint yet: give `tparmpi train` the time to save one"
        )
    for text in newest.notes:
        note(text)
    model.eval()

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    yield decoder.decode(bytes(tokens))
    for index in range(sampling.max_tokens):
        window = np.array([tokens[-config.model.seq_len :]], dtype=np.int64)
        # A model whose numbers ran away is told so in a sentence.
        with np.errstate(all="ignore"):
            logits = model(tpm.tensor(window, mesh))
        *_, last = logits.split(sizes=(window.size - 1, 1), dim=1)
        odds = last.numpy().reshape(-1)[:_BYTES].astype(np.float64)
        if not np.isfinite(odds).all():
            raise CheckpointError(
                f"the model in {path} gives no finite numbers: it was trained until "
                "they ran away; train another with a smaller train.lr"
            )
        # Replicas of different hosts may round differently; one choice holds for all.
        token = comm.world().broadcast_object(sampling.choose(odds, index))
        tokens.append(token)
        yield decoder.decode(bytes([token]))
    yield decoder.decode(b"", final=True)
