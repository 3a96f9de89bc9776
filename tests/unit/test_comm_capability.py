"""Whether MPI takes GPU memory is asked, in an order, and never guessed."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tparmpi.comm.transports.capability import Answer, cuda_aware, transports
from tparmpi.config import environment
from tparmpi.errors import UsageError


@pytest.fixture(autouse=True)
def user(monkeypatch):
    """Sets the user's variable; nothing is set before."""
    monkeypatch.delenv("TPARMPI_CUDA_AWARE", raising=False)
    environment.cache_clear()

    def choose(value: str) -> None:
        monkeypatch.setenv("TPARMPI_CUDA_AWARE", value)
        environment.cache_clear()

    yield choose
    environment.cache_clear()


def gpu_query(*, fails: bool = False, flag: int = 0):
    """MPIX_GPU_query_support of some library."""

    def query(kind, pointer):
        assert kind == 0
        pointer._obj.value = flag
        return 1 if fails else 0

    return query


YES = SimpleNamespace(MPIX_Query_cuda_support=lambda: 1)
NO = SimpleNamespace(MPIX_Query_cuda_support=lambda: 0)
SILENT = SimpleNamespace()


@pytest.mark.parametrize(
    ("library", "kinds", "variables", "yes", "source"),
    [
        (SILENT, None, {}, False, ""),
        (YES, None, {}, True, "MPIX_Query_cuda_support"),
        (NO, "mpi,system,cuda", {}, False, "MPIX_Query_cuda_support"),
        (
            SimpleNamespace(MPIX_GPU_query_support=gpu_query(flag=1)),
            "mpi,system",
            {},
            True,
            "MPIX_GPU_query_support",
        ),
        (
            SimpleNamespace(MPIX_GPU_query_support=gpu_query(flag=0)),
            "cuda",
            {},
            False,
            "MPIX_GPU_query_support",
        ),
        (
            SimpleNamespace(MPIX_GPU_query_support=gpu_query(fails=True, flag=1)),
            "system, cuda:device",
            {},
            True,
            "mpi_memory_alloc_kinds",
        ),
        (SILENT, "mpi,system", {}, False, "mpi_memory_alloc_kinds"),
        (SILENT, "mpi,system,cuda_not", {}, False, "mpi_memory_alloc_kinds"),
        (SILENT, None, {"MV2_USE_CUDA": "1"}, True, "MV2_USE_CUDA"),
        (YES, "cuda", {"MV2_USE_CUDA": "0"}, False, "MV2_USE_CUDA"),
        (YES, None, {"MPIR_CVAR_ENABLE_GPU": "0"}, False, "MPIR_CVAR_ENABLE_GPU"),
        (
            SILENT,
            None,
            {"MPICH_GPU_SUPPORT_ENABLED": "1"},
            True,
            "MPICH_GPU_SUPPORT_ENABLED",
        ),
        (
            YES,
            None,
            {"MPICH_GPU_SUPPORT_ENABLED": "0"},
            False,
            "MPICH_GPU_SUPPORT_ENABLED",
        ),
    ],
)
def test_who_is_asked(library, kinds, variables, yes, source):
    assert cuda_aware(library, kinds, variables) == Answer(yes, source)


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_user_decides(user, value):
    user(value)
    for library in (YES, NO, SILENT):
        answer = cuda_aware(library, "cuda", {"MV2_USE_CUDA": "0"})
        assert answer == Answer(value == "1", "TPARMPI_CUDA_AWARE")


def test_a_bad_choice_is_refused(user):
    user("maybe")
    with pytest.raises(UsageError, match="TPARMPI_CUDA_AWARE must be 0 or 1, it is"):
        cuda_aware(SILENT, None, {})


def test_transports_of_a_device():
    def unasked() -> Answer:
        raise AssertionError("nobody has to be asked for host memory")

    assert transports("cpu", unasked) == ("host",)
    assert transports("cuda", lambda: Answer(True)) == ("cuda_aware", "staged")
    assert transports("cuda", lambda: Answer(False)) == ("staged",)


@pytest.mark.parametrize("value", ["", "1"])
def test_the_library_that_runs_here_has_an_answer(value):
    program = (
        "from tparmpi.comm.transports import capability as c\n"
        "print(c.ask().yes, c.transports('cuda'))"
    )
    job = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TPARMPI_CUDA_AWARE": value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (job.returncode, job.stderr) == (0, "")
    yes, names = job.stdout.split(maxsplit=1)
    assert yes in (("True",) if value else ("True", "False"))
    aware, staged = "('cuda_aware', 'staged')", "('staged',)"
    assert names.strip() == (aware if yes == "True" else staged)
