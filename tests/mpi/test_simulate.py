"""Simulated meshes count what real ones send, to the byte."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest

import tparmpi as tpm
from tests.cases import CASES, Case
from tests.comparison import as_tuple, can_be_had, weighted
from tests.mpi.test_ops import NAMES
from tparmpi.models.gpt import GPT, GPTConfig
from tparmpi.models.gpt_layout import GPTLayout
from tparmpi.sharding import Shard
from tparmpi.testing import all_layouts, laid_out

pytestmark = pytest.mark.mpi(min_size=4)


def calls(ledger) -> list[tuple]:
    """The ledger's calls; in what order messages arrive is no one's choice."""
    return sorted((r.kind, r.axis, r.operator, r.bytes) for r in ledger.records)


def both(program, **axes: int) -> None:
    """Run a program on real ranks, and simulate it for this one."""
    real = tpm.mesh(**axes)
    with tpm.ledger() as counted:
        program(real)
    with tpm.simulate(coordinates=real.coordinates, **axes) as mesh:
        assert mesh.coordinates == real.coordinates
        assert mesh.rank == real.rank
        with tpm.ledger() as simulated:
            program(mesh)
    assert calls(simulated) == calls(counted)


@pytest.mark.parametrize("axes", [{"group": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_every_redistribution(axes):
    def program(mesh):
        for shape in ((5, 3), (4, 8)):
            array = np.arange(float(np.prod(shape))).reshape(shape)
            for source in all_layouts(2, len(axes)):
                x = laid_out(array, mesh, source)
                for target in all_layouts(2, len(axes), partial=False):
                    y = x.to_layout(target)
                    assert y.local.shape == y.spec.local_shape

    both(program, **axes)


LAYOUTS = {
    "tp": GPTLayout(),
    "whole": GPTLayout(tokens=None, attention=None, mlp=None),
    "sequence": GPTLayout(sequence=True),
    "sharded": GPTLayout(fully_sharded="dp"),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_models_step(layout, recomputes):
    config = GPTConfig(
        n_layer=2, d_model=8, n_head=2, seq_len=6, vocab_size=11, dropout=0.1
    )

    def program(mesh):
        model = GPT(
            config, mesh.autodiff(), layout=LAYOUTS[layout], dtype=np.float64
        ).initialize(2)
        if recomputes:
            model.blocks = [tpm.recompute(block) for block in model.blocks]
        tokens = tpm.tensor(np.arange(24).reshape(4, 6) % 11, mesh.autodiff())
        tokens = tokens.with_sharding(dp=Shard(0))
        loss = tpm.cross_entropy(model(tokens), tokens).mean()
        loss.backward()
        tpm.parallel.reduce_gradients(model.parameters())
        optimizer = tpm.optim.AdamW(model.named_parameters())
        tpm.optim.clip_norm(model.parameters(), 1.0)
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad.local.shape == parameter.grad.spec.local_shape

    both(program, dp=2, tp=2)


def test_a_function_on_blocks_and_sums_of_its_own():
    def program(mesh):
        group = mesh.axis("tp")

        def centred(x):
            return x - group.all_reduce(x.sum(1))[:, None] / 4, None

        function = tpm.local_map(
            centred,
            {"tp": Shard(1)},
            {"tp": Shard(1)},
            backward=lambda saved, grad: (grad,),
            shapes=lambda x: x,
        )
        x = tpm.tensor(np.ones((3, 4)), mesh.autodiff()).require_grad()
        slope = tpm.grad(lambda x: (function(x) * x).sum())
        assert slope(x).shape == (3, 4)

    both(program, dp=2, tp=2)


def test_calls_of_the_users_own():
    """Every collective whose results are known without the other ranks."""

    def program(mesh):
        group = mesh.axis("tp")
        array = mesh.backend.zeros((5, 3), np.float32)
        n = group.size
        results = [
            group.all_reduce(array),
            group.all_reduce(array[:0]),
            group.reduce_scatter(array, 1),
            group.all_gather(array, 0, (5,) * n),
            group.all_to_all(array, 0, 1, (3,) * n),
            group.all_to_all(array, 1, 1, (3,) * n),
            group.start.reduce_scatter(array).wait(),
            group.gather(array, 0, 1, out=mesh.backend.empty((5, 3 * n), "f4")),
            group.broadcast(array, 1, out=mesh.backend.empty((5, 3), "f4")),
        ]
        group.barrier()
        to, source = (group.rank + 1) % n, (group.rank - 1) % n
        sending = group.start.send(array, to)
        out = mesh.backend.empty((5, 3), "f4")
        results.append(group.recv(source, out=out))
        sending.wait()
        assert group.all_gather_object("one") == ["one"] * n
        shapes.append([None if r is None else (r.shape, r.dtype) for r in results])

    shapes: list = []
    both(program, dp=1, tp=4)
    assert shapes[0] == shapes[1]


def test_tensors_between_stages():
    """To another stage and, in the backward pass, back."""

    def program(mesh):
        first, second = mesh.split("pp")
        array = np.arange(20.0).reshape(5, 4)
        for layout in all_layouts(2):
            x = laid_out(array, first.autodiff(), layout).require_grad()
            y = x.gelu().to(second, Shard(0), allow_empty=True)
            y.gelu().to(mesh, tp=Shard(1)).sum().backward()
            if first.is_member:
                assert x.grad.local.shape == x.grad.spec.local_shape

    both(program, pp=2, tp=2)


def test_stages_of_a_simulated_mesh():
    with tpm.simulate(coordinates={"pp": 1, "tp": 1}, pp=3, tp=2) as mesh:
        stages = mesh.split("pp")
        assert [stage.is_member for stage in stages] == [False, True, False]
        x = tpm.tensor(np.ones((4, 4)), stages[0])
        assert x.is_shell and (x @ x).is_shell
        assert tpm.device().rank == 3 and len(tpm.devices()) == 6
        assert tpm.world().size == 6
        other = tpm.mesh(dp=2, pp=3)
        assert other.coordinates == (1, 0)
    assert len(tpm.devices()) == tpm.world().size == 4
    assert tpm.devices()[0].kind != "meta"


def test_what_needs_values_or_other_ranks_is_refused():
    with tpm.simulate(tp=4) as mesh, tpm.ledger() as ledger:
        x = tpm.tensor(np.ones((4, 4)), mesh).with_sharding(Shard(0))
        for read in (x.numpy, x.sum().item, lambda: float(x.sum())):
            with pytest.raises(tpm.DeviceError, match="simulated mesh and has no"):
                read()
        assert ledger.count() == 0
        with pytest.raises(tpm.UsageError, match="pass sizes"):
            mesh.all_gather(x.local)
        with pytest.raises(tpm.UsageError, match="pass out"):
            mesh.recv(1)
        with pytest.raises(tpm.GroupError, match="no communicator"):
            _ = mesh.comm
        with pytest.raises(tpm.UsageError, match=r"shapes=\.\.\."):
            tpm.local_map(lambda x: x, Shard(0), Shard(0))(x)
    for options, words in [
        ({}, "no axes"),
        ({"tp": 0}, "positive"),
        ({"tp": 2, "coordinates": (2,)}, "none of a mesh"),
        ({"tp": 2, "coordinates": (0, 0)}, "none of a mesh"),
        ({"tp": 2, "coordinates": {"dp": 0}}, "no axis 'dp'"),
    ]:
        with pytest.raises(tpm.UsageError, match=words):
            tpm.simulate(**options)


def apply(case: Case, place, layouts) -> None:
    tensors = [
        laid_out(array, place.autodiff(), layouts[number])
        for number, array in enumerate(case.arrays)
    ]
    for i in case.differentiable:
        tensors[i].require_grad()
    with warnings.catch_warnings(), tpm.random.scope(seed=1):
        warnings.simplefilter("ignore", tpm.ImplicitGatherWarning)
        results = as_tuple(case.apply(*tensors))
        if case.differentiable:
            weighted(results, place.autodiff()).backward()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_operator(case):
    """A sample of the layouts on a group of 3 and on two axes, forward and backward."""
    layouts = [
        chosen for chosen in product(*case.layouts(1)) if can_be_had(case, chosen)
    ]

    def on_a_group(mesh):
        for chosen in layouts[:: max(1, len(layouts) // 12)]:
            apply(case, mesh, chosen)

    both(on_a_group, group=4)
    choices = case.layouts(2)

    def on_a_mesh(mesh):
        for turn in range(0, max(map(len, choices)), 3):
            chosen = [
                c[(turn * (3 * i + 1) + i) % len(c)] for i, c in enumerate(choices)
            ]
            apply(case, mesh, chosen)

    both(on_a_mesh, dp=2, tp=2)
