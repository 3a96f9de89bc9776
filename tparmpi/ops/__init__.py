"""The operators. Importing this package fills the registry."""

from tparmpi.ops.arithmetic import add, cast, dropout, gelu, mul, scale, sub
from tparmpi.ops.contraction import einsum, linear, matmul
from tparmpi.ops.network import (
    attention,
    cross_entropy,
    embedding,
    layer_norm,
    softmax,
)
from tparmpi.ops.reductions import mean, sum
from tparmpi.ops.shape import concat, reshape, split, transpose

__all__ = [
    "add",
    "attention",
    "cast",
    "concat",
    "cross_entropy",
    "dropout",
    "einsum",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "matmul",
    "mean",
    "mul",
    "reshape",
    "scale",
    "softmax",
    "split",
    "sub",
    "sum",
    "transpose",
]
