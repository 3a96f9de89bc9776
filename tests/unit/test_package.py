"""What `import tparmpi` costs and what it must not do."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import tparmpi

MOST_SECONDS = 0.3

PROBE = """
import json, sys, time
begin, began = time.process_time(), time.perf_counter()
import tparmpi
seconds = min(time.process_time() - begin, time.perf_counter() - began)
print(json.dumps([seconds, sorted(sys.modules)]))
"""


def fresh_import() -> tuple[float, set[str]]:
    """Import the package in a new Python; return its seconds and modules.

    The lower of the clock's seconds, which other processes disturb, and of the
    processor's, which include the starting of NumPy's threads.
    """
    output = subprocess.run(
        [sys.executable, "-c", PROBE],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    seconds, modules = json.loads(output)
    return seconds, set(modules)


def test_import_is_quick() -> None:
    # The first one also compiles and reads files from disk.
    assert any(fresh_import()[0] < MOST_SECONDS for _ in range(20))


def test_import_starts_no_mpi_and_touches_no_gpu() -> None:
    _, modules = fresh_import()
    assert "tparmpi" in modules
    # Importing mpi4py.MPI calls MPI_Init; importing cupy loads the CUDA libraries.
    assert not modules & {"mpi4py.MPI", "cupy", "cupyx", "h5py", "scipy"}


def test_version_is_the_installed_one() -> None:
    assert tparmpi.__version__ == importlib.metadata.version("tparmpi")


def test_public_names_exist() -> None:
    missing = [name for name in tparmpi.__all__ if not hasattr(tparmpi, name)]
    assert missing == []
