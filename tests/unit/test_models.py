"""The GPT on one rank against plain NumPy, and its configuration."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG, Run, reference_loss, samples
from tparmpi import models
from tparmpi.models import GPT, GPTConfig


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loss_and_gradients_against_numpy(tied):
    """Each gradient's component along a random direction, by central differences."""
    config = replace(CONFIG, tied=tied)
    run = Run(config, seed=5)
    model = run.model(tpm.device())
    rng = np.random.default_rng(2)
    for parameter in model.parameters():
        parameter.write_local(parameter.local + 0.3 * rng.normal(size=parameter.shape))
    values = {name: p.numpy() for name, p in model.named_parameters()}
    data = samples(0)
    tokens, targets = data[:, :-1], data[:, 1:]
    loss = run.backward(model, 0)
    assert loss == pytest.approx(
        reference_loss(values, config, tokens, targets), rel=1e-13
    )
    assert loss > 1.2 * log(config.vocab_size)
    step = 1e-5
    for name, parameter in model.named_parameters():
        way = rng.normal(size=parameter.shape)
        high, low = (
            reference_loss(
                values | {name: values[name] + sign * step * way},
                config,
                tokens,
                targets,
            )
            for sign in (1, -1)
        )
        slope = (high - low) / (2 * step)
        along = float((parameter.grad.numpy() * way).sum())
        assert along == pytest.approx(slope, rel=1e-6, abs=1e-9), name


def test_names_and_shapes():
    model = GPT(replace(CONFIG, n_layer=1, tied=False), tpm.device())
    assert {name: p.shape for name, p in model.named_parameters()} == {
        "input.tokens.weight": (53, 40),
        "input.positions": (12, 40),
        "blocks.0.attn_norm.gain": (40,),
        "blocks.0.attn_norm.bias": (40,),
        "blocks.0.attn.q.weight": (40, 8, 5),
        "blocks.0.attn.q.bias": (8, 5),
        "blocks.0.attn.k.weight": (40, 8, 5),
        "blocks.0.attn.k.bias": (8, 5),
        "blocks.0.attn.v.weight": (40, 8, 5),
        "blocks.0.attn.v.bias": (8, 5),
        "blocks.0.attn.out.weight": (8, 5, 40),
        "blocks.0.attn.out.bias": (40,),
        "blocks.0.mlp_norm.gain": (40,),
        "blocks.0.mlp_norm.bias": (40,),
        "blocks.0.mlp.up.weight": (40, 51),
        "blocks.0.mlp.up.bias": (51,),
        "blocks.0.mlp.down.weight": (51, 40),
        "blocks.0.mlp.down.bias": (40,),
        "output.norm.gain": (40,),
        "output.norm.bias": (40,),
        "output.weight": (53, 40),
    }


def test_layers_are_named_for_placement():
    model = GPT(CONFIG, tpm.device()).initialize(0).eval()
    tokens = tpm.tensor(samples(0)[:, :-1], tpm.device())
    x = model.layer_input(tokens)
    for layer in model.layers_hidden:
        x = layer(x)
    np.testing.assert_array_equal(model.layer_output(x).numpy(), model(tokens).numpy())
    assert len(model.layers_hidden) == CONFIG.n_layer


def test_initial_deviations():
    config = GPTConfig(n_layer=8, d_model=128, n_head=4, seq_len=64, vocab_size=500)
    model = GPT(config, tpm.device()).initialize(0)
    for name, parameter in model.named_parameters():
        spread = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
        if parameter.kind in ("weight", "embedding"):
            assert parameter.local.std() == pytest.approx(spread, rel=0.03), name
    kinds = {p.kind for name, p in model.named_parameters() if name.startswith("input")}
    assert kinds == {"embedding"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_head": 7}, r"d_model \(40\) must be a multiple of n_head \(7\)"),
        ({"n_layer": 0}, "n_layer must be at least 1, it is 0"),
        ({"vocab_size": -3}, "vocab_size must be at least 1, it is -3"),
        ({"d_ff": 0}, "d_ff must be at least 1, it is 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, it is 1.0"),
    ],
)
def test_sizes_that_cannot_be(change, match):
    with pytest.raises(tpm.UsageError, match=match):
        replace(CONFIG, **change)


def test_the_inner_width_is_four_times_the_outer():
    assert GPTConfig(1, 6, 2, 4, 5).d_ff == 24


def test_models_by_name():
    sizes = {"n_layer": 1, "d_model": 6, "n_head": 2, "seq_len": 4, "vocab_size": 5}
    model = models.build("gpt", sizes, tpm.device(), dtype="float64")
    assert isinstance(model, GPT) and model.config == GPTConfig(**sizes)
    assert model.input.positions.dtype == np.float64
    assert not model.blocks[0].layout.sequence
    model = models.build("gpt", sizes, tpm.device(), layout={"sequence": True})
    assert model.blocks[0].layout.sequence and model.blocks[0].layout.mlp == "hidden"
    with pytest.raises(tpm.UsageError, match=r"'gtp'; did you mean 'gpt'\?"):
        models.build("gtp", sizes, tpm.device())
    with pytest.raises(tpm.UsageError, match="'x'; there is: gpt"):
        models.build("x", sizes, tpm.device())
