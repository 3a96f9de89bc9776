"""Plain NumPy on this rank's rows, with a gradient: each row is sorted.

Run it with `python plain_arrays.py` or `mpirun -n 3 python plain_arrays.py`.
"""

import numpy as np

import tparmpi as tpm
from tparmpi.testing import all_layouts, check_gradient


def sort_rows(x):
    """Return the sorted rows, and what the gradient needs."""
    order = np.argsort(x, axis=1)
    return np.take_along_axis(x, order, 1), order


def unsort_rows(order, grad):
    """Return the gradient of the only operand."""
    x_grad = np.empty_like(grad)
    np.put_along_axis(x_grad, order, grad, 1)
    return (x_grad,)


rows = tpm.Shard(0)  # the layout that the operand is brought to, and that of the result
sort = tpm.local_map(
    sort_rows, rows, rows, backward=unsort_rows, shapes=lambda shape: shape
)

group = tpm.group(tpm.devices())
x = np.cos(np.arange(12.0)).reshape(3, 4)
for layout in all_layouts(x.ndim):
    check_gradient(lambda x: sort(x) * sort(x), [x], group, [layout])

if group.rank == 0:
    print(f"sorting has the right gradient in every layout on {group.size} ranks")
