r"""Times the calls of `tparmpi bench dispatch` with PyTorch's DTensor.

    mpirun -n 2 tparmpi bench dispatch \
        --peers "/path/to/python-with-torch tests/peers/dtensor.py"

Needs torch (CPU) and nothing else. The time of a call is the median of its batches, as
`tparmpi bench dispatch` counts its own.
"""

from __future__ import annotations

import json
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    Replicate,
    Shard,
    distribute_tensor,
)

SECONDS = 1.0
BATCH = 20


def median_us(work) -> float:
    work()
    times = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 10:
        start = time.perf_counter()
        for _ in range(BATCH):
            work()
        times.append((time.perf_counter() - start) / BATCH)
    return sorted(times)[len(times) // 2] * 1e6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers = torch.sin(torch.arange(64 * 64.0)).reshape(64, 64)
    a, b, taped = (distribute_tensor(numbers, mesh, [Shard(0)]) for _ in range(3))
    w = distribute_tensor(numbers, mesh, [Replicate()])
    taped.requires_grad_()

    def product() -> None:
        (taped @ w).sum().backward()
        taped.grad = w.grad = None

    with torch.no_grad():
        found = [median_us(lambda: a + b)]
    found.append(median_us(lambda: taped + b))
    w.requires_grad_()
    found.append(median_us(product))
    if dist.get_rank() == 0:
        name = f"PyTorch {torch.__version__} DTensor"
        print(json.dumps({"name": name, "us": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
