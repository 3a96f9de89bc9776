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

With ``sequence``, all that is elementwise lies in tokens instead of whole: in rows, B,
where each member gets as many, otherwise in positions, T:

====================  =====================================
between layers        what flows
====================  =====================================
input.tokens          pending sum, reduce_scattered by B or T
norms, dropout, +     split so; the norms' gradients pending
into attn and mlp     all_gathered (q, k and v share one), kept as the shard
out of attn and mlp   pending sum, reduce_scattered by B or T
into output.weight    all_gathered, kept as the shard
====================  =====================================

On a mesh with ``context_axis`` everything that has positions is split by them along it,
from the tokens to the logits; only attention communicates there.

With ``other_axis`` the weights of attention and MLP are split along D as well. What
flows into them is sliced; q, k, v and the inner features are sums pending over that
axis, all_reduced; what flows out is split along D, all_gathered + residual.

Other axes (data parallel) split the batch; along them all weights are whole, or, with
``fully_sharded``, stored in pieces of a dim that is not split and gathered for use.
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
    other_axis
        Name of another axis of the mesh, which splits the width D of the weights of
        attention and MLP too (2-D tensor parallelism).
    sequence
        Whether norms, dropout and residuals have their tokens split over the axis; see
        `tparmpi.nn.splitting.scatter_tokens`.
    context_axis
        Name of the axis of the mesh that positions are split over from end to end; all
        weights are whole along it.
    context : {"heads", "ring"}
        How positions meet in attention; see `tparmpi.nn.CausalSelfAttention`. With
        ``"heads"`` the axis must stand after `axis` in the mesh, with `sequence`
        before it, so that both together take ``"ring"``.
    fully_sharded
        Name of the axis that weights and embeddings are stored over; see
        `tparmpi.nn.fully_shard`.
    """

    axis: str = "tp"
    tokens: str | None = "vocabulary"
    attention: str | None = "heads"
    mlp: str | None = "hidden"
    other_axis: str | None = None
    sequence: bool = False
    context_axis: str = "cp"
    context: str = "heads"
    fully_sharded: str | None = None


TENSOR_PARALLEL = GPTLayout()
"""Every layer split that can be, over the axis ``tp``."""
