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
begin = time.process_time()
import tparmpi
seconds = time.process_time() - begin
print(json.dumps([seconds, sorted(sys.modules)]))
"""


def fresh_import() -> tuple[float, set[str]]:
    """Import the package in a new Python; return its seconds and modules.

    Seconds of the processor's time: other processes of the machine do not count.
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
    # The best of several: the first one also compiles and reads files from disk.
    assert min(fresh_import()[0] for _ in range(5)) < MOST_SECONDS


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
