"""Pipeline schedules, proved on paper."""

from __future__ import annotations

from itertools import product

import pytest

from tparmpi.errors import UsageError
from tparmpi.parallel.picture import as_text
from tparmpi.parallel.schedules import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    SCHEDULES,
    WEIGHT_GRADIENT,
    Instruction,
    forward_only,
    schedule_of,
)
from tparmpi.parallel.simulation import simulate

SIZES = list(product(range(1, 9), range(1, 18)))
ONE_CHUNK = ("1f1b", "zero_bubble")
# Of one microbatch through all layers, F + B + W = 1.
THIRDS = {
    FORWARD: 1 / 3,
    BACKWARD: 2 / 3,
    INPUT_GRADIENT: 1 / 3,
    WEIGHT_GRADIENT: 1 / 3,
}


def chunk_counts(name: str) -> tuple[int, ...]:
    return (1,) if name in ONE_CHUNK else (1, 2, 3, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_ends_without_buffers(name):
    for (stages, microbatches), chunks in product(SIZES, chunk_counts(name)):
        simulate(SCHEDULES[name], stages, microbatches, chunks)


def test_forwards_alone_end_without_buffers():
    for (stages, microbatches), chunks in product(SIZES, (1, 2, 3, 4)):
        simulate(forward_only, stages, microbatches, chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_microbatches_are_bounded(name):
    for (p, m), chunks in product(SIZES, chunk_counts(name)):
        live = simulate(SCHEDULES[name], p, m, chunks).live
        for stage in range(p):
            bounds = {
                "gpipe": m,
                "1f1b": min(m, p - stage),
                "interleaved": p * (1 + (p - 1) / (p * chunks)),
                "zero_bubble": min(m, p),
            }
            assert live[stage] / chunks <= bounds[name] + 1e-12


def test_zero_bubble_holds_no_more_forwards_than_1f1b():
    for p, m in SIZES:
        for stage in range(p):
            live = most = 0
            for work in SCHEDULES["zero_bubble"](stage, p, m, 1):
                live += (work.kind == FORWARD) - (work.kind == INPUT_GRADIENT)
                most = max(most, live)
            assert most <= min(m, p - stage)


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_take_the_time_of_theory(name):
    for (p, m), chunks in product(SIZES, chunk_counts(name)):
        if m < p or (chunks > 1 and m % p):
            continue
        seconds = {kind: time / chunks for kind, time in THIRDS.items()}
        took = simulate(SCHEDULES[name], p, m, chunks, seconds).seconds
        bubble = (p - 1) / 3 if name == "zero_bubble" else (p - 1) / chunks
        assert took == pytest.approx(m + bubble), (p, m, chunks)


def test_what_cannot_work_is_refused():
    def stuck(stage, stages, microbatches, chunks):
        works = [Instruction(FORWARD, 0), Instruction(BACKWARD, 0)]
        works += [Instruction(FORWARD, 1), Instruction(BACKWARD, 1)]
        # The first stage wants a gradient that the second gives only after its next.
        return iter(works if stage == 0 else [works[0], works[2], works[1], works[3]])

    def crossed(stage, stages, microbatches, chunks):
        order = (0, 1) if stage == 0 else (1, 0)
        return iter(Instruction(FORWARD, microbatch) for microbatch in order)

    def short(stage, stages, microbatches, chunks):
        return iter([Instruction(FORWARD, 0)])

    def twice(stage, stages, microbatches, chunks):
        return iter([Instruction(FORWARD, 0)] * 2)

    def early(stage, stages, microbatches, chunks):
        return iter([Instruction(BACKWARD, 0)])

    for schedule, words in (
        (stuck, "deadlocks: stage 0 waits before .*backward"),
        (crossed, "cross"),
        (short, "has 1 of 2 forwards on stage 0"),
        (twice, "twice on stage 0"),
        (early, "before its forward"),
    ):
        with pytest.raises(UsageError, match=words):
            simulate(schedule, 2, 2)


def test_chunks_and_names_are_checked():
    with pytest.raises(UsageError, match=r"one chunk.*interleaved"):
        simulate(SCHEDULES["1f1b"], 2, 2, 2)
    with pytest.raises(UsageError, match=r"'pipe'.*gpipe, 1f1b"):
        schedule_of("pipe")


def test_the_picture():
    text = as_text(simulate(SCHEDULES["1f1b"], 2, 3))
    assert text.splitlines() == [
        "stage 0  F0 F1 .  .  B0 == F2 B1 == .  B2 ==",
        "stage 1  .  F0 B0 == F1 B1 == F2 B2 == .  .",
    ]
    assert "F1.1" in as_text(simulate(SCHEDULES["interleaved"], 2, 2, 2))
