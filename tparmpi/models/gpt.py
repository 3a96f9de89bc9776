"""GPT: a decoder-only transformer of GPT-2's shape.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): layer
norms before attention and MLP and at the end, GELU in its tanh form, learned positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tparmpi.comm import Place
from tparmpi.errors import ShapeError, UsageError
from tparmpi.models.gpt_layout import TENSOR_PARALLEL, GPTLayout
from tparmpi.nn import (
    MLP,
    CausalSelfAttention,
    Dropout,
    Embedding,
    LayerNorm,
    Module,
    Parameter,
    fully_shard,
    init,
)
from tparmpi.nn.splitting import (
    axis_number,
    gather_tokens,
    layout_over,
    placement_over,
    scatter_tokens,
    with_placement,
)
from tparmpi.ops import einsum
from tparmpi.parallel import LayerPlacement
from tparmpi.sharding import REPLICATE, Shard
from tparmpi.tensors import Tensor

DEVIATION = 0.02
"""Of all initial weights but those that write to the residual stream."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes
    ----------
    n_layer, d_model, n_head
        Hidden layers, width, attention heads.
    seq_len, vocab_size
        Most positions, tokens.
    d_ff
        Width inside the MLP; ``4 * d_model`` if None.
    dropout
        Probability, after the embedding, each attention and each MLP.
    tied
        Whether the output uses the token embedding's table.

    Raises
    ------
    UsageError
        If a size is not positive, the heads do not divide the width, or the dropout is
        not in [0, 1).
    """

    n_layer: int
    d_model: int
    n_head: int
    seq_len: int
    vocab_size: int
    d_ff: int | None = None
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        for key in ("n_layer", "d_model", "n_head", "seq_len", "vocab_size", "d_ff"):
            size = getattr(self, key)
            if size < 1:
                raise UsageError(f"GPTConfig: {key} must be at least 1, it is {size}")
        if self.d_model % self.n_head:
            raise UsageError(
                f"GPTConfig: d_model ({self.d_model}) must be a multiple of n_head "
                f"({self.n_head})"
            )
        if not 0 <= self.dropout < 1:
            raise UsageError(
                "GPTConfig: dropout must be at least 0 and below 1, it is "
                f"{self.dropout}"
            )


class GPTInput(Module):
    """Tokens to vectors: a token's and its position's, added.

    Attributes
    ----------
    tokens : Embedding, weight (V, D)
    positions : Parameter, (T, D)
    """

    def __init__(
        self, config: GPTConfig, place: Place, layout: GPTLayout, dtype: Any = None
    ) -> None:
        self.tokens = Embedding(
            config.vocab_size,
            config.d_model,
            place,
            split=layout.tokens,
            axis=layout.axis,
            initializer=init.normal(DEVIATION),
            dtype=dtype,
        )
        self.positions = Parameter(
            (config.seq_len, config.d_model),
            place,
            initializer=init.normal(DEVIATION),
            kind="embedding",
            dtype=dtype,
        )
        self.dropout = Dropout(config.dropout)
        self.layout = layout

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors (B, T, D) of `tokens` (B, T).

        Raises
        ------
        ShapeError
            If there are more positions than the model has.
        """
        most, length = self.positions.shape[0], tokens.shape[-1]
        if length > most:
            raise ShapeError(
                f"GPT: {length} positions are given but the model has {most}; "
                "shorten the tokens or make the model with a larger seq_len"
            )
        positions = self.positions.gathered()
        if length < most:
            positions, _ = positions.split((length, most - length), dim=0)
        if self.layout.context_axis in tokens.device.axes:
            tokens = with_placement(tokens, self.layout.context_axis, Shard(1))
        x = self.tokens(tokens)
        if self.layout.sequence:
            x = scatter_tokens(x, self.layout.axis)
        return self.dropout(x + positions)


class GPTBlock(Module):
    """A hidden layer: attention and MLP, each normed before and added after.

    Attributes
    ----------
    attn_norm, mlp_norm : LayerNorm
    attn : CausalSelfAttention
    mlp : MLP
    attn_dropout, mlp_dropout : Dropout
    """

    def __init__(
        self, config: GPTConfig, place: Place, layout: GPTLayout, dtype: Any = None
    ) -> None:
        residual = init.normal(DEVIATION * (2 * config.n_layer) ** -0.5)
        assert config.d_ff is not None
        self.attn_norm = LayerNorm(config.d_model, place, dtype=dtype)
        self.attn = CausalSelfAttention(
            config.d_model,
            config.n_head,
            place,
            split=layout.attention,
            axis=layout.axis,
            other_axis=layout.other_axis,
            context=layout.context,
            context_axis=layout.context_axis,
            output_initializer=residual,
            dtype=dtype,
        )
        self.attn_dropout = Dropout(config.dropout)
        self.mlp_norm = LayerNorm(config.d_model, place, dtype=dtype)
        self.mlp = MLP(
            config.d_model,
            config.d_ff,
            place,
            split=layout.mlp,
            axis=layout.axis,
            other_axis=layout.other_axis,
            output_initializer=residual,
            dtype=dtype,
        )
        self.mlp_dropout = Dropout(config.dropout)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        """Return the next layer's input for `x` (B, T, D)."""
        x = x + self.attn_dropout(self._inner(self.attn, self.attn_norm(x)))
        return x + self.mlp_dropout(self._inner(self.mlp, self.mlp_norm(x)))

    def _inner(self, half: Module, x: Tensor) -> Tensor:
        """Return what a half adds to the residual, pending or finished."""
        layout = self.layout
        split = placement_over(x, layout.axis)
        if layout.sequence:
            x = gather_tokens(x, layout.axis)
        y: Tensor = half(x)
        if layout.sequence:
            y = with_placement(y, layout.axis, split)
        if layout.other_axis is not None and layout.other_axis in y.device.axes:
            # The sum first, while the width is split: it is the smaller array.
            if not layout.sequence:
                y = with_placement(y, layout.axis, REPLICATE)
            y = with_placement(y, layout.other_axis, REPLICATE)
        return y


class GPTOutput(Module):
    """Vectors to logits.

    Attributes
    ----------
    norm : LayerNorm
    weight : Parameter, (V, D)
        The token embedding's table if tied, or a copy of it on another place.
    """

    def __init__(
        self,
        config: GPTConfig,
        place: Place,
        layout: GPTLayout,
        dtype: Any = None,
        tied_to: Parameter | None = None,
    ) -> None:
        self.norm = LayerNorm(config.d_model, place, dtype=dtype)
        if tied_to is None or tied_to.spec.place is not place.inner():
            split = Shard(0) if layout.tokens else REPLICATE
            tied_to = Parameter(
                (config.vocab_size, config.d_model),
                place,
                layout_over(place, layout.axis, split),
                initializer=init.normal(DEVIATION),
                dtype=dtype,
                copy_of=tied_to,
            )
        self.weight = tied_to
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) for `x` (B, T, D), split as the weight is."""
        x = self.norm(x)
        if self.layout.sequence:
            x = gather_tokens(x, self.layout.axis)
        return einsum("btd,vd->btv", x, self.weight.gathered())


class GPT(Module):
    """A GPT: input layer, hidden layers and output layer, which can be placed apart.

    Parameters
    ----------
    config
        Sizes.
    place
        Device, group or mesh, or a placement that says it for each layer; on autodiff
        views the parameters require gradients.
    layout
        How the layers are split.
    dtype
        The place's default floating dtype if None.

    Attributes
    ----------
    input : GPTInput
    blocks : list of GPTBlock
    output : GPTOutput

    Raises
    ------
    UsageError
        If the placement is for another number of layers, or the layout splits positions
        over two axes in the wrong order.
    ShardingError
        If there are fewer heads than members to split them over.
    """

    def __init__(
        self,
        config: GPTConfig,
        place: Place | LayerPlacement,
        *,
        layout: GPTLayout = TENSOR_PARALLEL,
        dtype: Any = None,
    ) -> None:
        placement = place
        if isinstance(placement, Place):
            placement = LayerPlacement.new([(placement, config.n_layer)])
        placement.check_count(config.n_layer)
        _check_order(placement.input, layout)
        self.config = config
        self.input = GPTInput(config, placement.input, layout, dtype)
        self.blocks = [
            GPTBlock(config, place, layout, dtype) for place in placement.hidden
        ]
        tied_to = self.input.tokens.weight if config.tied else None
        self.output = GPTOutput(config, placement.output, layout, dtype, tied_to)
        self.assign_paths()
        if layout.fully_sharded is not None:
            fully_shard(self, layout.fully_sharded)

    @property
    def layer_input(self) -> Module:
        """The layer that takes the tokens."""
        return self.input

    @property
    def layers_hidden(self) -> list[GPTBlock]:
        """The layers between, in order."""
        return self.blocks

    @property
    def layer_output(self) -> Module:
        """The layer that gives the logits."""
        return self.output

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) for `tokens` (B, T), T at most ``seq_len``.

        Collective over the place. The batch may be sharded; the logits are split by
        vocabulary over the axis that the layers are split over.
        """
        x = self.layer_input(tokens)
        for layer in self.layers_hidden:
            x = layer(x)
        return self.layer_output(x)


def _check_order(place: Place, layout: GPTLayout) -> None:
    """Refuse what would gather all positions to split them once more."""
    number, context = axis_number(place, layout.axis), layout.context_axis
    if not layout.sequence or number is None or context not in place.axes:
        return
    if place.axes.index(context) > number and place.shape[number] > 1:
        raise UsageError(
            f"GPT: sequence splits over '{layout.axis}' what '{context}' has split, so "
            f"that '{context}' must stand before '{layout.axis}' in the mesh; make the "
            'mesh so, with context="ring" in the layout'
        )
