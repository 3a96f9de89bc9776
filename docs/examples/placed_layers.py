"""A model of one's own whose layers live on several ranks, trained in microbatches.

Run it with `python placed_layers.py` or `mpirun -n 4 python placed_layers.py [tp]`,
where tp says over how many ranks each layer is split.
"""

import sys

import numpy as np

import tparmpi as tpm
from tparmpi import nn
from tparmpi.optim import AdamW, clip_norm
from tparmpi.parallel import (
    DistributedLayeredModel,
    LayerPlacement,
    LayerSequence,
    Pipeline,
    reduce_gradients,
)

SEED, STEPS, BATCH, LAYERS, WIDTH = 0, 100, 32, 6, 16


class Enter(nn.Module):
    """Two numbers to a vector. The numbers go on to the layers after it too."""

    def __init__(self, place):
        self.up = nn.Linear(2, WIDTH, place)

    def forward(self, x):
        return {"hidden": self.up(x), "x": x}


class Block(nn.Module):
    """Adds to the vector what it makes of both; split over the axis tp."""

    def __init__(self, place):
        self.up = nn.Linear(WIDTH, 32, place, split="columns")
        self.numbers = nn.Linear(2, 32, place, split="columns")
        self.thin = nn.Dropout(0.02)
        self.down = nn.Linear(32, WIDTH, place, split="rows")

    def forward(self, signal):
        hidden, x = signal["hidden"], signal["x"]
        inner = (self.up(hidden) + self.numbers(x)).gelu()
        return {"hidden": hidden + self.down(self.thin(inner)), "x": x}


class Leave(nn.Module):
    """A vector to a number."""

    def __init__(self, place):
        self.down = nn.Linear(WIDTH, 1, place)

    def forward(self, signal):
        return self.down(signal["hidden"])


class SquaredError:
    """The sum over a microbatch, and how much it weighs: its rows."""

    def __call__(self, predictions, targets):
        error = predictions - targets
        return (error * error).sum(), self.weight(targets)

    def weight(self, targets):
        return targets.shape[0]


# Every rank runs this same text. A layer on ranks that this one does not belong to is
# a shell: it has shapes, but no values, and costs nothing.
tp = int(sys.argv[1]) if len(sys.argv) > 1 else 1
mesh = tpm.mesh(pp=tpm.world().size // tp, tp=tp).autodiff()
placement = LayerPlacement.even(mesh.split("pp"), LAYERS)
model = LayerSequence(
    Enter(placement.input),
    *map(Block, placement.hidden),
    Leave(placement.output),
).initialize(SEED)
placed = DistributedLayeredModel(model, placement)
pipeline = Pipeline(placed, "1f1b", microbatches=8)
optimizer = AdamW(model.named_parameters(), lr=0.01)


def batch(step):
    """Features on the first stage, targets on the last."""
    x = np.random.default_rng(step).uniform(-1, 1, (BATCH, 2)).astype("float32")
    features = tpm.tensor(x, placement.input.inner())
    targets = tpm.tensor(np.abs(x[:, :1] - x[:, 1:]), placement.output.inner())
    return features, targets


for step in range(STEPS):
    features, targets = batch(step)
    with tpm.random.scope(SEED, step):  # the dropout's numbers
        loss = pipeline.forward_backward(features, targets, SquaredError())
    reduce_gradients(model.parameters())
    norm, scale = clip_norm(model.parameters(), max_norm=1.0)
    optimizer.step(scale=scale)
    model.zero_grad()
    if tpm.world().rank == 0 and step % 25 == 0:
        print(f"step {step}: loss {loss:.4f}, gradient {norm:.3f}")

model.eval()
features, targets = batch(STEPS)
loss = pipeline.evaluate(features, targets, SquaredError())
predictions = placed(features)  # on placement.output; shells elsewhere
if placement.output.is_member:
    with tpm.no_grad():
        again, rows = SquaredError()(predictions, targets)
    assert abs(again.item() / rows - loss) < 1e-6
if tpm.world().rank == 0:
    print(f"validation loss {loss:.4f}")
