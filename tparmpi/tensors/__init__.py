"""Tensors, tape, operator registry and dispatch, redistribution, random numbers."""

from tparmpi.tensors import random
from tparmpi.tensors.create import from_local, tensor
from tparmpi.tensors.gradients import backward, grad, value_and_grad
from tparmpi.tensors.local_map import local_map
from tparmpi.tensors.numbers import NUMBERS, beside, compared, fitted
from tparmpi.tensors.operator import Operator, operator
from tparmpi.tensors.passes import Deferred
from tparmpi.tensors.plan import FactorShard, Plan
from tparmpi.tensors.recompute import recompute
from tparmpi.tensors.redistribute import redistribute
from tparmpi.tensors.registry import method, methods, registry
from tparmpi.tensors.spec import Spec, spec_of
from tparmpi.tensors.tape import no_grad, no_implicit_gather
from tparmpi.tensors.tensor import Tensor
from tparmpi.tensors.transfer import to

__all__ = [
    "NUMBERS",
    "Deferred",
    "FactorShard",
    "Operator",
    "Plan",
    "Spec",
    "Tensor",
    "backward",
    "beside",
    "compared",
    "fitted",
    "from_local",
    "grad",
    "local_map",
    "method",
    "methods",
    "no_grad",
    "no_implicit_gather",
    "operator",
    "random",
    "recompute",
    "redistribute",
    "registry",
    "spec_of",
    "tensor",
    "to",
    "value_and_grad",
]
