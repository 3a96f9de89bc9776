r"""Times PyTorch's all_reduce through gloo; see `tparmpi.comm.peers`.

    mpirun -n 2 tparmpi bench collectives --calls all_reduce --only-calls \
        --peers "/path/to/python-with-torch tests/peers/gloo.py"

Needs torch (CPU) and nothing else. The time of a call is the fastest tenth of its
batches, as `tparmpi bench` counts its own.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

SECONDS = 1.0


def fastest_tenth(nbytes: int) -> float:
    array = torch.zeros(max(1, nbytes // 4), dtype=torch.float32)
    dist.all_reduce(array)
    start = time.perf_counter()
    dist.all_reduce(array)
    once = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    repeat = max(1, int(0.0005 / once.item()))
    rounds = max(10, int(SECONDS / (once.item() * repeat)))
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeat):
            dist.all_reduce(array)
        times.append((time.perf_counter() - start) / repeat)
    return sorted(times)[len(times) // 10] * 1e6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [fastest_tenth(int(size)) for size in sys.argv[1:]]
    if dist.get_rank() == 0:
        print(json.dumps({"name": f"PyTorch {torch.__version__} gloo", "us": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
