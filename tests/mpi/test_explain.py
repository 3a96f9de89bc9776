"""`tpm.explain` books every call on the layer that made it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import tparmpi as tpm
from tests.gpt_samples import CONFIG, Run, samples, with_dropout
from tparmpi import nn
from tparmpi.models import GPTLayout
from tparmpi.sharding import Shard

pytestmark = pytest.mark.mpi(min_size=4)


def mesh(axes: dict[str, int]) -> tpm.Mesh:
    return tpm.mesh(tpm.devices()[: int(np.prod(list(axes.values())))], **axes)


def tokens_on(place, **by_axis):
    tokens = tpm.tensor(samples(0, batch=4)[:, :-1], place)
    return tokens.with_sharding(**by_axis) if by_axis else tokens


def test_a_gpt_over_two_ranks():
    place = mesh({"tp": 2}).autodiff()
    model = Run().model(place)
    found = tpm.explain(model, tokens_on(place))
    if not place.is_member:
        assert found.forward.count() == found.backward.count() == 0
        return
    paths = ["input", "input.tokens", "input.dropout"]
    for layer in ("blocks.0", "blocks.1"):
        paths += [layer, f"{layer}.attn_norm", f"{layer}.attn"]
        paths += [f"{layer}.attn.{name}" for name in ("q", "k", "v", "out")]
        paths += [f"{layer}.attn_dropout", f"{layer}.mlp_norm", f"{layer}.mlp"]
        paths += [f"{layer}.mlp.up", f"{layer}.mlp.down", f"{layer}.mlp_dropout"]
    paths += ["output", "output.norm"]
    assert [path for path in found.layers if path != "(loss)"] == ["", *paths]
    size = 4 * CONFIG.seq_len * CONFIG.d_model * 8
    attn = found["blocks.1.attn"]
    assert attn.kind == "CausalSelfAttention"
    assert attn.inputs == ("whole",) and attn.outputs == ("tp=Partial()",)
    assert found["blocks.1.attn.q"].outputs == ("tp=Shard(2)",)
    assert found["output"].outputs == ("tp=Shard(2)",)
    # The sum is finished where it is added to the residual.
    block = found["blocks.1"]
    assert block.forward.count("all_reduce", "tp") == block.forward.count() == 2
    assert block.forward.bytes() == 2 * size
    # Gradients are finished where the norm needs them.
    norm = found["blocks.1.attn_norm"]
    assert norm.backward.count("all_reduce", "tp") == norm.backward.count() == 1
    assert norm.backward.bytes() == size
    # One more each for the tokens and the final norm.
    assert found.forward.count() == found.backward.count() == 2 * CONFIG.n_layer + 1
    assert all(not report.gathered for report in found.layers.values())
    text = str(found)
    (row,) = (line for line in text.splitlines() if line.startswith("blocks.1 "))
    assert f"2 all_reduce tp {2 * size:,} B" in row
    assert text.splitlines()[-1].startswith("all ")


def test_sequence_parallel_and_fully_sharded():
    place = mesh({"dp": 2, "tp": 2}).autodiff()
    model = Run(layout=GPTLayout(sequence=True, fully_sharded="dp")).model(place)
    tokens = tokens_on(place, dp=Shard(0))
    found = tpm.explain(
        model, tokens, loss=lambda logits: tpm.cross_entropy(logits, tokens).mean()
    )
    up = found["blocks.0.mlp.up"]
    assert up.forward.count("all_gather", "dp") == up.forward.count() == 1
    # The weight once more, and the tokens, which are kept split.
    assert up.backward.count("all_gather", "dp") == 1
    assert up.backward.count("all_gather", "tp") == 1
    assert found["blocks.0.mlp"].inputs == ("dp=Shard(0)",)
    assert found["blocks.0.mlp_norm"].inputs == ("dp=Shard(0) tp=Shard(0)",)
    assert found["blocks.0.mlp_norm"].backward.count("reduce_scatter", "tp") == 1
    assert found["(loss)"].forward.count("all_reduce", "tp") == 2
    # Its gradient is scattered when it is complete, those of biases come last.
    assert up.backward.count("reduce_scatter", "dp") == 1
    assert found["(gradients)"].backward.count("all_reduce", "dp") > 0
    text = str(found)
    assert "(gradients)" in text and "reduce_scatter dp" in text


def test_nothing_is_changed():
    place = mesh({"tp": 2, "dp": 2}).autodiff()
    run = Run(with_dropout())
    model = run.model(place)
    run.backward(model, 0)
    before = {name: p.grad.numpy() for name, p in model.named_parameters()}
    with tpm.random.scope(5):
        tpm.explain(model, tokens_on(place))
        again = model(tokens_on(place)).numpy()
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.grad.numpy(), before[name])
    with tpm.random.scope(5):
        np.testing.assert_array_equal(model(tokens_on(place)).numpy(), again)
    model.zero_grad()
    tpm.explain(model, tokens_on(place))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_runs_again_is_booked_on_its_layer():
    place = mesh({"tp": 2}).autodiff()
    model = Run().model(place)
    plain = tpm.explain(model, tokens_on(place))
    model.blocks = [tpm.recompute(block) for block in model.blocks]
    again = tpm.explain(model, tokens_on(place))
    if not place.is_member:
        return
    assert again.forward.count() == plain.forward.count()
    extra = again.backward.count() - plain.backward.count()
    assert 0 < extra == again["blocks.0"].backward.count() * CONFIG.n_layer
    assert plain["blocks.0"].backward.count() == 0
    for path in ("blocks.1.attn_norm", "blocks.1.mlp_norm", "input.tokens"):
        assert again[path].backward.count() == plain[path].backward.count()


def test_without_gradients_there_is_no_backward():
    place = mesh({"tp": 4})
    model = nn.MLP(8, 12, place, split="hidden").initialize(0)
    found = tpm.explain(model, tpm.tensor(np.ones((3, 8), "float32"), place))
    assert list(found.layers) == ["", "up", "down"]
    assert found[""].kind == "MLP" and found[""].outputs == ("tp=Partial()",)
    assert found.forward.count() == found.backward.count() == 0
    assert "backward" in str(found).splitlines()[0]


class Twice(nn.Module):
    """Reads an operand whose layouts cannot meet, and a layer twice."""

    def __init__(self, place):
        self.inner = nn.Linear(4, 4, place, dtype="float64")

    def forward(self, x):
        y = self.inner(self.inner(x.with_sharding(Shard(0))))
        return y + x.with_sharding(Shard(1))


def test_what_is_gathered_unasked_is_named_on_every_rank():
    place = tpm.group(tpm.devices())
    model = Twice(place).initialize(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tpm.explain(model, tpm.tensor(np.ones((8, 4)), place))
    (text,) = found[""].gathered
    assert "add: operand" in text and ".with_sharding" in text
    assert f"gathered in (model): {text}" in str(found)
    assert found["inner"].inputs == ("group=Shard(0)",)
    with pytest.raises(tpm.ShardingError), tpm.no_implicit_gather():
        tpm.explain(model, tpm.tensor(np.ones((8, 4)), place))
    # The failure left nothing behind.
    model.inner(tpm.tensor(np.ones((8, 4)), place))
