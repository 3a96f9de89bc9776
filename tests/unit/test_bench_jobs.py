"""Children of `tparmpi bench compare` end when their time is over."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tparmpi.cli.bench import jobs
from tparmpi.errors import TparmpiError, UsageError


def processes_with(text: str) -> list[str]:
    """Return the command lines that contain `text`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(line)
    return found


def test_a_peer_that_hangs_is_ended(tmp_path):
    program = tmp_path / "peer.py"
    program.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(TparmpiError, match=r"not done after 1 s: .*; give it"):
        jobs.peer(sys.executable, program, 2, [], 1.0)
    assert processes_with(str(program)) == []


def test_a_peer_of_one_that_aborts_is_not_waited_for(tmp_path):
    program = tmp_path / "peer.py"
    program.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('the other side is gone', file=sys.stderr, flush=True)\n"
        "    os.abort()\n"
        "time.sleep(600)\n"
    )
    words = r"SIGABRT of .*peer\.py:\nthe other side is gone$"
    with pytest.raises(jobs.JobError, match=words):
        jobs.peer(sys.executable, program, 2, [], 60.0)
    assert processes_with(str(program)) == []


def test_a_peer_gets_its_place_and_nothing_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = tmp_path / "peer.py"
    program.write_text(
        "import json, os, sys\n"
        "names = 'RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS', 'PYTHONPATH'\n"
        "print('first')\n"
        "print(json.dumps([*map(os.environ.get, names), *sys.argv[1:]]))\n"
    )
    found = jobs.peer(sys.executable, program, 3, ["--x=1"], 60.0)
    assert found == ["0", "3", "1", None, "--x=1"]
    assert "PYTHONPATH" in os.environ


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise SystemExit('no such library')", "exit code 1 of .*\nno such library"),
        ("print('done')", "the last line is no JSON"),
        ("", "the last line is no JSON"),
    ],
)
def test_a_peer_that_fails_is_shown(tmp_path, text, words):
    program = tmp_path / "peer.py"
    program.write_text(text)
    with pytest.raises(jobs.JobError, match=words):
        jobs.peer(sys.executable, program, 1, [], 60.0)


def test_what_cannot_be_started(tmp_path):
    with pytest.raises(TparmpiError, match="no-python: No such file") as caught:
        jobs.peer(str(tmp_path / "no-python"), tmp_path / "peer.py", 1, [], 60.0)
    # No other try will find it.
    assert not isinstance(caught.value, jobs.JobError)
    with pytest.raises(UsageError, match="no no-mpirun; name the launcher"):
        jobs.launcher("no-mpirun")
