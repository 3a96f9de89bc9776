"""Calls that do not belong together: all members raise the same error, in time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import tparmpi as tpm
from tparmpi.comm.check import Checker
from tparmpi.comm.headers import header_of
from tparmpi.comm.runtime import world_state
from tparmpi.errors import CollectiveMismatchError, CommunicationError, UsageError

pytestmark = pytest.mark.mpi(min_size=4)

SECONDS = 5.0
FOUR = np.arange(4.0)

# The checker of all tests here: late words to an old one would reach a new one.
kept: list[Checker] = []


@pytest.fixture(autouse=True)
def checking(together: None) -> Iterator[None]:
    """Groups made in a test check their calls; those of other tests do not."""
    state = world_state()
    before = state.checker
    if before is None and not kept:
        state.check_calls()
        kept.append(state.checker)
    state.checker = before or kept[0]
    yield
    state.checker = before


@pytest.fixture
def make(checking: None) -> Iterator:
    """Makes groups of ranks that are closed when the test ends."""
    made = []

    def group(*ranks: int) -> tpm.Group:
        made.append(tpm.group([tpm.devices()[rank] for rank in ranks]))
        return made[-1]

    everybody = tpm.world().comm
    yield group
    # Not a call of the library: who waits for ranks that cannot go on raises as well.
    everybody.Barrier()
    for group in made:
        group.close()


def mismatch(call) -> str:
    """The text of the error that a call ends with."""
    began = time.monotonic()
    with pytest.raises(CollectiveMismatchError) as caught:
        call()
    assert time.monotonic() - began < SECONDS
    return str(caught.value)


def everybody_says(text: str) -> None:
    """All ranks were told the same."""
    assert len(set(tpm.world().all_gather_object(text))) == 1


def here() -> int:
    return tpm.device().rank


DIFFERENT = {
    "shape": (
        lambda group, odd: group.all_reduce(np.zeros(5) if odd else FOUR),
        ("float64 (5,)", "float64 (4,)"),
    ),
    "dtype": (
        lambda group, odd: group.all_reduce(FOUR.astype("f4") if odd else FOUR),
        ("float32 (4,)", "float64 (4,)"),
    ),
    "byte order": (
        lambda group, odd: group.all_reduce(FOUR.astype(">f8") if odd else FOUR),
        (">f8 (4,)", "float64 (4,)"),
    ),
    "operation": (
        lambda group, odd: group.all_reduce(FOUR, "max" if odd else "sum"),
        ("op=max", "op=sum"),
    ),
    "root": (
        lambda group, odd: group.broadcast(FOUR, root=int(odd)),
        ("root=1", "root=0"),
    ),
    "call": (
        lambda group, odd: group.broadcast(FOUR) if odd else group.all_reduce(FOUR),
        ("broadcast(float64 (4,), root=0)", "all_reduce(float64 (4,), op=sum)"),
    ),
    "dim": (
        lambda group, odd: group.reduce_scatter(np.eye(4), dim=int(odd)),
        ("dim=1", "dim=0"),
    ),
    "other dim": (
        lambda group, odd: group.all_gather(np.zeros((2, 3 + odd)), 0),
        ("float64 (2, 4)", "float64 (2, 3)"),
    ),
    "sizes": (
        lambda group, odd: group.all_gather(
            np.zeros(2), sizes=None if odd else [2] * group.size
        ),
        ("sizes=None", "sizes=(2"),
    ),
    "object": (
        lambda group, odd: group.broadcast_object(1) if odd else group.barrier(),
        ("broadcast_object", "barrier()"),
    ),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", DIFFERENT)
def test_what_members_call_must_be_the_same(case, size, make):
    call, texts = DIFFERENT[case]
    group = make(*range(size))
    if not group.is_member:
        return
    odd = group.size - 1
    text = mismatch(lambda: call(group, group.rank == odd))
    told = group.all_gather_object(text)
    assert told == [text] * group.size
    for part in texts:
        assert part in text
    assert f"rank {odd} calls" in text
    assert text.count("test_comm_check.py:") >= 2
    # Nothing was sent, and all have made as many calls: the group goes on.
    assert group.all_reduce(np.array(here())) == sum(range(size))


def test_the_lines_of_both_sides_are_named(make):
    group = make(0, 1, 2, 3)
    if here() == 2:
        text = mismatch(lambda: group.barrier())
    else:
        text = mismatch(lambda: group.all_reduce(FOUR))
    everybody_says(text)
    lines = [part.split()[0].rstrip(";,") for part in text.split(".py:")[1:]]
    assert len(set(lines)) == 2
    assert "rank 2 calls barrier()" in text
    assert "ranks 0, 1, 3 call all_reduce" in text


def test_what_may_differ(make):
    group = make(2, 0, 3, 1)
    rows = np.full((group.rank, 2), here())
    joined = group.all_gather(rows)
    assert joined[:, 0].tolist() == [0, 3, 3, 1, 1, 1]
    assert group.gather(rows, root=1) is None or group.rank == 1
    moved = group.all_to_all(np.full((4, group.rank), here()), 0, 1)
    assert moved.shape == (1, 6)
    assert group.broadcast(FOUR if group.rank == 3 else None, 3).tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert group.scatter(FOUR if group.rank == 0 else None).tolist() == [group.rank]
    if group.rank == 0:
        group.send(FOUR, 1)
    if group.rank == 1:
        assert group.recv(0).tolist() == [0, 1, 2, 3]
    half = np.ones(3, ml_dtypes.bfloat16)
    handle = group.start.all_reduce(half)
    assert handle.wait().tolist() == [4.0] * 3


def test_a_refused_call_is_refused_after_the_comparison(make):
    group = make(0, 1, 2, 3)
    with pytest.raises(UsageError, match="op"):
        group.all_reduce(FOUR, "product")
    assert group.all_reduce(np.array(1)) == 4


def test_the_wrong_group(make):
    """Three ranks wait for each other in a circle."""
    groups = [make(0, 1), make(1, 2), make(0, 2)]
    if here() == 3:
        return
    text = mismatch(lambda: groups[here()].all_reduce(FOUR))
    for rank, other, ranks in ((0, 1, "0, 1"), (1, 2, "1, 2"), (2, 0, "0, 2")):
        assert f"rank {rank} waits for rank {other} in all_reduce" in text
        assert f"of ranks ({ranks})" in text


def test_the_wrong_group_with_a_member_that_is_elsewhere(make):
    """Rank 0 calls on (0, 1), rank 1 on (1, 2), and rank 2 waits for rank 0."""
    one, two, all_three = make(0, 1), make(1, 2), make(0, 1, 2)
    calls = [one.barrier, two.barrier, all_three.barrier]
    if here() == 3:
        return
    text = mismatch(calls[here()])
    assert "rank 0 waits for rank 1 in barrier()" in text
    assert "rank 1 waits for rank 2 in barrier()" in text


def test_two_groups_in_different_order(make):
    one, two = make(0, 1, 2, 3), make(0, 1, 2, 3)
    first, second = (two, one) if here() == 3 else (one, two)
    text = mismatch(first.barrier)
    assert "rank 3 waits for ranks 0, 1, 2" in text
    assert text.count("test_comm_check.py:") >= 2
    # The other call is missing on no rank: it was made by none.
    del second


def test_two_groups_in_different_order_without_blocking(make):
    """Operations that are waited for later may begin in any order."""
    one, two = make(0, 1, 2, 3), make(0, 1, 2, 3)
    order = (two, one) if here() % 2 else (one, two)
    handles = {id(g): g.start.all_reduce(np.array(3 if g is one else 5)) for g in order}
    assert handles[id(two)].wait() == 20
    assert handles[id(one)].wait() == 12


def test_a_handle_that_is_waited_for(make):
    group = make(0, 1, 2, 3)
    handle = group.start.all_reduce(np.zeros(3 + (here() == 1)))
    text = mismatch(handle.wait)
    everybody_says(text)
    assert "rank 1 calls all_reduce(float64 (4,), op=sum)" in text
    assert group.all_reduce(np.array(1)) == 4


def test_a_started_call_is_refused(make):
    """By its start where all others have come before, else by its wait."""
    group = make(0, 1, 2, 3)
    with pytest.raises(UsageError, match="op"):
        group.start.all_reduce(FOUR, "product").wait()


def test_messages_that_cross(make):
    group = make(0, 1)
    if not group.is_member:
        return
    text = mismatch(lambda: group.send(FOUR, 1 - group.rank))
    assert "rank 0 waits for rank 1 in send(float64 (4,), to=1)" in text
    assert "rank 1 waits for rank 0 in send(float64 (4,), to=0)" in text


def test_a_member_that_comes_late_is_waited_for(make):
    group = make(0, 1, 2, 3)
    if here() == 2:
        time.sleep(1.5)
    assert group.all_reduce(np.array(1)) == 4


def test_waiting_for_one_who_waits_for_one_who_is_busy(make):
    one, two = make(0, 1), make(1, 2)
    if here() == 2:
        time.sleep(1.5)
    if here() in (1, 2):
        assert two.all_reduce(np.array(1)) == 2
    if here() in (0, 1):
        assert one.all_reduce(np.array(1)) == 2


def test_a_mismatch_is_an_error_of_communication():
    assert issubclass(CollectiveMismatchError, CommunicationError)


def test_every_call_has_a_header():
    assert header_of("all_reduce", (1.5, "sum", None)).text == (
        "all_reduce(float64 (), op=sum)"
    )
    sent = header_of("send", (np.zeros(3, "i4"), 2))
    assert sent.text == "send(int32 (3,), to=2)"
    assert sent.compared == header_of("recv", (0, None)).compared
