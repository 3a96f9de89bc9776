"""A mesh of thousands of ranks on one process that starts no MPI."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, time
import numpy as np
import tparmpi as tpm
from tparmpi.models.gpt import GPT, GPTConfig

began = time.process_time()
config = GPTConfig(n_layer=2, d_model=8192, n_head=64, seq_len=2048, vocab_size=50304)
with tpm.simulate(dp=64, pp=8, tp=8) as mesh, tpm.ledger() as ledger:
    stage = mesh.split("pp")[0].autodiff()
    model = GPT(config, stage).initialize(1)
    tokens = tpm.tensor(np.broadcast_to(np.int64(0), (512, 2048)), stage)
    tokens = tokens.with_sharding(dp=tpm.Shard(0))
    tpm.cross_entropy(model(tokens), tokens).mean().backward()
    tpm.parallel.reduce_gradients(model.parameters())

# 2 layers: after attention and MLP, each way; the embedding, the output's input;
# 8 rows of 2048 positions, of which an all_reduce sends 2 * 7/8.
activation = 8 * 2048 * 8192 * 4
large = [r for r in ledger.records if r.axis == "tp" and r.bytes == activation * 7 // 4]
assert len(large) == 2 * 2 * 2 + 2, ledger.table()
assert ledger.count(axis="dp") > 0
assert "mpi4py.MPI" not in sys.modules
assert time.process_time() - began < 10
"""


def test_four_thousand_ranks_on_one() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
