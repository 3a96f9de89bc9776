"""A model of one's own: trained, saved, and loaded into another one.

Run it with `python own_model.py` or `mpirun -n 4 python own_model.py [dp]`, where dp
says over how many parts of the ranks the batch is split.
"""

import sys

import numpy as np

import tparmpi as tpm
from tparmpi import nn
from tparmpi.optim import AdamW, clip_norm

SEED, STEPS, BATCH = 0, 100, 32


class Regression(nn.Module):
    """Two numbers in, one out; the middle is split over the axis tp."""

    def __init__(self, place):
        self.up = nn.Linear(2, 32, place, split="columns")
        self.thin = nn.Dropout(0.05)
        self.down = nn.Linear(32, 1, place, split="rows")

    def forward(self, x):
        return self.down(self.thin(self.up(x).gelu()))


# Every rank runs this same text; rank 0 alone only prints.
dp = int(sys.argv[1]) if len(sys.argv) > 1 else 1
mesh = tpm.mesh(dp=dp, tp=tpm.world().size // dp).autodiff()
model = Regression(mesh).initialize(SEED)
optimizer = AdamW(model.named_parameters(), lr=0.02)


def batch(step):
    """The rows of one step, the same numbers on every rank, split over dp."""
    x = np.random.default_rng(step).uniform(-1, 1, (BATCH, 2)).astype("float32")
    pair = x, np.abs(x[:, :1] - x[:, 1:])
    return [tpm.tensor(part, mesh).with_sharding(dp=tpm.Shard(0)) for part in pair]


for step in range(STEPS):
    x, y = batch(step)
    with tpm.random.scope(SEED, step):  # the dropout's numbers
        error = model(x) - y
    loss = (error * error).sum() / BATCH  # the rows of all ranks, not of this one
    loss.backward()
    # Between backward and step: gradients are sums that are pending over dp.
    tpm.parallel.reduce_gradients(model.parameters())
    norm, scale = clip_norm(model.parameters(), max_norm=1.0)
    optimizer.step(scale=scale)
    model.zero_grad()
    shown = loss.item()  # collective: on every rank, never under `if rank == 0`
    if tpm.world().rank == 0 and step % 25 == 0:
        print(f"step {step}: loss {shown:.4f}, gradient {norm:.3f}")

tpm.checkpoint.save("own_model", model, optimizer, step=STEPS)
again = Regression(mesh)
tpm.checkpoint.load("own_model", again)
with tpm.no_grad():
    x, _ = batch(STEPS)
    same = np.array_equal(model.eval()(x).numpy(), again.eval()(x).numpy())
if tpm.world().rank == 0:
    print(f"the loaded model gives {'the same' if same else 'other'} numbers")
