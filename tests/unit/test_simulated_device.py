"""The simulated device is late, and tells who did not wait."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tparmpi.testing.simulated_device import SimulatedDevice


@pytest.fixture
def xp() -> SimulatedDevice:
    return SimulatedDevice()


def seen(array: object) -> np.ndarray:
    """What the host finds at the array's address, as MPI would."""
    interface = array.__cuda_array_interface__

    memory = SimpleNamespace(__array_interface__=interface)
    return np.asarray(memory).copy()


def test_work_is_late(xp):
    a = xp.array(np.arange(6.0).reshape(2, 3))
    b = a + 1.0
    assert np.isnan(seen(a)).all()
    assert np.isnan(seen(b)).all()
    xp.cuda.get_current_stream().synchronize()
    assert seen(a).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert seen(b).tolist() == [[1, 2, 3], [4, 5, 6]]
    b += a
    assert np.isnan(seen(b)).all()
    assert seen(a)[1, 2] == 5
    assert b.get().tolist() == [[1, 3, 5], [7, 9, 11]]


def test_asking_does_one_operation(xp):
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        a = xp.zeros(3)
        event = stream.record()
        b = a + 2.0
    asked = 0
    while not event.done:
        asked += 1
    # The memory, and the zeros in it.
    assert asked == 2
    assert seen(a).tolist() == [0, 0, 0]
    assert np.isnan(seen(b)).all()
    while not stream.done:
        asked += 1
    assert seen(b).tolist() == [2, 2, 2]


def test_events_order_streams(xp):
    first, second = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        a = xp.array(np.arange(4.0))
    with second:
        early = a * 2.0
        second.wait_event(first.record())
        late = a * 2.0
        assert np.isnan(early.get()).all()
        assert late.get().tolist() == [0, 2, 4, 6]


def test_what_is_overwritten_is_read_before(xp):
    a = xp.array(np.arange(4.0))
    read = a + 1.0
    a[1:3] = 7.0
    xp.cuda.get_current_stream().synchronize()
    assert read.get().tolist() == [1, 2, 3, 4]
    assert a.get().tolist() == [0, 7, 7, 3]


@pytest.mark.parametrize("waits", [False, True])
def test_memory_let_go_is_anybodys(xp, waits):
    other = xp.cuda.Stream(non_blocking=True)
    a = xp.array(np.arange(4.0))
    null = xp.cuda.get_current_stream()
    other.wait_event(null.record())
    with other:
        read = a * 3.0
    if waits:
        null.wait_event(other.record())
    del a
    null.synchronize()
    with other:
        assert np.isnan(read.get()).all() != waits


def test_pinned_memory(xp):
    stream = xp.cuda.Stream(non_blocking=True)
    values = np.arange(5.0)
    a = xp.array(values)
    stream.wait_event(xp.cuda.get_current_stream().record())
    pinned = np.frombuffer(xp.cuda.alloc_pinned_memory(40), np.float64, 5)
    a.get(stream=stream, out=pinned, blocking=False)
    assert np.isnan(pinned).all()
    stream.synchronize()
    assert pinned.tolist() == values.tolist()
    b = xp.empty(5)
    stream.wait_event(xp.cuda.get_current_stream().record())
    b.set(pinned, stream=stream)
    copied = stream.record()
    # Let go before the copy is made of it.
    del pinned
    copied.synchronize()
    assert np.isnan(seen(b)).all()
    # Memory that is not pinned is read, or written, at once.
    b.set(values)
    host = np.empty(5)
    assert b.get(out=host, blocking=False) is host
    assert host.tolist() == values.tolist()


def test_memory_of_messages(xp):
    class Request:
        under_way = True

        def __bool__(self) -> bool:
            return self.under_way

    a, sent, received = xp.zeros(4), Request(), Request()
    xp.cuda.get_current_stream().synchronize()
    xp.lend(a[:2], sent, writes=False)
    xp.lend(a[2:], received, writes=True)
    ((a[:2] + 1.0).get(), xp.zeros(3).get())
    assert xp.complaints == []
    (a[2:] + 1.0).get()
    assert xp.complaints.pop() == "work reads memory that is still being received into"
    a[:1] = 3.0
    xp.cuda.get_current_stream().synchronize()
    assert xp.complaints.pop() == "work writes memory that is still being sent"
    sent.under_way = received.under_way = False
    a += 1.0
    assert a.get().tolist() == [4, 1, 1, 1]
    assert xp.complaints == []


def test_the_host_needs_a_copy(xp):
    a = xp.array(np.arange(3.0))
    host = np.ones(3)
    for refused in (
        lambda: np.asarray(a),
        lambda: np.add(a, host),
        lambda: host + a,
        lambda: a + host,
        lambda: np.add(a, a, out=host),
        lambda: np.add.reduce(a),
    ):
        with pytest.raises(TypeError):
            refused()
    with pytest.raises(TypeError, match="copied to the device"):
        a[...] = np.ones(3)
    for dunder in ("__array_interface__", "__dlpack__", "__buffer__"):
        assert not hasattr(a, dunder)
    with pytest.raises(AttributeError, match="no 'tofile'"):
        _ = a.tofile


@pytest.mark.parametrize("dtype", ["bool", "int8", "complex64", ml_dtypes.bfloat16])
def test_arrays_compute_as_numpys_do(xp, dtype):
    host = (np.arange(24) % 5).astype(dtype).reshape(2, 3, 4)
    a = xp.array(host)
    assert (a.shape, a.dtype, a.ndim, a.size) == (host.shape, host.dtype, 3, 24)
    views = [
        (a.T, host.T),
        (a[1], host[1]),
        (a[:, ::-1, 1:3], host[:, ::-1, 1:3]),
        (a.reshape(6, 4), host.reshape(6, 4)),
        (a.T.reshape(-1), host.T.reshape(-1)),
        (a[1, 2, 3], host[1, 2, 3]),
        (a.view(np.uint8), host.view(np.uint8)),
    ]
    results = [
        (xp.add(a, a), host + host),
        (a.astype("complex128"), host.astype("complex128")),
        (xp.concatenate([a, a], 1), np.concatenate([host, host], 1)),
        (xp.zeros_like(a), np.zeros_like(host)),
    ]
    for got, wanted in [*views, *results]:
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert got.get().tobytes() == wanted.tobytes()
    out = xp.empty((2, 3, 4), dtype)
    assert xp.maximum(a, a, out=out) is out
    assert out.get().tobytes() == host.tobytes()
    assert [row.get().tobytes() for row in a] == [row.tobytes() for row in host]
