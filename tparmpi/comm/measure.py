"""Measures the calls of a group beside what MPI itself does, in one run, in turns.

Other programs on a machine only ever make a call slower, so the time of a call is the
fastest tenth of its batches; the median is given with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from mpi4py import MPI

from tparmpi.comm import progress
from tparmpi.comm.group import Group
from tparmpi.comm.ledger import active, ledger
from tparmpi.comm.tuning import Way
from tparmpi.sharding import chunk_sizes

# Each batch takes about this long, so that the clock and the meeting before it do not
# count.
_BATCH_SECONDS = 0.0005
_LEAST_ROUNDS = 8
_FASTEST = 0.1

Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One call at one size, ours and MPI's.

    Parameters
    ----------
    call : str
    bytes : int
        Of each member's array.
    transport : str
    us, raw_us : float
        Microseconds of a call, and of MPI's.
    median_us, raw_median_us : float
    """

    call: str
    bytes: int
    transport: str
    us: float
    raw_us: float
    median_us: float
    raw_median_us: float

    @property
    def ratio(self) -> float:
        """How many times as fast as MPI's call."""
        return self.raw_us / self.us

    @property
    def gbytes_per_s(self) -> float:
        """Bytes of the member's array by the time, in 10**9 a second."""
        return self.bytes / self.us / 1e3


def in_turns(
    comm: MPI.Intracomm, works: Mapping[str, Work], seconds: float
) -> dict[str, tuple[float, float]]:
    """Return (fastest tenth, median) of each work, in microseconds.

    Collective over `comm`; a time is that of the slowest member.
    """
    once = [_batch(comm, work, 2) for work in works.values()]
    longest = comm.allreduce(max(once), MPI.MAX)
    repeat = max(1, int(_BATCH_SECONDS / longest))
    rounds = max(_LEAST_ROUNDS, int(seconds / (longest * repeat * len(works))))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(_batch(comm, work, repeat))
    return {
        name: (
            comm.allreduce(float(np.quantile(own, _FASTEST)) * 1e6, MPI.MAX),
            comm.allreduce(float(np.median(own)) * 1e6, MPI.MAX),
        )
        for name, own in times.items()
    }


def _batch(comm: MPI.Intracomm, work: Work, repeat: int) -> float:
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - start) / repeat


CALLS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
)


def rows(
    group: Group, calls: Iterable[str], sizes: Sequence[int], seconds: float
) -> Iterable[Row]:
    """Yield a row for each call and size, float32. Collective over the group.

    Parameters
    ----------
    seconds
        What each row may take, about.
    """
    assert group._channel is not None
    transport = group._channel.transport
    for call in calls:
        for nbytes in sizes if call != "barrier" else [0]:
            works = _pair(group, call, nbytes)
            times = in_turns(group.comm, works, seconds)
            (us, median), (raw, raw_median) = times["ours"], times["raw"]
            name = "none" if transport is None else transport.name
            yield Row(call, nbytes, name, us, raw, median, raw_median)


def _pair(group: Group, call: str, nbytes: int) -> dict[str, Work]:
    """Return one of our calls and MPI's of the same effect."""
    comm, n, me = group.comm, group.size, group.rank
    count = max(1, nbytes // 4)
    own = np.arange(count, dtype=np.float32)
    even = count // n * n or n
    if call == "all_reduce":
        # Sums of sums grow; zeros are as fast and do not.
        total = np.zeros_like(own)
        return {
            "raw": lambda: comm.Allreduce(MPI.IN_PLACE, total),
            "ours": lambda: group.all_reduce(own),
        }
    if call == "reduce_scatter":
        counts = list(chunk_sizes(count, n))
        part = np.empty(counts[me], np.float32)
        return {
            "raw": lambda: comm.Reduce_scatter(own, part, counts),
            "ours": lambda: group.reduce_scatter(own),
        }
    if call == "all_gather":
        joined = np.empty(count * n, np.float32)
        sizes = [count] * n
        return {
            "raw": lambda: comm.Allgather(own, joined),
            "ours": lambda: group.all_gather(own, 0, sizes),
        }
    if call == "all_to_all":
        source, target = np.zeros(even, np.float32), np.empty(even, np.float32)
        sizes = [even] * n
        return {
            "raw": lambda: comm.Alltoall(source, target),
            "ours": lambda: group.all_to_all(source, 0, 0, sizes),
        }
    if call == "broadcast":
        given = own if me == 0 else None
        return {
            "raw": lambda: comm.Bcast(own, 0),
            "ours": lambda: group.broadcast(given, 0),
        }
    if call == "gather":
        joined = np.empty(count * n, np.float32)
        return {
            "raw": lambda: comm.Gather(own, joined if me == 0 else None, 0),
            "ours": lambda: group.gather(own, 0),
        }
    if call == "scatter":
        source = np.zeros(even, np.float32)
        part = np.empty(even // n, np.float32)
        given = source if me == 0 else None
        return {
            "raw": lambda: comm.Scatter(given, part, 0),
            "ours": lambda: group.scatter(given, 0),
        }
    if call == "send_recv":
        return {
            "raw": lambda: _raw_ping(comm, own),
            "ours": lambda: _ping(group, own),
        }
    return {"raw": comm.Barrier, "ours": group.barrier}


def _ping(group: Group, array: np.ndarray[Any, Any]) -> None:
    """Send there and back between the first two members."""
    if group.rank == 0:
        group.send(array, 1)
        group.recv(1)
    elif group.rank == 1:
        group.recv(0)
        group.send(array, 0)


def _raw_ping(comm: MPI.Intracomm, array: np.ndarray[Any, Any]) -> None:
    if comm.rank == 0:
        comm.Send(array, 1)
        comm.Recv(array, 1)
    elif comm.rank == 1:
        comm.Recv(array, 0)
        comm.Send(array, 0)


def overlap(
    group: Group, nbytes: int, compute_seconds: float, times: int
) -> dict[str, float]:
    """Return how long a non-blocking sum is waited for after a computation.

    Collective over the group.

    Returns
    -------
    dict
        In milliseconds: ``blocking_ms`` of the call alone; ``wait_ms`` after the
        computation; ``wait_thread_ms`` with the progress thread, if there may be one.
    """
    own = np.arange(nbytes // 4, dtype=np.float32)
    comm = group.comm

    def blocking() -> object:
        return group.all_reduce(own)

    found = {"blocking_ms": in_turns(comm, {"": blocking}, 0.5)[""][0] / 1e3}
    ways = {"": False}
    if progress.may_have_thread():
        ways["thread_"] = True
    for name, wanted in ways.items():
        waits = []
        with progress.thread(wanted=wanted):
            for _ in range(times):
                comm.Barrier()
                handle = group.start.all_reduce(own)
                compute(compute_seconds)
                start = time.perf_counter()
                handle.wait()
                waits.append((time.perf_counter() - start) * 1e3)
        found[f"wait_{name}ms"] = comm.allreduce(float(np.median(waits)), MPI.MAX)
    return found


def compute(seconds: float) -> None:
    """Multiply matrices for so long. Local."""
    side = 256
    a = np.ones((side, side), np.float32)
    out = np.empty_like(a)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        np.matmul(a, a, out=out)


def ledger_cost(group: Group, seconds: float) -> dict[str, float]:
    """Return what the ledger costs. Collective over the group.

    Returns
    -------
    dict
        ``off_us``: of the test that each call makes while none is open;
        ``on_us``: added to an 8-byte ``all_reduce`` by an open one.
    """
    bare = min(_looped(_nothing) for _ in range(_LEAST_ROUNDS))
    off = min(_looped(_look) for _ in range(_LEAST_ROUNDS)) - bare
    own = np.ones(2, np.float32)

    def counted() -> None:
        with ledger():
            group.all_reduce(own)

    times = in_turns(
        group.comm, {"off": lambda: group.all_reduce(own), "on": counted}, seconds
    )
    return {
        "off_us": max(0.0, off * 1e6),
        "on_us": times["on"][0] - times["off"][0],
    }


def _looped(loop: Callable[[int], None]) -> float:
    """Return the seconds of one round of a loop."""
    number = 20_000
    start = time.perf_counter()
    loop(number)
    return (time.perf_counter() - start) / number


def _nothing(number: int) -> None:
    for _ in range(number):
        pass


def _look(number: int) -> None:
    for _ in range(number):
        if active:
            pass


def check_cost(group: Group, seconds: float) -> dict[str, float]:
    """Return what call checking adds to an 8-byte ``all_reduce``.

    Collective over all ranks; calls of groups made later are checked from then on.

    Returns
    -------
    dict
        ``off_us`` and ``on_us``: microseconds of a call.
    """
    from tparmpi.comm.group import make_group
    from tparmpi.comm.runtime import world_state

    state = world_state()
    if state.checker is None:
        state.check_calls()
    checked = make_group(group.devices, "group")
    own = np.ones(2, np.float32)
    times = in_turns(
        group.comm,
        {
            "off": lambda: group.all_reduce(own),
            "on": lambda: checked.all_reduce(own),
        },
        seconds,
    )
    checked.close()
    return {"off_us": times["off"][0], "on_us": times["on"][0]}


# Candidates of the tuning table.
_PIECES = (2**18, 2**19, 2**20, 2**21, 2**22)
_USUAL_PIECE = 2**21
_SMALLEST, _LARGEST_WHOLE, _SMALLEST_IN_PIECES = 64, 2**24, 2**22


def tune(group: Group, largest: int, seconds: float) -> Way:
    """Return the way that sums of such a group go fastest. Collective over the group.

    Parameters
    ----------
    largest
        Bytes of the largest array that is measured.
    seconds
        What each measurement may take, about.
    """
    channel = group._channel
    assert channel is not None
    n = group.size
    nodes = len({device.host for device in group.devices})
    before = channel.way

    def timed(nbytes: int, ways: Mapping[str, Way]) -> dict[str, float]:
        own = np.arange(max(1, nbytes // 4), dtype=np.float32)

        def work(way: Way) -> Work:
            def call() -> None:
                group.take_way(way)
                group.all_reduce(own)

            return call

        works = {name: work(way) for name, way in ways.items()}
        return {k: v[0] for k, v in in_turns(group.comm, works, seconds).items()}

    try:
        whole = 0
        nbytes = _SMALLEST
        while nbytes <= min(largest, _LARGEST_WHOLE):
            limit = nbytes * (n - 1)
            choice = {
                "whole": Way(n, nodes, limit, _USUAL_PIECE),
                "pieces": Way(n, nodes, 0, _USUAL_PIECE),
            }
            found = timed(nbytes, choice)
            if found["whole"] > found["pieces"]:
                break
            # Up to the middle between this size and the next.
            whole = 2 * limit
            nbytes *= 4
        losses = dict.fromkeys(_PIECES, 0.0)
        nbytes = _SMALLEST_IN_PIECES
        while nbytes <= largest:
            found = timed(nbytes, {str(p): Way(n, nodes, 0, p) for p in _PIECES})
            for piece in _PIECES:
                losses[piece] += log(found[str(piece)])
            nbytes *= 4
        piece = min(losses, key=lambda p: (losses[p], abs(p - _USUAL_PIECE)))
        return Way(n, min(nodes, 2), whole, piece)
    finally:
        group.take_way(before)
