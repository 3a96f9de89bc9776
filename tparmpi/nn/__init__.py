"""Building blocks of models: modules, parameters and how they start."""

from tparmpi.nn import init
from tparmpi.nn.attention import CausalSelfAttention
from tparmpi.nn.dropout import Dropout
from tparmpi.nn.embedding import Embedding
from tparmpi.nn.linear import Linear
from tparmpi.nn.mlp import MLP
from tparmpi.nn.module import Module
from tparmpi.nn.norms import LayerNorm
from tparmpi.nn.parameter import Parameter
from tparmpi.nn.storage import fully_shard

__all__ = [
    "MLP",
    "CausalSelfAttention",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "fully_shard",
    "init",
]
