"""Jobs of several ranks as children of a command, each under a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tparmpi.errors import TparmpiError, UsageError

_PATIENCE = 5.0
_SHOWN = 2000


def launcher(given: str | None) -> str:
    """Return the path of ``mpirun``: the given one, Python's neighbour, or PATH's.

    Raises
    ------
    UsageError
        If there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = shutil.which(given or (str(beside) if beside.exists() else "mpirun"))
    if found is None:
        raise UsageError(
            f"bench: there is no {given or 'mpirun'}; name the launcher with --mpirun"
        )
    return found


def ours(mpirun: str, ranks: int, arguments: Sequence[str], limit: float) -> Any:
    """Return what `tparmpi` says with `arguments` and ``--json`` on so many ranks.

    One thread a rank. The limit is in seconds.

    Raises
    ------
    TparmpiError
        If it fails or takes too long.
    """
    program = [sys.executable, "-m", "tparmpi", *arguments, "--json"]
    return _result([[mpirun, "-n", str(ranks), *program]], [os.environ], limit)


def peer(
    python: str, program: Path, ranks: int, arguments: Sequence[str], limit: float
) -> Any:
    """Return what a peer's program says, a process of `python` for each rank.

    They get ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; that of rank
    0 prints a line of JSON.

    Raises
    ------
    TparmpiError
        If one fails or takes too long.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    environments = [os.environ | shared | {"RANK": str(rank)} for rank in range(ranks)]
    # What is imported must be the peer's own.
    for environment in environments:
        environment.pop("PYTHONPATH", None)
    return _result([[python, str(program), *arguments]] * ranks, environments, limit)


def _result(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    limit: float,
) -> Any:
    """The last line that the first of some processes prints, read as JSON."""
    end = time.monotonic() + limit
    with contextlib.ExitStack() as stack:
        started = []
        for command, variables in zip(commands, environments, strict=True):
            # Files, not pipes: nobody reads while several run.
            out, err = (
                stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)
            )
            try:
                process = subprocess.Popen(
                    command,
                    env={**variables, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                raise TparmpiError(f"bench: {command[0]}: {error.strerror}") from error
            stack.callback(_end, process)
            started.append((process, err, command))
            if len(started) == 1:
                answer = out
        for process, err, command in started:
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TparmpiError(
                    f"bench: not done after {limit:.0f} s: {' '.join(command)}; give "
                    "it more time with --limit"
                ) from None
            if code:
                raise TparmpiError(
                    f"bench: exit code {code} of {' '.join(command)}:\n{_tail(err)}"
                )
        answer.seek(0)
        lines = answer.read().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise TparmpiError(
            f"bench: the last line is no JSON: {' '.join(commands[0])}"
        ) from None


def _tail(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read()[-_SHOWN:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and what it started: asked to first, so that it can clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
