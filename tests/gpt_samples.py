"""A GPT in plain NumPy, and how tests train one on any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import tparmpi as tpm
from tparmpi.models import GPT, GPTConfig, GPTLayout
from tparmpi.models.gpt_layout import TENSOR_PARALLEL
from tparmpi.optim import AdamW, clip_norm
from tparmpi.parallel import reduce_gradients
from tparmpi.parallel.microbatches import rows_of
from tparmpi.sharding import Shard

CONFIG = GPTConfig(
    n_layer=2, d_model=40, n_head=8, seq_len=12, vocab_size=53, d_ff=51, dropout=0.0
)
"""Sizes of which most do not divide by 2, 3 or 4."""

BATCH = 3


def samples(step: int, config: GPTConfig = CONFIG, batch: int = BATCH) -> np.ndarray:
    """Random tokens of a batch, with the one after: (B, T + 1)."""
    rng = np.random.default_rng(step)
    return rng.integers(0, config.vocab_size, (batch, config.seq_len + 1))


def reference_loss(
    values: Mapping[str, np.ndarray],
    config: GPTConfig,
    tokens: np.ndarray,
    targets: np.ndarray,
) -> float:
    """The mean loss in nats, without dropout, from parameters by name."""
    x = values["input.tokens.weight"][tokens]
    x = x + values["input.positions"][: tokens.shape[1]]
    for layer in range(config.n_layer):
        own = {
            name.removeprefix(f"blocks.{layer}."): value
            for name, value in values.items()
            if name.startswith(f"blocks.{layer}.")
        }
        x = x + _attention(own, _norm(x, own, "attn_norm"))
        x = x + _mlp(own, _norm(x, own, "mlp_norm"))
    table = values.get("output.weight", values["input.tokens.weight"])
    logits = _norm(x, values, "output.norm") @ table.T
    logits = logits - logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return float((np.log(np.exp(logits).sum(-1)) - chosen).mean())


def _norm(x: np.ndarray, values: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * values[f"{name}.gain"] + values[f"{name}.bias"]


def _attention(values: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    q, k, v = (
        np.einsum("btd,dhe->bhte", x, values[f"attn.{name}.weight"])
        + values[f"attn.{name}.bias"][:, None, :]
        for name in "qkv"
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = np.einsum("bhte,hed->btd", weights @ v, values["attn.out.weight"])
    return y + values["attn.out.bias"]


def _mlp(values: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    h = x @ values["mlp.up.weight"] + values["mlp.up.bias"]
    h = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return h @ values["mlp.down.weight"] + values["mlp.down.bias"]


@dataclass
class Run:
    """How a model is trained; a place without an axis ``dp`` has the whole batch."""

    config: GPTConfig = CONFIG
    batch: int = BATCH
    microbatches: int = 1
    dtype: str = "float64"
    seed: int = 3
    layout: GPTLayout = TENSOR_PARALLEL

    def model(self, place: tpm.Device | tpm.Group | tpm.Mesh) -> GPT:
        """Make the model on the place's autodiff view, with its initial values."""
        model = GPT(self.config, place.autodiff(), layout=self.layout, dtype=self.dtype)
        return model.initialize(self.seed)

    def backward(self, model: GPT, step: int) -> float:
        """Accumulate the gradients of one batch; return its mean loss. Collective."""
        data = samples(step, self.config, self.batch)
        place = model.input.positions.device
        total = 0.0
        for runs, here in self._microbatches(place):
            first, count = runs[here]
            rows = sum(count for _, count in runs)
            part = data[first : first + count]
            by_axis = {"dp": Shard(0)} if "dp" in place.axes else {}
            shape = (rows, self.config.seq_len)
            tokens, targets = (
                tpm.from_local(half, place, shape=shape, **by_axis)
                for half in (part[:, :-1], part[:, 1:])
            )
            with tpm.no_implicit_gather(), tpm.random.scope(7, step, rows=runs):
                losses = tpm.cross_entropy(model(tokens), targets).sum()
                loss = losses / (self.batch * self.config.seq_len)
                loss.backward()
            if place.is_member:
                total += loss.item()
        reduce_gradients(model.parameters(), bucket_bytes=10_000)
        return total

    def _microbatches(self, place: Any) -> Iterator[tuple[list[tuple[int, int]], int]]:
        """First row and number of rows on each member, and this rank's number."""
        axis = place.axes.index("dp") if "dp" in place.axes else None
        members = 1 if axis is None else place.shape[axis]
        here = 0 if axis is None else place.coordinates[axis]
        for number in range(self.microbatches):
            yield rows_of(self.batch, [members], self.microbatches, number), here

    def train(self, place: tpm.Device | tpm.Group | tpm.Mesh, steps: int) -> Trained:
        """Train with AdamW and clipping. Collective over the place."""
        trained = self.start(place)
        for step in range(steps):
            self.advance(trained, step)
        return trained

    def start(self, place: tpm.Device | tpm.Group | tpm.Mesh) -> Trained:
        """Make a model and its optimizer."""
        model = self.model(place)
        return Trained(model, AdamW(model.named_parameters(), lr=1e-2))

    def advance(self, trained: Trained, step: int) -> None:
        """Do one step. Collective over the place."""
        model = trained.model
        trained.losses.append(self.backward(model, step))
        norm, scale = clip_norm(model.parameters(), 1.0)
        trained.norms.append(norm)
        trained.optimizer.step(scale=scale)
        model.zero_grad()


@dataclass
class Trained:
    """A model after some steps, and what they gave."""

    model: GPT
    optimizer: AdamW
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def with_dropout(config: GPTConfig = CONFIG) -> GPTConfig:
    """The same model with dropout."""
    return replace(config, dropout=0.2)
