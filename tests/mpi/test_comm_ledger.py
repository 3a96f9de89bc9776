"""The ledger counts the user's calls and the bytes that this rank sends."""

from __future__ import annotations

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.comm import agree, algorithms
from tparmpi.comm.ledger import current
from tparmpi.comm.transports.host import HostTransport
from tparmpi.errors import CommunicationError, DataError
from tparmpi.sharding import chunk

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.mark.parametrize("members", [1, 2, 3, 4])
@pytest.mark.parametrize("whole", [0, 2**20])
def test_bytes_do_not_depend_on_the_way(members, whole, monkeypatch):
    monkeypatch.setattr(algorithms, "WHOLE_BYTES", whole)
    group = tpm.group(tpm.devices()[:members])
    if not group.is_member:
        return
    n, me = group.size, group.rank
    array = np.arange(35.0).reshape(7, 5)
    with tpm.ledger() as led:
        group.all_reduce(array)
        group.reduce_scatter(array)
        group.all_gather(array)
        group.all_to_all(array, 0, 1)
        group.barrier()
    if n == 1:
        assert led.count() == 0
        return
    own, rows = chunk(35, n, me)[1], chunk(7, n, me)[1]
    assert led.bytes("all_reduce") == (35 - own + (n - 1) * own) * 8
    assert led.bytes("reduce_scatter") == (7 - rows) * 5 * 8
    assert led.bytes("all_gather") == (n - 1) * 35 * 8
    assert led.bytes("all_to_all") == (7 - rows) * 5 * 8
    assert led.count() == 5
    total = tpm.world() if n == 4 else None
    if total is not None:
        sent = total.all_reduce(np.array(led.bytes("all_reduce")))
        assert sent == 2 * (n - 1) * 35 * 8
    group.close()


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sum_sends_each_part_to_its_owner_and_back(members, dtype, monkeypatch):
    """2 (n - 1) / n of the array leave a rank, in as few messages as pieces allow."""
    sent: list[int] = []
    start = HostTransport.start_send

    def counted(self, pending, flat, member, tag):
        sent.append(flat.nbytes)
        start(self, pending, flat, member, tag)

    monkeypatch.setattr(HostTransport, "start_send", counted)
    monkeypatch.setattr(algorithms, "WHOLE_BYTES", 0)
    group = tpm.group(tpm.devices()[:members])
    if not group.is_member:
        return
    n = group.size
    own = (np.arange(12 * 10_000) % 97).astype(dtype)
    part = own.nbytes // n
    for pieces in (1, 4):
        monkeypatch.setattr(algorithms, "PIECE_BYTES", part // pieces * (n - 1))
        sent.clear()
        group.all_reduce(own)
        assert sum(sent) == 2 * (n - 1) * part
        assert sent == [part // pieces] * (2 * (n - 1) * pieces)
        sent.clear()
        group.reduce_scatter(own)
        assert sent == [part // pieces] * ((n - 1) * pieces)
    sent.clear()
    group.all_gather(own[: own.size // n].copy())
    lengths = [8] * (n - 1)
    assert sent == lengths + [part] * (n - 1)
    group.close()


def test_selection_by_axis_operator_and_site():
    mesh = tpm.mesh(dp=2, tp=2)
    with tpm.ledger() as outer:
        mesh.axis("tp").all_reduce(np.ones(4, np.float32))
        with tpm.ledger() as inner:
            current.operator = "matmul"
            mesh.axis("dp").all_gather(np.ones(2, np.float32))
            current.operator = ""
    mesh.axis("dp").barrier()
    assert (outer.count(), inner.count()) == (2, 1)
    assert outer.count("all_reduce", axis="tp") == 1
    assert outer.count("all_reduce", axis="dp") == 0
    assert outer.bytes(axis="dp", operator="matmul") == 8
    assert outer.seconds() > 0
    assert all(__file__ in record.site for record in outer.records)
    assert "all_gather" in outer.table()
    assert "matmul" in outer.table()
    mesh.close()


def test_messages_are_counted_at_both_ends():
    group = tpm.group(tpm.devices()[:2])
    if group.is_member:
        with tpm.ledger() as led:
            if group.rank == 0:
                group.send(np.arange(10.0), 1)
            else:
                group.recv(0)
        kind = "send" if group.rank == 0 else "recv"
        assert (led.count(kind), led.bytes()) == (1, 80 if group.rank == 0 else 0)
    group.close()


def test_one_members_error_is_raised_on_all():
    agree(None)
    own = (
        DataError(f"no text on {tpm.device().rank}") if tpm.device().rank > 1 else None
    )
    with pytest.raises(DataError, match="no text on 2"):
        agree(own)
    full = OSError(28, "no space left") if tpm.device().rank == 3 else None
    with pytest.raises(CommunicationError, match=r"rank 3: OSError: .*no space left"):
        agree(full)
