"""Measures another library's sums on the same ranks, in a program of its own."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tparmpi.comm.agreement import agree
from tparmpi.comm.group import Group
from tparmpi.comm.measure import in_turns
from tparmpi.errors import CommunicationError

_SECONDS = 600.0
_SECONDS_OF_OURS = 1.0
_TURNS = 3
# What makes a process believe that it is a rank of this job.
_LAUNCHER = ("PMI_", "PMIX_", "OMPI_", "MPI_", "HYDI_", "MPIR_")


def measured(group: Group, command: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the times of the peer's ``all_reduce`` beside ours, float32.

    Collective over all ranks. The program is started several times, in turns with our
    own calls; the fastest of each counts. Its arguments are the sizes in bytes, and
    ``us`` of what it says are the microseconds of each.

    Raises
    ------
    CommunicationError
        If the program fails on a rank.
    """
    theirs = [float("inf")] * len(sizes)
    ours = list(theirs)
    for _ in range(_TURNS):
        said = ask(group, command, *map(str, sizes))
        theirs = list(map(min, theirs, said["us"]))
        ours = list(map(min, ours, _ours(group, sizes)))
    calls = [
        {"bytes": nbytes, "us": us, "peer_us": peer_us, "ratio": peer_us / us}
        for nbytes, us, peer_us in zip(sizes, ours, theirs, strict=True)
    ]
    return {"name": said["name"], "calls": calls}


def _ours(group: Group, sizes: Sequence[int]) -> list[float]:
    found = []
    for nbytes in sizes:
        own = np.arange(max(1, nbytes // 4), dtype=np.float32)
        works = {"": partial(group.all_reduce, own)}
        found.append(in_turns(group.comm, works, _SECONDS_OF_OURS)[""][0])
    return found


def ask(group: Group, command: str, *arguments: str) -> dict[str, Any]:
    """Start a peer's program on each rank; return what it says on rank 0.

    Collective over all ranks. The program gets ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT``, and the arguments. That of rank 0 prints a line
    of JSON: ``name``, and ``us``, a list of microseconds.

    Raises
    ------
    CommunicationError
        If the program fails on a rank.
    """
    host = socket.gethostname() if _several_nodes(group) else "127.0.0.1"
    port = 0
    if group.rank == 0:
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
    address = group.broadcast_object((host, str(port)))
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER)}
    variables |= {
        "RANK": str(group.rank),
        "WORLD_SIZE": str(group.size),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": address[1],
    }
    words = [*shlex.split(command), *arguments]
    error: Exception | None = None
    said: dict[str, Any] = {}
    try:
        done = subprocess.run(
            words, env=variables, capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode:
            error = CommunicationError(
                f"bench: {command} failed on rank {group.rank}:\n{done.stderr}"
            )
        elif group.rank == 0:
            said = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as caught:
        error = CommunicationError(f"bench: {command}: {caught}")
    agree(error, group)
    answer: dict[str, Any] = group.broadcast_object(said)
    return answer


def _several_nodes(group: Group) -> bool:
    return len({device.host for device in group.devices}) > 1
