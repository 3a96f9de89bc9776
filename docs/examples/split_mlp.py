"""Two matrices split over all ranks, with one collective: columns, then rows.

Run it with `python split_mlp.py` or `mpirun -n 4 python split_mlp.py`.
"""

import numpy as np

import tparmpi as tpm

group = tpm.group(tpm.devices())
rng = np.random.default_rng(0)
x = tpm.tensor(rng.normal(size=(4, 8)), group)
w = tpm.tensor(rng.normal(size=(8, 32)), group).with_sharding(tpm.Shard(1))
v = tpm.tensor(rng.normal(size=(32, 8)), group).with_sharding(tpm.Shard(0))

with tpm.ledger() as ledger:
    y = (x @ w).gelu() @ v
    calls_before = ledger.count()
    y = y.with_sharding(tpm.Replicate())

total = y.numpy().sum()  # collective: on every rank, never under `if rank == 0`
if group.rank == 0:
    print(f"{group.size} ranks, the sum of all elements is {total:.6f}")
    print(f"collectives: {calls_before} up to the product, {ledger.count()} in all")
