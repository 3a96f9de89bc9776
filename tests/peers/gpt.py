r"""Trains the GPT of `tparmpi bench train` with PyTorch, tensor parallel by DTensor.

    tparmpi bench compare --peers tests/peers --python /path/to/python-with-torch

Needs torch (CPU) and nothing else. One process is started for each rank, with ``RANK``,
``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; rank 0 prints a line of JSON. The
model has GPT-2's shape: norms before attention and MLP and at the end, GELU in its tanh
form, learned positions, an output weight of its own, vocabulary and loss split over the
ranks; float32, AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

WARM_STEPS = 2
DEVIATION = 0.02


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.head_width = width // heads

    def forward(self, x):
        rows, positions, _ = x.shape
        q, k, v = (
            part(x).view(rows, positions, -1, self.head_width).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, positions, -1))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, sizes) -> None:
        super().__init__()
        width = sizes.d_model
        self.tokens = nn.Embedding(sizes.vocab_size, width)
        self.positions = nn.Parameter(torch.randn(sizes.seq_len, width) * DEVIATION)
        self.blocks = nn.ModuleList(
            Block(width, sizes.n_head) for _ in range(sizes.n_layer)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.vocab_size, bias=False)
        for weight in (self.tokens.weight, self.head.weight):
            nn.init.normal_(weight, std=DEVIATION)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def split(model: GPT, ranks: int) -> None:
    """Split the layers over the ranks, as `tparmpi.models.GPT` splits them."""
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(use_local_output=False),
    }
    for number in range(len(model.blocks)):
        at = f"blocks.{number}"
        plan |= {f"{at}.attn.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{at}.attn.out": RowwiseParallel()}
        plan |= {f"{at}.mlp.up": ColwiseParallel(), f"{at}.mlp.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("n_layer", "d_model", "n_head", "seq_len", "vocab_size", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--forward", action="store_true")
    return parser.parse_args()


def main() -> None:
    sizes = arguments()
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(sizes)
    if ranks > 1:
        dist.init_process_group("gloo")
        split(model, ranks)
    data = torch.randint(0, sizes.vocab_size, (sizes.batch, sizes.seq_len + 1))
    tokens, targets = data[:, :-1], data[:, 1:]
    optimizer = None
    if not sizes.forward:
        # Its fused kernel takes no tensors split over ranks.
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=3e-4, foreach=False, fused=ranks == 1
        )

    def backward() -> float:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        return float(whole.detach())

    def step() -> float | None:
        if optimizer is None:
            with torch.no_grad():
                model(tokens)
            return None
        if ranks > 1:
            with loss_parallel():
                loss = backward()
        else:
            loss = backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    times = []
    for number in range(WARM_STEPS + sizes.steps):
        if ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = step()
        if number >= WARM_STEPS:
            times.append(time.perf_counter() - start)
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]
    if ranks > 1:
        gathered = [None] * ranks
        dist.all_gather_object(gathered, peaks[0])
        peaks = gathered
    if rank == 0:
        median = sorted(times)[len(times) // 2]
        report = {
            "name": f"PyTorch {torch.__version__}",
            "s_per_step": median,
            "tokens_per_s": sizes.batch * sizes.seq_len / median,
            "peak_rss_bytes": peaks,
            "loss": loss,
        }
        print(json.dumps(report), flush=True)
    if ranks > 1:
        # Gloo's threads, some of them still at work, abort a process that ends orderly.
        dist.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
