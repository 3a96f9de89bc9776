"""Parameters of which each member of an axis stores a piece."""

from __future__ import annotations

from tparmpi.nn.module import Module

STORED_IN_PIECES = frozenset({"weight", "embedding"})
"""Kinds of parameters that are worth it; biases and norms are small."""


def fully_shard(module: Module, axis: str) -> None:
    """Store all weights and embeddings below `module` in pieces over `axis`. Local.

    Rajbhandari et al., "ZeRO" (2020), stage 3. Each is gathered when a layer uses it
    and once more in the backward pass, which reduce-scatters its gradient when that is
    complete; gradient, optimizer state and checkpoints lie as it does. Call it before
    the parameters have values. Without such an axis nothing changes.

    Layers of your own read such a parameter as ``parameter.gathered()``.

    Raises
    ------
    UsageError
        If a parameter has values already.
    """
    for parameter in module.parameters():
        if parameter.kind in STORED_IN_PIECES:
            parameter.store_over(axis)
