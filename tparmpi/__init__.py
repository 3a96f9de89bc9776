"""Train and run models too large for one GPU with nothing but ``mpirun`` or Slurm.

Importing this package starts no MPI and touches no GPU; see `init`.
"""

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
    mesh,
    world,
)
from tparmpi.errors import (
    AutodiffError,
    CheckpointError,
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
