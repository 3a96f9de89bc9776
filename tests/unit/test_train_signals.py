"""Signals are noted, and leave children alone."""

from __future__ import annotations

import os
import signal

import pytest

from tparmpi.train.signals import STOPPING, StopSignals


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_noted_and_nothing_else_happens(number):
    with StopSignals() as signals:
        assert not signals.requested
        signal.raise_signal(number)
        assert signals.requested
        signal.raise_signal(number)
        assert signals.requested


def test_the_former_handlers_come_back():
    before = [signal.getsignal(number) for number in STOPPING]
    with StopSignals():
        assert [signal.getsignal(number) for number in STOPPING] != before
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_a_signal_after_the_end_is_ignored():
    before = [signal.getsignal(number) for number in STOPPING]
    try:
        with StopSignals() as signals:
            signals.ignore()
        for number in STOPPING:
            signal.raise_signal(number)
        assert not signals.requested
    finally:
        for number, handler in zip(STOPPING, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_dies_of_the_signal():
    with StopSignals() as signals:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not signals.requested
        signal.raise_signal(signal.SIGTERM)
        assert signals.requested
