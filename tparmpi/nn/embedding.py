"""Embeddings of tokens."""

from __future__ import annotations

from typing import Any

from tparmpi.comm import Place
from tparmpi.nn import init
from tparmpi.nn.init import Initializer
from tparmpi.nn.module import Module
from tparmpi.nn.parameter import Parameter
from tparmpi.nn.splitting import check_split, layout_over
from tparmpi.ops import embedding
from tparmpi.sharding import REPLICATE, Shard
from tparmpi.tensors import Tensor


class Embedding(Module):
    """A vector for each token of a vocabulary.

    Parameters
    ----------
    vocab_size, d_model
        Number of tokens, size of their vectors.
    place
        Where the table lives.
    split : {"vocabulary", None}
        Whether each member along `axis` holds some tokens' vectors; the vocabulary need
        not divide.
    axis
        Name of the axis; see `tparmpi.nn.splitting.axis_number`.
    initializer
        Of the table.
    dtype
        The place's default floating dtype if None.

    Attributes
    ----------
    weight : Parameter, (V, D)
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        place: Place,
        *,
        split: str | None = None,
        axis: str = "tp",
        initializer: Initializer = init.DEFAULT,
        dtype: Any = None,
    ) -> None:
        check_split("Embedding", split, ("vocabulary",))
        self.weight = Parameter(
            (vocab_size, d_model),
            place,
            layout_over(place, axis, REPLICATE if split is None else Shard(0)),
            initializer=initializer,
            kind="embedding",
            dtype=dtype,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of `ids`, a pending sum where the vocabulary is split.

        Parameters
        ----------
        ids : (...), integers from 0 to V-1

        Returns
        -------
        Tensor : (..., D)
        """
        return embedding(self.weight.gathered(), ids)
