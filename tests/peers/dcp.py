r"""Times saves and loads of PyTorch's distributed checkpoints (DCP).

    mpirun -n 2 tparmpi bench checkpoint \
        --peers "/path/to/python-with-torch tests/peers/dcp.py"

Needs torch (CPU) and nothing else. Its arguments are a folder and the bytes of all
ranks; what it saves are the same tensors as those of `tparmpi bench checkpoint`, split
by rows. The fastest of its rounds counts; files are synced, as is DCP's default.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

ROUNDS = 3
TENSORS = 4
COLUMNS = 1024


def us_of(work) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item() * 1e6


def main() -> None:
    folder, nbytes = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = nbytes // (4 * TENSORS * COLUMNS)
    state = {}
    for number in range(TENSORS):
        values = torch.arange(float(rows * COLUMNS)).reshape(rows, COLUMNS) + number
        state[f"w{number}"] = distribute_tensor(values, mesh, [Shard(0)])
    saves, loads = [], []
    for _ in range(ROUNDS):
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        saves.append(us_of(lambda: dcp.save(state, checkpoint_id=folder)))
        loads.append(us_of(lambda: dcp.load(state, checkpoint_id=folder)))
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        name = f"PyTorch {torch.__version__} DCP"
        print(json.dumps({"name": name, "us": [min(saves), min(loads)]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
