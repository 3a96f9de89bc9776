"""An operator whose members combine small statistics over a split dim.

Run it with `python unit_norm.py` or `mpirun -n 3 python unit_norm.py`.
"""

import numpy as np

import tparmpi as tpm
from tparmpi.testing import all_layouts, check_gradient


@tpm.operator("...{d}->...{d}")
def unit_norm(plan, x):
    """Return `x` with the length 1 along its last dim, ``x / sqrt(sum(x^2))``."""
    squares = (x * x).sum(axis=-1, keepdims=True)
    length = plan.xp.sqrt(plan.combine("d", squares))
    y = x / length
    return y, (y, length)


@unit_norm.define_backward
def _(plan, saved, grad, wanted):
    """What `grad` has along `y` changes no length: ``(grad - y (y·grad)) / length``."""
    y, length = saved
    along = plan.combine("d", (y * grad).sum(axis=-1, keepdims=True))
    return ((grad - y * along) / length,)


group = tpm.group(tpm.devices())
x = np.arange(1.0, 21.0).reshape(4, 5)
for layout in all_layouts(x.ndim):
    check_gradient(unit_norm, [x], group, [layout])

with tpm.ledger() as ledger:
    y = tpm.tensor(x, group).with_sharding(tpm.Shard(1), allow_empty=True).unit_norm()
assert np.allclose((y.numpy() ** 2).sum(axis=1), 1)

if group.rank == 0:
    print(f"unit_norm has the right gradient in every layout on {group.size} ranks")
    print(f"with its dim split: {ledger.count('all_reduce')} all_reduce in the forward")
