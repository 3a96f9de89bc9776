"""Optimizers and schedules on one rank, against their formulas."""

from __future__ import annotations

from math import cos, inf, pi

import numpy as np
import pytest

import tparmpi as tpm
from tparmpi import nn
from tparmpi.optim import SGD, AdamW, clip_norm, schedules

KINDS = ("weight", "bias", "norm", "embedding")


def parameters() -> dict[str, nn.Parameter]:
    """One of each kind, all of three dims: the kind decides, not the number of dims."""
    made = {}
    for kind in KINDS:
        parameter = nn.Parameter(
            (2, 1, 3), tpm.device().autodiff(), kind=kind, dtype="float64"
        )
        parameter.initialize(0, kind)
        made[kind] = parameter
    return made


def gradients(step: int) -> dict[str, np.ndarray]:
    return {
        kind: np.sin(np.arange(6.0) + number + 4 * step).reshape(2, 1, 3)
        for number, kind in enumerate(KINDS)
    }


def give(made: dict[str, nn.Parameter], step: int) -> None:
    for kind, array in gradients(step).items():
        made[kind].take_grad(array, made[kind].layout)


def test_adamw_decays_weights_and_embeddings_only():
    made = parameters()
    values = {kind: p.numpy() for kind, p in made.items()}
    means = {kind: np.zeros((2, 1, 3)) for kind in KINDS}
    squares = {kind: np.zeros((2, 1, 3)) for kind in KINDS}
    optimizer = AdamW(
        made.items(), lr=0.5, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2
    )
    for step in range(1, 4):
        give(made, step)
        rate, scale = 0.1 * step, 0.7
        optimizer.step(lr=rate, scale=scale)
        for kind, grad in gradients(step).items():
            g = scale * grad
            means[kind] = 0.8 * means[kind] + 0.2 * g
            squares[kind] = 0.9 * squares[kind] + 0.1 * g * g
            mean = means[kind] / (1 - 0.8**step)
            square = squares[kind] / (1 - 0.9**step)
            decay = 0.2 if kind in ("weight", "embedding") else 0.0
            values[kind] -= rate * (
                mean / (np.sqrt(square) + 1e-3) + decay * values[kind]
            )
    assert optimizer.steps == 3
    state = optimizer.state_dict()
    assert sorted(state) == sorted(f"{kind}/{m}" for kind in KINDS for m in "mv")
    for kind in KINDS:
        np.testing.assert_allclose(made[kind].numpy(), values[kind], rtol=1e-12)
        np.testing.assert_allclose(state[f"{kind}/m"].numpy(), means[kind], rtol=1e-12)
        np.testing.assert_allclose(
            state[f"{kind}/v"].numpy(), squares[kind], rtol=1e-12
        )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum):
    made = parameters()
    values = {kind: p.numpy() for kind, p in made.items()}
    sums = {kind: np.zeros((2, 1, 3)) for kind in KINDS}
    optimizer = SGD(made.items(), lr=0.1, momentum=momentum, weight_decay=0.3)
    for step in range(3):
        give(made, step)
        optimizer.step(scale=2.0)
        for kind, grad in gradients(step).items():
            decay = 0.3 if kind in ("weight", "embedding") else 0.0
            sums[kind] = momentum * sums[kind] + 2 * grad + decay * values[kind]
            values[kind] -= 0.1 * sums[kind]
    for kind in KINDS:
        np.testing.assert_allclose(made[kind].numpy(), values[kind], rtol=1e-12)
    names = sorted(optimizer.state_dict())
    assert names == (sorted(f"{kind}/momentum" for kind in KINDS) if momentum else [])


def test_a_step_is_seen_by_the_tape():
    made = parameters()
    loss = (made["weight"] * made["weight"]).sum()
    give(made, 0)
    before = made["weight"].version
    SGD(made.items()).step()
    assert made["weight"].version > before
    with pytest.raises(tpm.AutodiffError, match="written to"):
        loss.backward()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: AdamW(p.items(), lr=-1.0), "lr must not be negative"),
        (lambda p: SGD(p.items(), weight_decay=-1.0), "weight_decay must not be"),
        (lambda p: AdamW(p.items(), betas=(0.9, 1.0)), "below 1"),
        (lambda p: SGD(p.items(), momentum=1.0), "below 1"),
        (lambda p: SGD([*p.items(), ("again", p["bias"])]), "given twice"),
        (lambda p: SGD([*p.items(), *p.items()]), "given twice"),
        (lambda p: AdamW(p.values()), r"give model\.named_parameters\(\)"),
        (lambda p: clip_norm([], 1.0), "no parameters"),
    ],
)
def test_refused(make, match):
    with pytest.raises(tpm.UsageError, match=match):
        make(parameters())


def test_clipping():
    made = parameters()
    for kind, value in (("weight", 3.0), ("bias", 4.0)):
        array = np.zeros((2, 1, 3))
        array[1, 0, 2] = value
        made[kind].take_grad(array, made[kind].layout)
    assert clip_norm(made.values(), 2.0) == (5.0, 0.4)
    assert clip_norm(made.values(), 5.0) == (5.0, 1.0)
    assert clip_norm(made.values(), inf) == (5.0, 1.0)
    made["norm"].take_grad(np.full((2, 1, 3), np.nan), made["norm"].layout)
    assert np.isnan(clip_norm(made.values(), 1.0)[0])


def test_squares_are_summed_in_float64():
    parameter = nn.Parameter((3,), tpm.device().autodiff(), dtype="float32")
    parameter.take_grad(np.array([1.0, 1e-5, 1e25], "float32"), parameter.layout)
    assert clip_norm([parameter], 1.0)[0] == pytest.approx(1e25, rel=1e-6)


def test_schedules():
    cosine = [
        schedules.warmup_cosine(step, lr=2.0, warmup=4, steps=12) for step in range(14)
    ]
    assert cosine[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    for step in range(4, 12):
        expected = 0.2 + 0.9 * (1 + cos(pi * (step - 4) / 8))
        assert cosine[step] == pytest.approx(expected, rel=1e-15)
    assert cosine[12] == cosine[13] == pytest.approx(0.2, rel=1e-15)
    constant = [
        schedules.warmup_constant(step, lr=2.0, warmup=4, steps=12) for step in range(9)
    ]
    assert constant == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert schedules.warmup_cosine(0, lr=2.0, warmup=0, steps=1) == 2.0
    assert schedules.warmup_constant(0, lr=2.0, warmup=0, steps=1) == 2.0
    assert schedules.warmup_cosine(3, lr=2.0, warmup=9, steps=3) == pytest.approx(8 / 9)
