"""The operators. Importing this package fills the registry."""

from tparmpi.ops.arithmetic import (
    add,
    cast,
    dropout,
    gelu,
    mul,
    scale,
    sub,
)
from tparmpi.ops.attention import attention
from tparmpi.ops.contraction import diagonal, einsum, linear, matmul, outer
from tparmpi.ops.extrema import argmax, argmin, max, min
from tparmpi.ops.indexing import (
    gather,
    getitem,
    one_hot,
    scatter_add,
    take,
    tril,
    triu,
)
from tparmpi.ops.joining import concat, split, stack
from tparmpi.ops.network import (
    cross_entropy,
    embedding,
    layer_norm,
    softmax,
)
from tparmpi.ops.rearranging import pad, repeat, roll, sort, topk
from tparmpi.ops.reductions import all, any, cumsum, mean, sum
from tparmpi.ops.shape import expand, reshape, swap, transpose
from tparmpi.ops.slicing import expand_dims, flip, squeeze
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
    "diagonal",
    "dropout",
    "einsum",
    "embedding",
    "expand",
    "expand_dims",
    "flip",
    "gather",
    "gelu",
    "getitem",
    "layer_norm",
    "linear",
    "logsumexp",
    "matmul",
    "max",
    "mean",
    "min",
    "mul",
    "norm",
    "one_hot",
    "outer",
    "pad",
    "prod",
    "repeat",
    "reshape",
    "roll",
    "scale",
    "scatter_add",
    "softmax",
    "sort",
    "split",
    "squeeze",
    "stack",
    "std",
    "sub",
    "sum",
    "swap",
    "take",
    "topk",
    "transpose",
    "tril",
    "triu",
    "var",
]
