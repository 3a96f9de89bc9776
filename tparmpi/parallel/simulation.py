"""Running a schedule on paper: who works when, what is live, and whether it ends.

Nothing is buffered between stages: a message passes only when its receiver has come to
the work that needs it. A sender goes on meanwhile, but before its next message to the
same neighbour the last one must have passed. What ends here ends on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tparmpi.errors import UsageError
from tparmpi.parallel.schedules import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Instruction,
    Schedule,
)

SECONDS: Mapping[str, float] = {
    FORWARD: 1.0,
    BACKWARD: 2.0,
    INPUT_GRADIENT: 1.0,
    WEIGHT_GRADIENT: 1.0,
}
"""Usual times: a backward is two products for the forward's one."""


class Event(NamedTuple):
    """A piece of work, when it began and when it ended."""

    work: Instruction
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a simulated step did.

    Attributes
    ----------
    events
        For each stage its work in order.
    live
        For each stage the most (microbatch, chunk) pairs whose forward had run and
        whose gradients had not all been computed.
    """

    events: tuple[tuple[Event, ...], ...]
    live: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """End of the last piece of work."""
        return max((events[-1].end for events in self.events if events), default=0.0)

    @property
    def bubble(self) -> float:
        """Most time that a stage spends without work."""
        return max(
            self.seconds - sum(event.end - event.begin for event in events)
            for events in self.events
        )


class _Message(NamedTuple):
    """What travels: the kind of work that it is for, there."""

    kind: str
    microbatch: int
    chunk: int


def simulate(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    seconds: Mapping[str, float] | Sequence[Mapping[str, float]] = SECONDS,
) -> Timeline:
    """Return what `schedule` does with `microbatches` on `stages`. Local.

    Parameters
    ----------
    chunks
        Chunks of layers a stage.
    seconds
        Time of each kind of work for the layers of one chunk; one mapping for each
        stage where stages differ.

    Raises
    ------
    UsageError
        If the schedule deadlocks, computes something twice or not at all, or lets
        messages cross.
    """
    programs = [
        list(schedule(stage, stages, microbatches, chunks)) for stage in range(stages)
    ]
    for stage, program in enumerate(programs):
        _check_complete(stage, program, microbatches, chunks)
    times = [seconds] * stages if isinstance(seconds, Mapping) else seconds
    run = _Run(programs, stages, chunks, times)
    while run.advance():
        pass
    if not run.is_done:
        raise UsageError(f"the schedule deadlocks: {run.describe_stuck()}")
    live = tuple(map(_most_live, programs))
    return Timeline(tuple(map(tuple, run.events)), live)


class _Run:
    """The state of all stages and of the messages between them."""

    def __init__(
        self,
        programs: Sequence[Sequence[Instruction]],
        stages: int,
        chunks: int,
        seconds: Sequence[Mapping[str, float]],
    ) -> None:
        self.programs = programs
        self.stages = stages
        self.last = stages * chunks - 1
        self.seconds = seconds
        self.at = [0] * stages
        self.clock = [0.0] * stages
        self.events: list[list[Event]] = [[] for _ in range(stages)]
        # By (from, to, kind): the message on its way, and when it was sent.
        self.sent: dict[tuple[int, int, str], tuple[_Message, float]] = {}
        self.unsent: list[tuple[tuple[int, int, str], _Message] | None]
        self.unsent = [None] * stages

    @property
    def is_done(self) -> bool:
        return not self.sent and all(
            at == len(program)
            for at, program in zip(self.at, self.programs, strict=True)
        )

    def advance(self) -> bool:
        """Let every stage go as far as it can; return whether any did anything."""
        moved = False
        for stage in range(self.stages):
            moved |= self._advance(stage)
        return moved

    def describe_stuck(self) -> str:
        """Say what each unfinished stage waits for."""
        waits = []
        for stage, at in enumerate(self.at):
            waiting = self.unsent[stage]
            if waiting is not None:
                (_, to, _), message = waiting
                waits.append(f"stage {stage} waits to send {message} to stage {to}")
            elif at < len(self.programs[stage]):
                waits.append(f"stage {stage} waits before {self.programs[stage][at]}")
        return "; ".join(waits)

    def _advance(self, stage: int) -> bool:
        moved = False
        while self._send(stage) and self.at[stage] < len(self.programs[stage]):
            work = self.programs[stage][self.at[stage]]
            if not self._receive(stage, work):
                break
            begin = self.clock[stage]
            end = begin + self.seconds[stage][work.kind]
            self.clock[stage] = end
            self.events[stage].append(Event(work, begin, end))
            self.at[stage] += 1
            self.unsent[stage] = self._result_of(stage, work)
            moved = True
        return moved

    def _send(self, stage: int) -> bool:
        """Post the waiting message; False where the one before has not passed."""
        waiting = self.unsent[stage]
        if waiting is None:
            return True
        edge, message = waiting
        if edge in self.sent:
            return False
        self.sent[edge] = message, self.clock[stage]
        self.unsent[stage] = None
        return True

    def _receive(self, stage: int, work: Instruction) -> bool:
        """Take what `work` needs; False where it is not there yet."""
        virtual = work.chunk * self.stages + stage
        if work.kind == FORWARD and virtual > 0:
            source = (virtual - 1) % self.stages
        elif work.kind in (BACKWARD, INPUT_GRADIENT) and virtual < self.last:
            source = (virtual + 1) % self.stages
        else:
            return True
        direction = FORWARD if work.kind == FORWARD else BACKWARD
        edge = (source, stage, direction)
        if edge not in self.sent:
            return False
        message, when = self.sent.pop(edge)
        expected = _Message(direction, work.microbatch, work.chunk)
        if message != expected:
            raise UsageError(
                f"the schedule lets messages cross: stage {stage} needs {expected}, "
                f"stage {source} sends {message}"
            )
        self.clock[stage] = max(self.clock[stage], when)
        return True

    def _result_of(
        self, stage: int, work: Instruction
    ) -> tuple[tuple[int, int, str], _Message] | None:
        virtual = work.chunk * self.stages + stage
        if work.kind == FORWARD and virtual < self.last:
            direction, target = FORWARD, virtual + 1
        elif work.kind in (BACKWARD, INPUT_GRADIENT) and virtual > 0:
            direction, target = BACKWARD, virtual - 1
        else:
            return None
        chunk, to = divmod(target, self.stages)
        return (stage, to, direction), _Message(direction, work.microbatch, chunk)


def _check_complete(
    stage: int, program: Sequence[Instruction], microbatches: int, chunks: int
) -> None:
    """Refuse a program that lacks work, repeats it, or has a gradient too early."""
    done: set[Instruction] = set()
    for work in program:
        before = {
            FORWARD: None,
            BACKWARD: FORWARD,
            INPUT_GRADIENT: FORWARD,
            WEIGHT_GRADIENT: INPUT_GRADIENT,
        }[work.kind]
        if work in done:
            raise UsageError(f"the schedule has {work} twice on stage {stage}")
        if before is not None and work._replace(kind=before) not in done:
            raise UsageError(
                f"the schedule has {work} on stage {stage} before its {before}"
            )
        done.add(work)
    kinds = {work.kind for work in done}
    for kind in kinds | {FORWARD}:
        count = sum(work.kind == kind for work in done)
        if count != microbatches * chunks:
            raise UsageError(
                f"the schedule has {count} of {microbatches * chunks} {kind}s on "
                f"stage {stage}"
            )


def _most_live(program: Sequence[Instruction]) -> int:
    split = any(work.kind == WEIGHT_GRADIENT for work in program)
    last = WEIGHT_GRADIENT if split else BACKWARD
    live = most = 0
    for work in program:
        live += (work.kind == FORWARD) - (work.kind == last)
        most = max(most, live)
    return most
