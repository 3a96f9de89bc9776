"""Stages, replicas and split layers at a time, which need eight ranks."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.launch import mpirun, run

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import numpy as np
import tparmpi as tpm
from tests.mpi.test_pipeline import CONFIG, MeanLoss, one_rank, stages_of, trained
from tparmpi.parallel import LayerPlacement

expected, gradients = one_rank()
mesh, parts = stages_of(2, 2, 2)
places = [part.autodiff() for part in parts]
for schedule, chunks, microbatches in (
    ("gpipe", 1, 2),
    ("1f1b", 1, 3),
    ("zero_bubble", 1, 5),
    ("interleaved", 2, 8),
):
    placement = LayerPlacement.interleaved(places, CONFIG.n_layer, chunks)
    mean, found = trained(placement, schedule, microbatches, MeanLoss())
    assert abs(mean - expected) < 1e-10, schedule
    for name, gradient in found.items():
        error = np.abs(gradient - gradients[name]).max()
        assert error < 1e-10, (schedule, name)
    names = tpm.world().all_gather_object(sorted(found))
    assert set().union(*names) == set(gradients)
if tpm.world().rank == 0:
    print("equal")
"""


def test_two_stages_of_two_replicas_of_two_ranks_give_the_numbers_of_one(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    job = run(
        [*mpirun(8), sys.executable, "program.py"],
        cwd=tmp_path,
        limit=90.0,
        env={"PYTHONPATH": str(ROOT), "TPARMPI_TUNING": "0"},
    )
    assert job.code == 0, job.err
    assert job.out.split() == ["equal"]
