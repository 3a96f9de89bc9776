"""How the layers of a GPT lie over the members of an axis.

Along the axis (B batch, T positions, D width, H heads, E head width, F inner width,
V vocabulary; each split in any chunks):

====================  ===============  ==========  =====================================
layer                 weight           split       what flows
====================  ===============  ==========  =====================================
input.tokens          (V, D)           V           pending sum, all_reduced + positions
input.positions       (T, D)           -
blocks.*.attn_norm    (D,)             -           whole; its gradient all_reduced once
blocks.*.attn.q,k,v   (D, H, E)        H           split by heads
blocks.*.attn.out     (H, E, D)        H           pending sum, all_reduced + residual
blocks.*.mlp_norm     (D,)             -           whole; its gradient all_reduced once
blocks.*.mlp.up       (D, F)           F           split by inner features
blocks.*.mlp.down     (F, D)           F           pending sum, all_reduced + residual
output.norm           (D,)             -           whole; its gradient all_reduced once
output.weight         (V, D)           V           logits split by vocabulary
====================  ===============  ==========  =====================================

Other axes (data parallel) split the batch; along them all weights are whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTLayout:
    """Names of the splits that the layers of a GPT are made with.

    Attributes
    ----------
    axis
        Name of the axis; on a mesh without it nothing is split, and a group counts as
        its only axis.
    tokens, attention, mlp
        The ``split`` of the token embedding (and the output's weight, which may be the
        same parameter), of attention and of the MLP; None leaves a layer whole.
    """

    axis: str = "tp"
    tokens: str | None = "vocabulary"
    attention: str | None = "heads"
    mlp: str | None = "hidden"


TENSOR_PARALLEL = GPTLayout()
"""Every layer split that can be, over the axis ``tp``."""
