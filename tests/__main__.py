"""Run the checks and tests: `python -m tests [PART …]`, all parts without arguments.

Each part is a child process with a hard time limit. What it prints is shown when it
fails, its closing lines always. The exit code is 0 only if every part passed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-q", "--durations=5", "--durations-min=5")
CLOSING_LINES = 12
FAILURE_LINES = 400


@dataclass(frozen=True)
class Part:
    """One command and the seconds after which it counts as hanging."""

    name: str
    command: tuple[str, ...]
    limit: float


def mpirun() -> str:
    """Return the launcher beside this Python, where pip puts it, else PATH's."""
    beside = Path(sysconfig.get_path("scripts"), "mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        sys.exit("no mpirun: pip install -e '.[mpich,test]', or load the site's MPI")
    return found


def parts() -> list[Part]:
    """Return all parts, the quick ones first."""
    ruff = (sys.executable, "-m", "ruff")
    ranks = (mpirun(), "-n", "4", *PYTEST, "--with-mpi", "--timeout-method=thread")
    return [
        Part("lint", (*ruff, "check"), 60),
        Part("format", (*ruff, "format", "--check"), 60),
        Part("types", (sys.executable, "-m", "mypy"), 240),
        Part("unit", (*PYTEST, "tests/unit"), 420),
        Part("mpi", (*ranks, "tests/mpi"), 540),
        Part("e2e", (*PYTEST, "-m", "not soak", "tests/e2e"), 900),
        Part("slurm", (*PYTEST, "tests/slurm"), 300),
    ]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a child and what it started: asked to first, so that it can clean up."""
    for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run(part: Part) -> bool:
    """Run one part, print how it went; return whether it passed."""
    print(f"== {part.name}: {' '.join(part.command)}", flush=True)
    begin = time.monotonic()
    # A file, not a pipe: a process that outlives its parent cannot keep it waiting.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(part.limit)
            verdict = "passed" if process.returncode == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            verdict = f"FAILED: not done after {part.limit:.0f} s"
        finally:
            end(process)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    passed = verdict == "passed"
    for line in lines[-(CLOSING_LINES if passed else FAILURE_LINES) :]:
        print(f"   {line}")
    print(f"== {part.name}: {verdict} ({time.monotonic() - begin:.1f} s)", flush=True)
    return passed


def main() -> int:
    """Run the parts named on the command line."""
    known = parts()
    names = [part.name for part in known]
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"of {', '.join(names)}; default all")
    wanted = parser.parse_args().part
    unknown = set(wanted) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {names}")
    chosen = [part for part in known if part.name in wanted or not wanted]
    begin = time.monotonic()
    failed = [part.name for part in chosen if not run(part)]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all passed"
    print(f"== {verdict} ({time.monotonic() - begin:.1f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
