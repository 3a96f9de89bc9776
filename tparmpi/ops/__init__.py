"""The operators. Importing this package fills the registry."""

from tparmpi.ops.arithmetic import add, cast, dropout, gelu, mul, scale, sub
from tparmpi.ops.contraction import einsum, linear, matmul
from tparmpi.ops.extrema import argmax, argmin, max, min
from tparmpi.ops.network import (
    attention,
    cross_entropy,
    embedding,
    layer_norm,
    softmax,
)
from tparmpi.ops.reductions import all, any, cumsum, mean, sum
from tparmpi.ops.shape import concat, reshape, split, transpose
from tparmpi.ops.statistics import logsumexp, norm, prod, std, var

__all__ = [
    "add",
    "all",
    "any",
    "argmax",
    "argmin",
    "attention",
    "cast",
    "concat",
    "cross_entropy",
    "cumsum",
    "dropout",
    "einsum",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "logsumexp",
    "matmul",
    "max",
    "mean",
    "min",
    "mul",
    "norm",
    "prod",
    "reshape",
    "scale",
    "softmax",
    "split",
    "std",
    "sub",
    "sum",
    "transpose",
    "var",
]
