"""Under a launcher: one rank shows the progress, and a failure on any ends the run."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from typing import Any

import pytest
from hypothesis import settings

from tparmpi.comm import exits, failure
from tparmpi.comm.launcher import launched

STACK_FRAMES = 8
STUCK_SECONDS = 8.0

# The same examples in every run: what fails here fails everywhere.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    if launched().size > 1:
        config.pluginmanager.register(RankReporter(config))


class RankReporter:
    """Keeps all ranks but the first quiet, and lets none wait for one that failed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_sessionstart(self) -> None:
        if launched().rank:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal._tw._file = open(os.devnull, "w")  # noqa: SIM115

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._end_run(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._end_run(report)

    def _end_run(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        cause = f"{report.nodeid}: {getattr(crash, 'message', '')}"
        text = f"FAILED {report.nodeid}\n{report.longreprtext}"
        for title, output in report.sections:
            text += f"\n{title}\n{output}"
        failure.fail(text, digest=failure.digest_of(cause))
        pytest.exit("the same test failed on every rank", returncode=1)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # `python -m pytest` raises a SystemExit of its own, which no hook sees.
        exits.note(int(exitstatus))

    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        timer = threading.Timer(settings.timeout, _end_hanging_run, [item])
        timer.daemon = True
        timer.start()
        item.cancel_timeout = timer.cancel  # type: ignore[attr-defined]
        return True

    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        getattr(item, "cancel_timeout", lambda: None)()
        return True


def _end_hanging_run(item: pytest.Item) -> None:
    """Print where every thread is, and end the run; all ranks do so at a time."""
    # Should the ranks be unable to talk, this ends the process all the same.
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"TIMEOUT {item.nodeid}"]
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            lines.append(f"thread {names.get(number, number)}:")
            lines += traceback.format_stack(frame)[-STACK_FRAMES:]
    text = "\n".join(line.rstrip("\n") for line in lines)
    capture = item.config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    failure.fail(text, digest=failure.digest_of(f"{item.nodeid} {launched().rank}"))
    failure.abort(1)
