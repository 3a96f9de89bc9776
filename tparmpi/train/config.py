"""The keys of a run's configuration: defaults, limits, and what a resume may change.

Each key is a field of one of the five sections below; everything else (parsing,
environment names, error messages, the help text) is derived from these fields.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tparmpi.errors import CheckpointError, UsageError

ENVIRONMENT_PREFIX = "TPARMPI_"

SAME = "same"
"""A resume must give the same value: the key changes the mathematics of the run."""
FREE = "free"
"""A resume may give another value: layout, length, intervals."""
CONTENT = "content"
"""A resume may give another path, the text found there must be the same."""


LARGEST = 2**63 - 1
"""The largest whole number that a checkpoint and a TOML file hold."""


def _key(
    default: Any,
    about: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    refusal: Callable[[Any], str | None] | None = None,
    resume: str = SAME,
) -> Any:
    limits = Limits(at_least, at_most, above, below, choices, refusal)
    metadata = {"about": about, "limits": limits, "resume": resume}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Limits:
    """What a key's value may be, beyond its type."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    refusal: Callable[[Any], str | None] | None = None
    """What is wrong with a value, where it takes more to say so."""

    def complaint(self, value: Any) -> str | None:
        """What is wrong with `value`, as the end of a sentence, or None. Local."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        texts = [value] if isinstance(value, str) else value
        for text in texts if isinstance(texts, list | dict) else ():
            if wrong := _complaint_about_text(text):
                return wrong
        if self.refusal is not None:
            return self.refusal(value)
        if self.choices is not None and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most}"
        if isinstance(value, int) and value > LARGEST:
            return f"must be at most {LARGEST}"
        if self.above is not None and value <= self.above:
            return f"must be more than {self.above}"
        if self.below is not None and value >= self.below:
            return f"must be less than {self.below}"
        return None


def _complaint_about_text(text: str) -> str | None:
    if not text:
        return "must not be empty"
    if "\0" in text:
        return "must not hold a null character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must be UTF-8, so that it can be recorded: give it another name"
    return None


def _complaint_about_compression(value: Any) -> str | None:
    # The command's help, and most runs, do without this room.
    from tparmpi.io.chunked import Levels

    try:
        Levels(value)
    except CheckpointError as error:
        return str(error).removeprefix("compression ")
    return None


@dataclass(frozen=True)
class ModelSection:
    """The model: what is trained."""

    kind: str = _key("gpt", "kind of model")
    n_layer: int = _key(4, "hidden layers", at_least=1, at_most=100_000)
    d_model: int = _key(128, "width of the residual stream", at_least=1)
    d_ff: int | None = _key(
        None, "width inside the MLP (default 4 * d_model)", at_least=1
    )
    n_head: int = _key(8, "attention heads", at_least=1)
    seq_len: int = _key(64, "context length in tokens", at_least=1)
    vocab_size: int = _key(256, "vocabulary; bytes need 256", at_least=256)
    dropout: float = _key(0.0, "dropout probability", at_least=0.0, below=1.0)
    tied: bool = _key(True, "one matrix for the token embedding and the output")


@dataclass(frozen=True)
class DataSection:
    """The text that is read."""

    train: str = _key(
        "stdlib",
        "text file, folder, glob, or 'stdlib' (the running Python's sources)",
        resume=CONTENT,
    )
    validation: str | None = _key(
        None, "text to validate on (default: a held-out part)", resume=CONTENT
    )


@dataclass(frozen=True)
class ParallelSection:
    """How the ranks share the work; never changes what is computed."""

    tp: int | None = _key(
        None,
        "ranks that split each layer (default: all, where heads allow)",
        at_least=1,
        resume=FREE,
    )
    dp: int | None = _key(
        None, "ranks that split the batch (default: the rest)", at_least=1, resume=FREE
    )
    pp: int = _key(
        1,
        "groups of ranks that have some of the layers each",
        at_least=1,
        resume=FREE,
    )
    schedule: str = _key(
        "1f1b",
        "order of the pp stages' work: gpipe, 1f1b, interleaved or zero_bubble",
        choices=("gpipe", "1f1b", "interleaved", "zero_bubble"),
        resume=FREE,
    )
    chunks: int = _key(
        2,
        "parts of the layers that each stage has, if interleaved",
        at_least=1,
        resume=FREE,
    )
    recompute: bool = _key(
        False,
        "run each stage's forward again in its backward, instead of keeping it",
        resume=FREE,
    )
    sequence: bool = _key(
        False,
        "tp ranks split norms, dropout and residuals by tokens",
        resume=FREE,
    )
    fully_sharded: bool = _key(
        False,
        "dp ranks store pieces of weights and optimizer state, gathered for use",
        resume=FREE,
    )
    microbatches: int = _key(
        1,
        "pieces each batch is accumulated from",
        at_least=1,
        at_most=1_000_000,
        resume=FREE,
    )


@dataclass(frozen=True)
class TrainSection:
    """The optimization."""

    steps: int = _key(
        2000, "optimizer steps in all", at_least=1, at_most=10**18 - 1, resume=FREE
    )
    batch_size: int = _key(
        16, "samples in each global batch", at_least=1, at_most=2**40
    )
    lr: float = _key(2e-3, "peak learning rate", above=0.0)
    lr_schedule: str = _key(
        "cosine",
        "learning rate after the warm-up: cosine (down to a tenth) or constant",
        choices=("cosine", "constant"),
    )
    warmup: int = _key(100, "steps of linear warm-up", at_least=0)
    weight_decay: float = _key(0.1, "decoupled weight decay", at_least=0.0)
    grad_clip: float = _key(
        1.0, "largest global gradient norm (0: no clipping)", at_least=0.0
    )
    precision: str = _key(
        "float32", "number type of all values", choices=("float32", "float64")
    )
    seed: int = _key(0, "seed of values, dropout and data order", at_least=0)
    eval_every: int = _key(
        500,
        "steps between validations (0: only after the last step)",
        at_least=0,
        resume=FREE,
    )


@dataclass(frozen=True)
class CheckpointSection:
    """When the run is saved, and how much of it stays."""

    every: int = _key(
        500,
        "steps between checkpoints (0: only after the last step)",
        at_least=0,
        resume=FREE,
    )
    keep: int = _key(2, "newest checkpoints kept (0: all)", at_least=0, resume=FREE)
    keep_every: int = _key(
        0,
        "checkpoints at multiples of so many steps stay for good (0: none)",
        at_least=0,
        resume=FREE,
    )
    keep_best: bool = _key(
        True, "the checkpoint of the lowest validation loss stays", resume=FREE
    )
    background: bool = _key(
        False,
        "go on training while a copy of the state is written",
        resume=FREE,
    )
    compression: str | int | Mapping[str, str | int] = _key(
        "none",
        "gzip, a level of it from 1 to 9, or none; or a table of these by patterns",
        refusal=_complaint_about_compression,
        resume=FREE,
    )


@dataclass(frozen=True)
class RunConfig:
    """A run's whole configuration.

    `train.steps` may change between two starts of one run; a cosine schedule then
    follows the new number from the step where the run resumes.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    parallel: ParallelSection = ParallelSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()

    def get(self, name: str) -> Any:
        """The value of a key by its dotted name. Local."""
        section, key = name.split(".")
        return getattr(getattr(self, section), key)

    def replace(self, values: Mapping[str, Any]) -> RunConfig:
        """A copy with the given keys (dotted names) changed. Local."""
        by_section: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, key = name.split(".")
            by_section.setdefault(section, {})[key] = value
        sections = {
            section: dataclasses.replace(getattr(self, section), **changes)
            for section, changes in by_section.items()
        }
        return dataclasses.replace(self, **sections)

    def resolved(self) -> RunConfig:
        """A copy in which defaults that follow other keys have their values. Local."""
        if self.model.d_ff is not None:
            return self
        return self.replace({"model.d_ff": 4 * self.model.d_model})

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Sections of keys, as TOML holds them: keys without a value are left out."""
        return {
            section: {name: value for name, value in keys.items() if value is not None}
            for section, keys in dataclasses.asdict(self).items()
        }


@dataclass(frozen=True)
class Key:
    """One key of the configuration, as the tables and messages need it."""

    section: str
    key: str
    types: tuple[type, ...]
    optional: bool
    default: Any
    about: str
    limits: Limits
    resume: str

    @property
    def type(self) -> type:
        """The type of its values, the first where it takes several."""
        return self.types[0]

    @property
    def name(self) -> str:
        """The dotted name, `model.n_layer`."""
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        """The environment variable, `TPARMPI_MODEL_N_LAYER`."""
        return f"{ENVIRONMENT_PREFIX}{self.section}_{self.key}".upper()


def _keys() -> Iterator[Key]:
    for section, section_type in typing.get_type_hints(RunConfig).items():
        hints = typing.get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            hint = hints[field.name]
            several = isinstance(hint, types.UnionType)
            hinted = typing.get_args(hint) if several else (hint,)
            found = tuple(map(_plain, hinted))
            yield Key(
                section,
                field.name,
                tuple(kind for kind in found if kind is not types.NoneType),
                types.NoneType in found,
                field.default,
                **field.metadata,
            )


def _plain(hint: Any) -> type:
    """The type that TOML gives to what is hinted so."""
    found: type = dict if typing.get_origin(hint) is Mapping else hint
    return found


KEYS: Mapping[str, Key] = {key.name: key for key in _keys()}
"""Every key by its dotted name, in the order of the sections."""
SECTIONS: tuple[str, ...] = tuple(typing.get_type_hints(RunConfig))


def check_samples(config: RunConfig) -> None:
    """Refuse a run that would read more samples than can be counted. Local.

    Raises
    ------
    UsageError
        Naming both keys.
    """
    steps, batch_size = config.train.steps, config.train.batch_size
    if steps * batch_size > LARGEST:
        raise UsageError(
            f"train.steps ({steps}) times train.batch_size ({batch_size}) must be at "
            f"most {LARGEST}: give fewer of one"
        )


def check_resumable(asked: RunConfig, recorded: RunConfig, folder: str) -> None:
    """Refuse to resume a run with other mathematics than it began with. Local.

    Raises
    ------
    UsageError
        Naming the first key that differs and may not, with both values.
    """
    asked, recorded = asked.resolved(), recorded.resolved()
    changed = [
        key.name
        for key in KEYS.values()
        if key.resume == SAME and asked.get(key.name) != recorded.get(key.name)
    ]
    if not changed:
        return
    first, *others = changed
    also = f" (and other {', '.join(others)})" if others else ""
    raise UsageError(
        f"{first} is {asked.get(first)!r} but the run in {folder} began with "
        f"{recorded.get(first)!r}{also}: give "
        "what it began with to resume it, or another folder with --run"
    )
