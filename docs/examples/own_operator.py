"""An operator of one's own, on tensors in any layout, with its gradient checked.

Run it with `python own_operator.py` or `mpirun -n 3 python own_operator.py`.
"""

import numpy as np

import tparmpi as tpm
from tparmpi.testing import all_layouts, check_gradient


@tpm.operator("...->...")
def square(plan, x):
    """Return ``x * x``."""
    return x * x, x


@square.define_backward
def _(plan, saved, grad, wanted):
    return (2 * saved * grad,)


group = tpm.group(tpm.devices())
x = np.arange(1.0, 13.0).reshape(3, 4)
for layout in all_layouts(x.ndim):
    check_gradient(square, [x], group, [layout])

if group.rank == 0:
    print(f"square has the right gradient in every layout on {group.size} ranks")
