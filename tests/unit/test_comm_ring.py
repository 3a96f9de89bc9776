"""The record of calls: what it keeps, what it survives, what it costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tparmpi.comm import ring
from tparmpi.comm.ledger import current
from tparmpi.comm.post_mortem import main
from tparmpi.comm.recorded import CALLS, start_of
from tparmpi.comm.ring import Ring


class Program:
    """Calls at the depth at which those of a group are recorded."""

    def __init__(self, recorder: Ring) -> None:
        self.recorder = recorder

    def call(self, sequence: int = 0, place: int = 0) -> int:
        return self._begin(sequence, place)

    def _begin(self, sequence: int, place: int) -> int:
        return self._enter(sequence, place)

    def _enter(self, sequence: int, place: int) -> int:
        return self.recorder.enter("all_reduce", place, sequence)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1-0.ring"


def test_calls_are_recorded_in_order(path):
    recorder = Ring(path, 2, 3)
    program = Program(recorder)
    place = recorder.text("the group")
    entry = program.call(5, place)
    recorder.leave(entry)
    broken = program.call(6, place)
    recorder.break_off(broken)
    program.call(7, place)
    found = ring.read(path)
    assert (found.rank, found.size, found.pid) == (2, 3, os.getpid())
    assert found.is_alive
    done, failed, inside = found.calls
    assert [c.sequence for c in found.calls] == [5, 6, 7]
    assert [c.number for c in found.calls] == [1, 2, 3]
    assert {(c.kind, c.place) for c in found.calls} == {("all_reduce", "the group")}
    assert done.site.rpartition(":")[0] == __file__
    assert done.seconds >= 0 and not done.failed
    assert failed.failed and failed.seconds is None
    assert inside.seconds is None and not inside.failed
    lines = found.lines()
    assert "took" in lines[0]
    assert "ended with an error" in lines[1]
    assert "not done after" in lines[2]


def test_the_latest_calls_are_kept(path):
    recorder = Ring(path)
    program = Program(recorder)
    first = program.call(0)
    for sequence in range(1, 2 * CALLS + 7):
        recorder.leave(program.call(sequence))
    # Its place is another call's by now.
    recorder.break_off(first)
    found = ring.read(path)
    assert [c.sequence for c in found.calls] == list(range(CALLS + 7, 2 * CALLS + 7))
    assert not any(call.failed for call in found.calls)


def test_a_call_of_an_operator_is_named(path, monkeypatch):
    recorder = Ring(path)
    monkeypatch.setattr(current, "operator", "matmul")
    Program(recorder).call()
    assert ring.read(path).calls[0].operator == "matmul"
    assert "all_reduce of operator matmul" in ring.read(path).lines()[0]


def test_a_line_that_is_far_is_found_when_the_call_waits(path, monkeypatch):
    monkeypatch.setattr(ring, "_inside", defaultdict(lambda: True))
    monkeypatch.setattr(ring, "call_site", lambda: "program.py:7")
    recorder = Ring(path)
    Program(recorder).call()
    assert ring.read(path).calls[0].site == "?"
    recorder.wait()
    found = ring.read(path)
    assert found.calls[0].site == "program.py:7"
    assert 0 < found.waiting <= time.monotonic()
    recorder.go_on()
    assert ring.read(path).waiting == 0


def test_when_there_is_no_room_for_more_texts(path, monkeypatch):
    recorder = Ring(path)
    known = recorder.text("known")
    for number in range(3000):
        recorder.text(f"group {number:100d}")
    assert recorder.text(f"group {3000:100d}") == 0
    # What is shorter may still find room.
    short = recorder.text("short")
    program = Program(recorder)
    for place in (known, short, recorder.text(f"group {3001:100d}")):
        program.call(place=place)
    places = [call.place for call in ring.read(path).calls]
    assert places == ["known", "short", "?"]


def test_long_work_is_visible(path):
    recorder = Ring(path)
    recorder.set_busy("writing " + "ä" * 500)
    found = ring.read(path)
    assert found.busy > 0
    assert found.reason.startswith("writing ä")
    recorder.set_busy(None)
    assert ring.read(path).busy == 0


def test_asking_and_answering(path):
    recorder = Ring(path)
    assert not recorder.is_asked()
    ring.ask(path)
    assert recorder.is_asked()
    assert not ring.read(path).answered
    recorder.answer()
    assert ring.read(path).answered


def test_the_record_of_a_killed_process_is_complete(path):
    program = f"""
import os, pathlib, signal
from tparmpi.comm.ring import Ring
recorder = Ring(pathlib.Path({str(path)!r}), 1, 2)
place = recorder.text("the group")
for sequence in range(1000):
    recorder.leave(recorder.enter("barrier", place, sequence))
recorder.enter("all_reduce", place, 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Frames for the entry to look at.
    command = [
        sys.executable,
        "-c",
        f"def a(): b()\ndef b(): c()\ndef c(): d()\ndef d(): exec({program!r})\na()",
    ]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    found = ring.read(path)
    assert not found.is_alive
    assert found.calls[-1].kind == "all_reduce"
    assert found.calls[-1].sequence == 1000
    assert "not done" in found.lines()[-1]


def test_what_is_no_record(path, capsys):
    assert ring.read(path) is None
    path.write_bytes(b"x" * ring.FILE_BYTES)
    assert ring.read(path) is None
    path.write_bytes(b"")
    assert ring.read(path) is None
    assert main([str(path)]) == 1
    assert "no record" in capsys.readouterr().err


def test_post_mortem_prints_the_calls(path, capsys):
    recorder = Ring(path, 1, 4)
    Program(recorder).call(3)
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert f"rank 1 of 4, process {os.getpid()} runs" in out
    assert "all_reduce, call 3" in out


def test_a_file_is_not_taken_over(path):
    Ring(path)
    with pytest.raises(FileExistsError):
        Ring(path)
    link = path.with_name("link")
    link.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(OSError):
        Ring(link)


def test_files_of_jobs_that_ended_long_ago_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(ring, "_MEMORY", tmp_path)
    folder = ring.folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    mine, dead = folder / "a-0.ring", folder / "b-0.ring"
    keep = Ring(mine)
    with monkeypatch.context() as earlier:
        # Of a process with another start, which is gone.
        earlier.setattr(ring, "start_of", lambda pid: 1)
        Ring(dead)
    (folder / "b-host.claim").touch()
    (folder / "b-0.stacks").touch()
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    ring.folder()
    assert [file.name for file in folder.iterdir()] == ["a-0.ring"]
    assert keep.read().pid == os.getpid()


def test_a_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(ring, "_MEMORY", tmp_path / "memory")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / f"tparmpi-{os.getuid()}").symlink_to(tmp_path)
    assert ring.folder() is None
    recorder = ring.create("1-0.ring", 0, 2)
    assert recorder.path is None
    Program(recorder).call()
    assert len(recorder.read().calls) == 1


def test_the_kernel_tells_when_a_process_started():
    assert start_of(os.getpid()) == start_of(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(60)
    assert start_of(child.pid) is None


def test_what_an_entry_costs():
    """A microsecond, by the processor's time, so that other processes do not count."""
    recorder = Ring(None)
    program = Program(recorder)
    rounds, calls = 200, 200

    def cost(work) -> float:
        best = float("inf")
        for _ in range(rounds):
            start = time.thread_time_ns()
            for number in range(calls):
                work(number)
            best = min(best, time.thread_time_ns() - start)
        return best / calls

    def recorded(number: int) -> None:
        recorder.leave(program.call(number))

    plain = Program(recorder)
    plain.recorder = type("Nothing", (), {"enter": staticmethod(lambda *_: 0)})

    def unrecorded(number: int) -> None:
        plain.call(number)

    nanoseconds = cost(recorded) - cost(unrecorded)
    # Twice the bar: processors differ. The benchmark prints the figure.
    assert nanoseconds < 2000, nanoseconds
