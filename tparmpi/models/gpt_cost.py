"""What a step of a GPT costs one rank: its matrix products and its memory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tparmpi.backend.numpy_attention import kept_bytes
from tparmpi.models.gpt import GPTConfig
from tparmpi.sharding import chunk_sizes


class Product(NamedTuple):
    """A matrix product, (rows, inner) by (inner, columns)."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Its multiplications and additions."""
        return 2 * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class GPTPart:
    """What one rank has of a GPT.

    Attributes
    ----------
    config
        Of the whole model.
    blocks
        Number of hidden layers.
    has_input, has_output
        Whether those layers are among its.
    members, member
        Over how many ranks the layers are split, and which one this is.
    sequence
        Whether norms and residuals have their tokens split over those ranks too; see
        `GPTLayout.sequence`.
    """

    config: GPTConfig
    blocks: int
    has_input: bool = True
    has_output: bool = True
    members: int = 1
    member: int = 0
    sequence: bool = False

    def maps(self) -> Iterator[tuple[int, int]]:
        """Yield the (inputs, outputs) of each linear map, those of attention included.

        Attention's own products, of queries with keys and of weights with values, are
        no linear maps.
        """
        config, width = self.config, self.config.d_model
        heads = self._own(config.n_head) * (width // config.n_head)
        assert config.d_ff is not None
        inner = self._own(config.d_ff)
        for _ in range(self.blocks):
            yield from 3 * [(width, heads)]
            yield (heads, width)
            yield (width, inner)
            yield (inner, width)
        if self.has_output:
            yield (width, self._own(config.vocab_size))

    def products(self, tokens: int, *, trains: bool = True) -> Counter[Product]:
        """Return how often each product is made for so many tokens.

        A map of the forward, and if `trains` those of its input's and of its weight's
        gradient.
        """
        counts: Counter[Product] = Counter()
        for inputs, outputs in self.maps():
            counts[Product(tokens, inputs, outputs)] += 1
            if trains:
                counts[Product(tokens, outputs, inputs)] += 1
                counts[Product(inputs, tokens, outputs)] += 1
        return counts

    def activation_bytes(self, rows: int, itemsize: int = 4) -> int:
        """Return the bytes that a forward of so many rows keeps for its backward.

        What the gradients' formulas need and cannot be had from what is kept already:

        - input: the token numbers (8 bytes each);
        - a hidden layer: both normed inputs and both norms' own inputs (4 D), the
          queries, keys, values and what attention gives of the own heads (4 D / n), the
          largest score and the sum of each row of attention, the inner features before
          and after their activation (2 F / n), two numbers a row of each norm; and
          attention's weights of a whole batch of rows, where they are small;
        - output: the norm's input and its output (2 D), its two numbers a row, and the
          own part of the logits (V / n), the targets, and the largest logit and the sum
          of each row.

        What norms read and write is kept of the own tokens, if `sequence` splits them.
        """
        tokens = rows * self.config.seq_len
        config, width = self.config, self.config.d_model
        heads = self._own(config.n_head)
        assert config.d_ff is not None
        split = 4 * heads * (width // config.n_head) + 2 * heads
        split += 2 * self._own(config.d_ff)
        stream = self.blocks * (4 * width + 4)
        numbers = self.blocks * split
        indices = int(self.has_input)
        if self.has_output:
            stream += 2 * width + 2
            numbers += self._own(config.vocab_size) + 2
            indices += 1
        weights = kept_bytes(
            rows, config.seq_len, config.seq_len, heads, itemsize, (None, 0)
        )
        numbers = tokens * numbers + self._own_tokens(rows) * stream
        return numbers * itemsize + tokens * indices * 8 + self.blocks * weights

    def _own_tokens(self, rows: int) -> int:
        """Tokens of so many rows that norms and residuals have on this rank."""
        length = self.config.seq_len
        if not self.sequence:
            return rows * length
        if rows % self.members:
            return rows * self._own(length)
        return rows // self.members * length

    def _own(self, size: int) -> int:
        return chunk_sizes(size, self.members)[self.member]
