"""Transports of GPUs keep the order between streams and messages.

Each way of breaking that order must be seen by the scenarios below: they run once as
the transports are, and once for each way of breaking them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import pytest

import tparmpi as tpm
from tests.ways import Way
from tparmpi.comm import algorithms
from tparmpi.comm.group import Group
from tparmpi.comm.runtime import world_state
from tparmpi.comm.transports import cuda_aware, lanes, staged, streams
from tparmpi.errors import UsageError

pytestmark = pytest.mark.mpi(min_size=4)

# Bytes of a piece: small arrays take many.
PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(algorithms, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(algorithms, "WHOLE_BYTES", PIECE)
    monkeypatch.setattr(staged, "STAGE_BYTES", PIECE)


class Scene:
    """One rank's part in a scenario: what it computes with, what it found wrong."""

    def __init__(self, way: Way, group: Group) -> None:
        assert way.device is not None
        self.way = way
        self.group = group
        self.xp = way.device
        self.wrong: list[str] = []
        self._values = 0

    def stream(self) -> Any:
        return self.way.stream()

    def new(self, size: int = 96) -> tuple[Any, list[np.ndarray]]:
        """An array that late work makes, and every member's values."""
        self._values += 1
        start = self._values * 1000.0
        values = [
            np.arange(size, dtype=np.float64) + start + member * 100_000
            for member in range(self.group.size)
        ]
        return self.way.put(values[self.group.rank] / 2) * 2.0, values

    def see(self, what: str, got: Any, wanted: np.ndarray) -> None:
        """Compare what is there when the current stream has come to it."""
        if not np.array_equal(got.get(), wanted):
            self.wrong.append(what)


def late_input(scene: Scene) -> None:
    """The input is still computed, and what is made of the result is late too."""
    with scene.stream():
        own, values = scene.new()
        total = scene.group.all_reduce(own)
        scene.see("sum of a late input", total + 1.0, sum(values) + 1.0)
        own, values = scene.new(3)
        total = scene.group.all_reduce(own)
        scene.see("small sum of a late input", total + 1.0, sum(values) + 1.0)
        own, values = scene.new()
        joined = scene.group.all_gather(own)
        scene.see("join of late inputs", joined * 2.0, np.concatenate(values) * 2)
        own, values = scene.new()
        got = scene.group.broadcast(own, 1)
        scene.see("copy of a late input", got * 2.0, values[1] * 2)


def input_changed_after(scene: Scene) -> None:
    """The input gets other values after the call, which sends the old ones."""
    with scene.stream():
        own, values = scene.new()
        total = scene.group.all_reduce(own)
        own[...] = 7.0
        scene.see("sum of an input that changes later", total, sum(values))
        own, values = scene.new()
        handle = scene.group.start.all_gather(own)
        joined = handle.wait()
        own[...] = 7.0
        scene.see("join of inputs that change later", joined, np.concatenate(values))


def result_dropped_early(scene: Scene) -> None:
    """A result is let go while late work still reads it, and another call follows."""
    with scene.stream():
        own, values = scene.new()
        result = scene.group.all_reduce(own)
        # Nothing of the library holds it any more.
        scene.way.settle(scene.group._channel.transport)
        read = result * 3.0
        del result
        own, more = scene.new()
        again = scene.group.all_reduce(own)
        scene.see("what was made of a result let go", read, sum(values) * 3)
        scene.see("the call after", again, sum(more))


def memory_still_read(scene: Scene) -> None:
    """Results go where late work still reads what was there before."""
    n = scene.group.size
    with scene.stream():
        before = np.arange(96.0 * n)
        buffer = scene.way.put(before)
        read = buffer + 1.0
        own, values = scene.new()
        scene.group.all_gather(own, out=buffer)
        scene.see("what was made of `out` before", read, before + 1)
        scene.see("`out`", buffer, np.concatenate(values))
        # The same with memory that is allocated again.
        junk = scene.way.put(before)
        read = junk + 2.0
        del junk
        own, values = scene.new()
        joined = scene.group.all_gather(own)
        scene.see("what was made of memory let go", read, before + 2)
        scene.see("the join in it", joined, np.concatenate(values))


def another_stream(scene: Scene) -> None:
    """Started on one stream, waited for on another; the input is let go at once."""
    with scene.stream():
        own, values = scene.new()
        handle = scene.group.start.all_reduce(own)
        del own
    with scene.stream():
        total = handle.wait()
        scene.see("a result on another stream", total * 1.0, sum(values))
        total.get()
    with scene.stream():
        own, values = scene.new(3)
        handle = scene.group.start.all_reduce(own)
    with scene.stream():
        scene.see("a small one on another stream", handle.wait() * 1.0, sum(values))
    with scene.stream():
        own, values = scene.new()
        handle = scene.group.start.reduce_scatter(own, 0, "max")
        own, more = scene.new()
        total = scene.group.all_reduce(own)
        scene.see("a call beside another", total, sum(more))
        size = 96 // scene.group.size
        start = size * scene.group.rank
        scene.see("the other", handle.wait(), values[-1][start : start + size])


def input_let_go(scene: Scene) -> None:
    """Nobody but the library holds the input of a call under way."""
    with scene.stream():
        for size in (3, 96):
            own, values = scene.new(size)
            handle = scene.group.start.all_reduce(own)
            del own
            scene.see(f"sum of {size} let go", handle.wait(), sum(values))


def refused_input(scene: Scene) -> None:
    """What a refused call has already begun to read is let go by nobody else."""
    with scene.stream():
        own, values = scene.new()
        with pytest.raises(UsageError):
            scene.group.all_reduce(own[::2], "product")
        del own
        own, values = scene.new()
        scene.see("sum after a refusal", scene.group.all_reduce(own), sum(values))


def later_work(scene: Scene) -> None:
    """The library waits for what came before a call, never for what comes after."""
    with scene.stream() as mine:
        own, values = scene.new()
        handle = scene.group.start.all_reduce(own)
        before = mine.queued
        later = scene.way.put(np.zeros(3)) + 1.0
        total = handle.wait()
        # A checked call makes room for its result once all members are there.
        if mine.finished > before and world_state().checker is None:
            scene.wrong.append("what comes after the call was waited for")
        scene.see("a sum before other work", total, sum(values))
        scene.see("the other work", later, np.ones(3))


SCENARIOS = [
    late_input,
    input_changed_after,
    result_dropped_early,
    memory_still_read,
    another_stream,
    input_let_go,
    refused_input,
    later_work,
]


def play(way: Way, scenario: Callable[[Scene], None], ranks: list[int]) -> list[str]:
    """What any rank finds wrong in a scenario. Collective over all ranks."""
    group = way.group(ranks)
    wrong: list[str] = []
    if group.is_member:
        scene = Scene(way, group)
        scenario(scene)
        assert way.device is not None
        wrong = scene.wrong + way.device.complaints
        way.device.complaints.clear()
    found = tpm.world().all_gather_object(wrong)
    return sorted({what for of_rank in found for what in of_rank})


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("ranks", [[1, 0], [2, 0, 1], [3, 1, 0, 2]], ids=len)
@pytest.mark.parametrize("name", ["cuda_aware", "staged"])
def test_order_is_kept(name, scenario, ranks, monkeypatch):
    way = Way(name, monkeypatch)
    assert play(way, scenario, ranks) == []
    way.check()
    way.close()


# Ways of breaking it

Break = Callable[[pytest.MonkeyPatch], None]


def always(*_: object) -> bool:
    return True


def sent_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    """A missing synchronise before messages of device memory."""
    patch.setattr(cuda_aware._Direct, "is_ready", always)


def sent_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    """A missing synchronise between a copy and its message."""
    patch.setattr(staged._Outgoing, "is_ready", always)


def caller_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A missing event wait before the library's work."""
    plain = streams.Turn.__init__

    def init(self: Any, of: Any) -> None:
        with without(of, "follow"):
            plain(self, of)

    patch.setattr(streams.Turn, "__init__", init)
    memory_taken_at_once(patch)


def caller_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A missing event wait after the library's work."""

    def drive(self: Any, steps: Any, *_: Any) -> Any:
        while True:
            with self:
                try:
                    pending = next(steps)
                except StopIteration as stop:
                    return stop.value
            yield pending

    patch.setattr(streams.Turn, "drive", drive)


def other_stream_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A missing event wait on the stream that waits for a handle."""
    patch.setattr(streams.Turn, "hand_over", lambda self: None)


def inputs_not_kept(patch: pytest.MonkeyPatch) -> None:
    """The input goes back to the caller's stream before that waits."""
    plain = streams.Turn.drive
    patch.setattr(streams.Turn, "drive", lambda self, steps, *_: plain(self, steps))


def results_not_the_callers(patch: pytest.MonkeyPatch) -> None:
    """Results in memory of the library's stream, which uses it again at once."""

    def empty(self: Any, shape: Any, dtype: Any) -> Any:
        return self._streams.xp.empty(shape, dtype)

    patch.setattr(streams.Turn, "empty", empty)


def memory_taken_at_once(patch: pytest.MonkeyPatch) -> None:
    """A missing event wait after results are allocated."""

    def empty(self: Any, shape: Any, dtype: Any) -> Any:
        with self._caller:
            array = self._streams.xp.empty(tuple(shape), dtype)
        self._made.append(array)
        return array

    patch.setattr(streams.Turn, "empty", empty)


def received_too_early(patch: pytest.MonkeyPatch) -> None:
    """A receive into device memory that is still to be read."""
    plain = cuda_aware._Direct.is_ready

    def is_ready(self: Any) -> bool:
        return self._start.__name__ == "Irecv" or plain(self)

    patch.setattr(cuda_aware._Direct, "is_ready", is_ready)


def copied_up_too_early(patch: pytest.MonkeyPatch) -> None:
    """A copy into device memory that is still to be read."""
    plain = staged._Incoming.land

    def land(self: Any) -> None:
        with without(self.streams.up, "wait_event"):
            plain(self)

    patch.setattr(staged._Incoming, "land", land)


def copied_down_too_early(patch: pytest.MonkeyPatch) -> None:
    """A copy of device memory that is still to be written."""
    plain = staged._Outgoing.begin

    def begin(self: Any) -> None:
        with without(self.streams.down, "wait_event"):
            plain(self)

    patch.setattr(staged._Outgoing, "begin", begin)


def used_before_it_is_up(patch: pytest.MonkeyPatch) -> None:
    """A missing event wait between a copy up and the sum of it."""
    plain = staged._Incoming.land

    def land(self: Any) -> None:
        with without(self.streams.work, "wait_event"):
            plain(self)

    patch.setattr(staged._Incoming, "land", land)


def pinned_let_go_too_early(patch: pytest.MonkeyPatch) -> None:
    """Pinned memory that goes back while a copy still reads it."""
    plain = staged._Incoming.land

    def land(self: Any) -> None:
        plain(self)
        self.pinned = None

    patch.setattr(staged._Incoming, "land", land)


def sent_out_of_order(patch: pytest.MonkeyPatch) -> None:
    """Messages overtake those before them."""
    plain = lanes.Lanes.add

    def add(self: Any, name: Any, message: Any) -> None:
        if name[0] == "from":
            plain(self, name, message)
        else:
            lane = self._lanes.setdefault(name, lanes.Lane(self._window))
            lane._waiting.appendleft(message)

    patch.setattr(lanes.Lanes, "add", add)


def event_of_another_stream(patch: pytest.MonkeyPatch) -> None:
    """Messages that wait for a stream which has nothing to do with their memory."""
    plain = streams.Streams.event

    def event(self: Any, stream: Any) -> Any:
        return plain(self, self.down if stream is self.work else stream)

    patch.setattr(streams.Streams, "event", event)


def without(of: Any, name: str) -> AbstractContextManager[None]:
    """One method of one object does nothing meanwhile."""
    stack = ExitStack()
    setattr(of, name, lambda *_: None)
    stack.callback(delattr, of, name)
    return stack


BREAKS: list[tuple[str, Break]] = [
    ("cuda_aware", sent_before_it_is_there),
    ("cuda_aware", received_too_early),
    ("staged", sent_before_it_is_copied),
    ("staged", copied_down_too_early),
    ("staged", copied_up_too_early),
    ("staged", used_before_it_is_up),
    ("staged", pinned_let_go_too_early),
    *(
        (name, broken)
        for name in ("cuda_aware", "staged")
        for broken in (
            caller_not_waited_for,
            caller_does_not_wait,
            other_stream_does_not_wait,
            inputs_not_kept,
            results_not_the_callers,
            memory_taken_at_once,
            event_of_another_stream,
            sent_out_of_order,
        )
    ),
]


@pytest.mark.parametrize(
    ("name", "broken"), BREAKS, ids=lambda b: b if isinstance(b, str) else b.__name__
)
def test_every_break_is_seen(name, broken, monkeypatch):
    way = Way(name, monkeypatch)
    broken(monkeypatch)
    seen = {
        scenario.__name__: found
        for scenario in SCENARIOS
        if (found := play(way, scenario, [2, 0, 1]))
    }
    way.close()
    assert seen
