"""The lines and the bar that show a run."""

from __future__ import annotations

import io

import pytest

from tparmpi.train import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(reporter):
    reporter.start(0, 4)
    for step in range(1, 5):
        reporter.step(step, loss=1 / step, lr=1e-3, tokens=1000, step_s=0.5)
    reporter.say("saved")
    reporter.close()


def test_a_file_gets_the_first_and_the_last_line():
    stream = io.StringIO()
    reporter = progress.reporter(stream)
    show(reporter)
    assert stream.getvalue().splitlines() == [
        "step 1/4  loss 1.0000  lr 1.00e-03  2,000 tokens/s  0:02 left",
        "step 4/4  loss 0.2500  lr 1.00e-03  2,000 tokens/s  0:00 left",
        "saved",
    ]


def test_a_file_gets_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    show(progress.reporter(stream))
    assert len(stream.getvalue().splitlines()) == 5


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    show(progress.reporter(stream))
    shown = stream.getvalue()
    for word in ("4/4", "loss 0.2500", "2,000 tokens/s", "0:00 left", "saved"):
        assert word in shown


@pytest.mark.parametrize("terminal", ["dumb", "unknown"])
def test_a_terminal_that_cannot_go_back_gets_lines(monkeypatch, terminal):
    monkeypatch.setenv("TERM", terminal)
    stream = Terminal()
    show(progress.reporter(stream))
    assert stream.getvalue().startswith("step 1/4  loss 1.0000")
    assert "\x1b" not in stream.getvalue()


class Failing(Terminal):
    """A terminal that takes `room` texts."""

    def __init__(self, error, room):
        super().__init__()
        self.error, self.room = error, room

    def write(self, text):
        self.room -= 1
        if self.room < 0:
            raise self.error
        return len(text)


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
@pytest.mark.parametrize("room", [0, 2])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left"), ValueError("closed")]
)
def test_nothing_that_happens_to_the_stream_ends_a_run(
    monkeypatch, terminal, room, error
):
    monkeypatch.setenv("TERM", terminal)
    show(progress.reporter(Failing(error, room)))


def test_no_stream_shows_nothing(capsys):
    show(progress.reporter(None))
    closed = io.StringIO()
    closed.close()
    show(progress.reporter(closed))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_what_the_encoding_lacks_is_escaped(monkeypatch, terminal):
    monkeypatch.setenv("TERM", terminal)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii")
    stream.isatty = lambda: True
    reporter = progress.reporter(stream)
    reporter.say("text \xe9\udcff")
    show(reporter)
    assert b"text \\xe9\\udcff" in raw.getvalue()
    assert b"saved" in raw.getvalue()


def test_other_ranks_show_nothing(capsys):
    show(progress.Reporter())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")],
)
def test_lengths_of_time(seconds, text):
    assert progress.clock(seconds) == text
