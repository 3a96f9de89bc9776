"""Signals over an edge: what is sent, and what may change from one to the next."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.comm import progress
from tparmpi.comm.transports.host import HostTransport
from tparmpi.parallel import signals
from tparmpi.parallel.signals import Edge
from tparmpi.tensors import nests

pytestmark = pytest.mark.mpi(min_size=2)

HEADER = 48


@pytest.fixture
def ends():
    return tpm.devices()[:2]


@pytest.fixture
def messages(monkeypatch):
    """The bytes of each message that this rank sends."""
    sent: list[int] = []
    start_send = HostTransport.start_send

    def note(self, pending, flat, member, tag):
        if flat.size:
            sent.append(flat.nbytes)
        start_send(self, pending, flat, member, tag)

    monkeypatch.setattr(HostTransport, "start_send", note)
    return sent


def numbers(count, dtype=np.float64):
    return np.arange(count).astype(dtype)


def nest(number: int, place) -> object:
    """Signals of one form, of others, of forms that come again."""
    one = tpm.tensor(numbers(3) + number, place)
    two = tpm.tensor(numbers(40_000) * number, place)
    kinds = {
        0: one,
        1: (one, {"b": two}),
        2: tpm.tensor(numbers(50_000, np.float32) + number, place),
        3: [one, number % 2, None],
    }
    return kinds[(0, 0, 1, 1, 0, 2, 3, 3, 1, 0, 2, 2)[number % 12]]


def arrays_of(signal: object) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in nests.tensors_in(signal)]


def pass_on(edge, count, ahead, make):
    """Signals that have come, on the target, with so many expected ahead."""
    come = []
    if edge.source.is_member:
        for number in range(count):
            edge.send(make(number, edge.source), number)
        edge.finish()
    else:
        for _ in range(min(ahead, count)):
            edge.expect()
        for number in range(count):
            if number + ahead < count:
                edge.expect()
            come.append(edge.receive(number))
    return come


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("most", [1024, 2])
def test_forms_may_change_while_signals_are_expected(
    ends, ahead, threaded, most, monkeypatch
):
    if tpm.world().rank > 1:
        return
    monkeypatch.setattr(signals, "MOST_FORMS", most)
    here, there = ends
    edge = Edge(here, there, "stage 1")
    wanted = threaded and progress.may_have_thread()
    with progress.thread(wanted=wanted):
        come = pass_on(edge, 36, ahead, nest)
    for number, received in enumerate(come):
        expected = arrays_of(nest(number, there))
        found = arrays_of(received.signal)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b)
        if isinstance(received.signal, list):
            assert received.signal[1:] == [number % 2, None]
    edge.close()


def test_a_form_is_sent_once(ends, messages):
    if tpm.world().rank > 1:
        return
    here, there = ends
    edge = Edge(here, there, "stage 1")
    pass_on(edge, 3, 1, lambda number, place: tpm.tensor(numbers(5), place))
    if here.is_member:
        (form,) = {size for size in messages if size not in (HEADER, 40)}
        assert messages == [HEADER, form, 40, HEADER, 40, HEADER, 40]
    edge.close()


def test_gradients_are_led_by_a_header_and_nothing_else(ends, messages):
    if tpm.world().rank > 1:
        return
    here, there = (device.autodiff() for device in ends)
    edge = Edge(here, there, "stage 1")
    if here.is_member:
        x = tpm.tensor(numbers(5), here).require_grad()
        passage = edge.send(x, 7)
        edge.expect_gradients(passage)
        (gradient,) = edge.receive_gradients(passage, 7)
        assert np.array_equal(gradient.numpy(), numbers(5) * 2)
    else:
        edge.expect()
        received = edge.receive(7)
        y = received.signal * tpm.tensor(numbers(5) * 2, ends[1])
        y.sum().backward()
        edge.send_gradients(received, 7)
        assert messages == [HEADER, 40]
    edge.finish()
    edge.close()


def test_another_microbatch_is_noticed(ends):
    if tpm.world().rank > 1:
        return
    here, there = (device.autodiff() for device in ends)
    edge = Edge(here, there, "stage 1")
    if here.is_member:
        x = tpm.tensor(numbers(5), here).require_grad()
        passages = [edge.send(x, number) for number in (3, 4)]
        for passage in passages:
            edge.expect_gradients(passage)
        words = "the gradients of microbatch 3 were to come, .* microbatch 2"
        with pytest.raises(tpm.CommunicationError, match=words):
            edge.receive_gradients(passages[0], 3)
        edge.receive_gradients(passages[1], 4)
    else:
        edge.expect()
        edge.expect()
        words = "the signal of microbatch 2 was to come, .* microbatch 3"
        with pytest.raises(tpm.CommunicationError, match=words):
            edge.receive(2)
        received = edge.receive(4)
        received.signal.sum().backward()
        edge.send_gradients(received, 2)
        edge.send_gradients(received, 4)
    edge.finish()
    edge.close()
