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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tparmpi.errors import TparmpiError, UsageError

_PATIENCE = 5.0
_SHOWN = 2000
_LOOK_S = 0.05


class JobError(TparmpiError):
    """A job that began came to no result; another try may."""


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
    JobError
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
    JobError
        If one fails or takes too long.
    TparmpiError
        If there is no such program as `python`.
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
        started: list[_Child] = []
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
            started.append(_Child(process, command, out, err))
        _wait(started, end, limit)
        text = started[0].text(out=True)
    try:
        return json.loads(text.splitlines()[-1])
    except (IndexError, ValueError):
        raise JobError(
            f"bench: the last line is no JSON: {' '.join(commands[0])}"
        ) from None


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    command: Sequence[str]
    out: IO[str]
    err: IO[str]

    def text(self, *, out: bool) -> str:
        """What it printed, or complained about."""
        stream = self.out if out else self.err
        stream.seek(0)
        return stream.read()

    def failure(self) -> str | None:
        """How it ended and what it said last, if it ended and has failed."""
        code = self.process.poll()
        if not code:
            return None
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        said = self.text(out=False) or self.text(out=True)
        return f"bench: {how} of {' '.join(self.command)}:\n{said[-_SHOWN:].rstrip()}"


def _wait(children: Sequence[_Child], end: float, limit: float) -> None:
    """Wait for all; where one has failed, those that wait for it are not waited for."""
    while True:
        left = [child for child in children if child.process.poll() is None]
        for child in children:
            if failure := child.failure():
                raise JobError(failure)
        if not left:
            return
        if time.monotonic() > end:
            raise JobError(
                f"bench: not done after {limit:.0f} s: {' '.join(left[0].command)}; "
                "give it more time with --limit"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            left[0].process.wait(_LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and what it started: asked to first, so that it can clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
