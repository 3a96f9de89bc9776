"""Train and run models too large for one GPU with nothing but ``mpirun`` or Slurm.

Importing this package starts no MPI and touches no GPU; see `init`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tparmpi.comm import (
    Device,
    DeviceSettings,
    Group,
    Ledger,
    Mesh,
    device,
    devices,
    group,
    init,
    ledger,
    long_work,
    mesh,
    world,
)
from tparmpi.errors import (
    AutodiffError,
    CheckpointError,
    CollectiveMismatchError,
    CommunicationError,
    DataError,
    DeviceError,
    GroupError,
    ImplicitGatherWarning,
    RunFolderError,
    ShapeError,
    ShardingError,
    TparmpiError,
    UsageError,
)
from tparmpi.ops import (
    add,
    attention,
    cast,
    concat,
    cross_entropy,
    dropout,
    einsum,
    embedding,
    gelu,
    layer_norm,
    linear,
    matmul,
    mean,
    mul,
    reshape,
    scale,
    softmax,
    split,
    sub,
    sum,
    transpose,
)
from tparmpi.sharding import Partial, Replicate, Shard
from tparmpi.tensors import (
    Tensor,
    from_local,
    no_grad,
    no_implicit_gather,
    operator,
    random,
    tensor,
)

__version__ = "0.1.0"

_LAZY = {
    "checkpoint": "tparmpi.io.checkpoint",
    "models": "tparmpi.models",
    "nn": "tparmpi.nn",
    "optim": "tparmpi.optim",
    "parallel": "tparmpi.parallel",
    "testing": "tparmpi.testing",
}


def __getattr__(name: str) -> ModuleType:
    """Import the rooms that not every program enters when they are asked for."""
    if name in _LAZY:
        return import_module(_LAZY[name])
    raise AttributeError(f"module 'tparmpi' has no attribute '{name}'")


__all__ = [
    "AutodiffError",
    "CheckpointError",
    "CollectiveMismatchError",
    "CommunicationError",
    "DataError",
    "Device",
    "DeviceError",
    "DeviceSettings",
    "Group",
    "GroupError",
    "ImplicitGatherWarning",
    "Ledger",
    "Mesh",
    "Partial",
    "Replicate",
    "RunFolderError",
    "ShapeError",
    "Shard",
    "ShardingError",
    "Tensor",
    "TparmpiError",
    "UsageError",
    "add",
    "attention",
    "cast",
    "checkpoint",
    "concat",
    "cross_entropy",
    "device",
    "devices",
    "dropout",
    "einsum",
    "embedding",
    "from_local",
    "gelu",
    "group",
    "init",
    "layer_norm",
    "ledger",
    "linear",
    "long_work",
    "matmul",
    "mean",
    "mesh",
    "models",
    "mul",
    "nn",
    "no_grad",
    "no_implicit_gather",
    "operator",
    "optim",
    "parallel",
    "random",
    "reshape",
    "scale",
    "softmax",
    "split",
    "sub",
    "sum",
    "tensor",
    "testing",
    "transpose",
    "world",
]
