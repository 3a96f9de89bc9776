"""Pipeline schedules: for each stage, in which order its work is done.

A schedule is a pure generator of instructions. What travels between stages follows from
them: a forward needs the signal of the stage before and sends its own on, a backward
needs the gradient of the stage after and sends its own back. With several chunks a rank
holds the layers of several virtual stages: chunk c of stage s is virtual stage
``c * stages + s``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tparmpi.errors import UsageError

FORWARD = "forward"
BACKWARD = "backward"
INPUT_GRADIENT = "input_gradient"
WEIGHT_GRADIENT = "weight_gradient"


class Instruction(NamedTuple):
    """One piece of a stage's work.

    Attributes
    ----------
    kind
        ``"forward"``, ``"backward"``, or its two halves ``"input_gradient"`` and
        ``"weight_gradient"``.
    microbatch, chunk
        Which microbatch, and which of the stage's chunks of layers.
    """

    kind: str
    microbatch: int
    chunk: int = 0


Schedule = Callable[[int, int, int, int], Iterator[Instruction]]
"""Called with stage, stages, microbatches and chunks."""


def gpipe(
    stage: int, stages: int, microbatches: int, chunks: int = 1
) -> Iterator[Instruction]:
    """All forwards, then all backwards. Huang et al., "GPipe" (2019).

    Live microbatches: all of them. With F + B = 1 a step takes m + p - 1, with several
    chunks m + (p - 1) / v where p divides m.
    """
    yield from _in_groups(FORWARD, stages, microbatches, range(chunks))
    yield from _in_groups(BACKWARD, stages, microbatches, range(chunks)[::-1])


def one_f_one_b(
    stage: int, stages: int, microbatches: int, chunks: int = 1
) -> Iterator[Instruction]:
    """One forward, one backward in turns. Narayanan et al., "PipeDream" (2019, 2021).

    Live microbatches on stage s of p: at most min(m, p - s). With F + B = 1 a step
    takes m + p - 1.
    """
    _refuse_chunks("1f1b", chunks)
    ahead = min(stages - 1 - stage, microbatches)
    for microbatch in range(ahead):
        yield Instruction(FORWARD, microbatch)
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Instruction(FORWARD, microbatch + ahead)
        yield Instruction(BACKWARD, microbatch)


def interleaved(
    stage: int, stages: int, microbatches: int, chunks: int = 2
) -> Iterator[Instruction]:
    """1F1B over several chunks a stage. Narayanan et al., "Megatron-LM" (2021).

    Microbatches go in groups of p, the last of which may be smaller: a group passes
    chunk 0, then chunk 1, and so on; its backwards pass the last chunk first. Live on
    stage 0: at most p + (p - 1) / v microbatches' worth of layers. With F + B = 1 a
    step takes m + (p - 1) / v where p divides m.
    """
    whole = -(-microbatches // stages) * stages
    forwards = list(_in_groups(FORWARD, stages, whole, range(chunks)))
    backwards = list(_in_groups(BACKWARD, stages, whole, range(chunks)[::-1]))
    ahead = stages - 1 - stage
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += forwards[ahead + number : ahead + number + 1]
        order.append(backward)
    # The last group is completed with microbatches that do not exist.
    yield from (work for work in order if work.microbatch < microbatches)


def zero_bubble(
    stage: int, stages: int, microbatches: int, chunks: int = 1
) -> Iterator[Instruction]:
    """1F1B with weight gradients put off into the bubble: ZB-H1.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023). Stage s puts off the weight
    gradients of s microbatches. Live on stage s of p: at most min(m, p - s)
    microbatches whose input gradient is still to come, and min(m, p) with those whose
    weight gradient is. The bubble is (p - 1)(F + B - W), where B is the time of an
    input gradient, W of a weight gradient.
    """
    _refuse_chunks("zero_bubble", chunks)
    ahead = min(stages - 1 - stage, microbatches)
    for microbatch in range(ahead):
        yield Instruction(FORWARD, microbatch)
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Instruction(FORWARD, microbatch + ahead)
        yield Instruction(INPUT_GRADIENT, microbatch)
        if microbatch >= stage:
            yield Instruction(WEIGHT_GRADIENT, microbatch - stage)
    for microbatch in range(max(microbatches - stage, 0), microbatches):
        yield Instruction(WEIGHT_GRADIENT, microbatch)


def forward_only(
    stage: int, stages: int, microbatches: int, chunks: int = 1
) -> Iterator[Instruction]:
    """Forwards alone, in groups as `interleaved` has them. Nothing stays live."""
    yield from _in_groups(FORWARD, stages, microbatches, range(chunks))


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
"""Those that train, by the names that users give."""


def _in_groups(
    kind: str, stages: int, microbatches: int, chunks: range
) -> Iterator[Instruction]:
    """Groups of microbatches, one for each stage, through all chunks in turn."""
    for first in range(0, microbatches, stages):
        for chunk in chunks:
            for microbatch in range(first, min(first + stages, microbatches)):
                yield Instruction(kind, microbatch, chunk)


def _refuse_chunks(name: str, chunks: int) -> None:
    if chunks != 1:
        raise UsageError(
            f"schedule '{name}' has one chunk of layers a stage, not {chunks}; use "
            "'interleaved' for several"
        )


def schedule_of(name: str) -> Schedule:
    """Return the schedule that users call `name`.

    Raises
    ------
    UsageError
        If there is none.
    """
    if name not in SCHEDULES:
        raise UsageError(
            f"there is no schedule '{name}'; the schedules are {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name]
