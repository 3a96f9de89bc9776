"""What a GPT's step costs, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tparmpi.backend.numpy_attention import attention, kept_bytes
from tparmpi.models import GPTConfig
from tparmpi.models.gpt_cost import GPTPart, Product

CONFIG = GPTConfig(2, 12, 3, 5, 7, d_ff=10, tied=False)


def test_products_of_a_split_model():
    counts = GPTPart(CONFIG, 2, members=2, member=1).products(15)
    # The second member has one of three heads of 4, half of 10, and 3 of 7 tokens.
    assert counts[Product(15, 12, 4)] == 2 * 3 + 2
    assert counts[Product(15, 4, 12)] == 2 + 2 * 3
    assert counts[Product(12, 15, 4)] == 2 * 3
    assert counts[Product(4, 15, 12)] == 2
    assert counts[Product(15, 12, 5)] == counts[Product(15, 5, 12)] == 2 * 2
    assert counts[Product(15, 12, 3)] == counts[Product(12, 15, 3)] == 1
    assert counts.total() == 3 * (2 * 6 + 1)


def test_forwards_make_a_third_of_the_products():
    part = GPTPart(CONFIG, 1, has_output=False)
    forward, whole = part.products(15, trains=False), part.products(15)
    flops = [sum(p.flops * n for p, n in c.items()) for c in (forward, whole)]
    assert flops[1] == 3 * flops[0] == 3 * 2 * 15 * (4 * 12 * 12 + 2 * 12 * 10)


def test_activations_of_a_part():
    hidden = GPTPart(CONFIG, 1, has_input=False, has_output=False)
    # Two norms' inputs and outputs and their numbers; attention; inner features.
    numbers = 4 * 12 + 4 + (4 * 12 + 2 * 3) + 2 * 10
    weights = kept_bytes(3, 5, 5, 3, 4, (None, 0))
    assert hidden.activation_bytes(3) == 15 * 4 * numbers + weights
    whole = GPTPart(CONFIG, 1)
    more = 4 * (2 * 12 + 2 + 7 + 2) + 2 * 8
    assert whole.activation_bytes(3) == 15 * (4 * numbers + more) + weights
    more = 8 * (2 * 12 + 2 + 7 + 2) + 2 * 8
    assert whole.activation_bytes(3, 8) == 15 * (8 * numbers + more) + 2 * weights


def test_activations_of_split_tokens():
    whole, split = (
        GPTPart(CONFIG, 2, members=2, member=1, sequence=sequence)
        for sequence in (False, True)
    )
    # Of the inputs and outputs of five norms, and the two numbers a row of each.
    stream = 4 * (2 * (4 * 12 + 4) + 2 * 12 + 2)
    # Half of four rows; two of five positions where three rows cannot be halved.
    for rows, tokens in ((4, 2 * 5), (3, 3 * 2)):
        saved = (rows * 5 - tokens) * stream
        assert whole.activation_bytes(rows) - split.activation_bytes(rows) == saved


@pytest.mark.parametrize("band", [(None, 0), (None, None), (-3, 2), (None, -2)])
@pytest.mark.parametrize("length", [3, 50, 300])
def test_weights_that_attention_keeps(length, band):
    x = np.ones((2, length, 3, 4), np.float32)
    _, softmax = attention(x, x, x, 1.0, band)
    kept = sum(weights.nbytes for weights in softmax.weights or ())
    assert kept == kept_bytes(2, length, length, 3, 4, band)


def test_large_weights_are_not_kept():
    assert kept_bytes(1, 1024, 1024, 2, 4, (None, 0)) > 0
    assert kept_bytes(1, 1024, 1024, 3, 4, (None, 0)) == 0
