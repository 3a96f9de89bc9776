"""How the next token is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from tparmpi.errors import UsageError
from tparmpi.train.generate import Sampling

LOGITS = np.log(
    np.array([0.1, 0.0, 0.6, 0.3]), where=[1, 0, 1, 1], out=np.full(4, -60.0)
)


def frequencies(temperature: float) -> np.ndarray:
    sampling = Sampling(temperature=temperature, seed=5)
    chosen = [sampling.choose(LOGITS, index) for index in range(4000)]
    return np.bincount(chosen, minlength=4) / len(chosen)


def test_temperature_0_takes_the_likeliest_and_of_equal_ones_the_first():
    assert Sampling(temperature=0.0).choose(LOGITS, 7) == 2
    assert Sampling(temperature=0.0).choose(np.array([1.0, 3.0, 3.0]), 7) == 1


def test_temperature_1_follows_the_odds():
    # 4,000 draws: one standard deviation of a frequency is below 0.008.
    np.testing.assert_allclose(frequencies(1.0), [0.1, 0.0, 0.6, 0.3], atol=0.03)


def test_a_low_temperature_sharpens_and_a_tiny_one_does_not_overflow():
    assert frequencies(0.5)[2] > 0.7
    assert frequencies(1e-300)[2] == 1.0
    assert frequencies(1e-320)[2] == 1.0


def test_a_choice_depends_on_seed_and_index_only():
    first = [Sampling(seed=1).choose(LOGITS, index) for index in range(50)]
    again = [Sampling(seed=1).choose(LOGITS, index) for index in reversed(range(50))]
    assert first == again[::-1]
    assert first != [Sampling(seed=2).choose(LOGITS, index) for index in range(50)]


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": -1}, {"temperature": -0.5}, {"temperature": float("nan")}]
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(UsageError):
        Sampling(**wrong)
