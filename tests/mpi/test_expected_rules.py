"""The ledger holds every operator to what the mathematics says of each dim."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest

import tparmpi as tpm
from tests.expected_rules import (
    EXPECTED,
    KEPT,
    MOVES,
    NAMED,
    PARTIAL,
    RING,
    STATISTICS,
    Expected,
    Gathers,
)
from tparmpi.sharding import Partial, Replicate, Shard, chunk_sizes
from tparmpi.tensors import Tensor, registry
from tparmpi.testing import laid_out

pytestmark = pytest.mark.mpi(min_size=4)

LENGTHS = (8, 16)
"""Sizes of a split dim: both divide by 2 and 4 members, and so do their halves by 2."""

CLASSES = (KEPT, PARTIAL, STATISTICS, MOVES, RING)

UNEVEN = 11
"""One where moved elements start and end amid other members' chunks."""

ROLES = [(entry, role) for entry in EXPECTED for role in entry.roles]


def name_of(entry: Expected, role: str) -> str:
    return f"{entry.operator.replace(' ', '_')}-{role}"


class Traffic(NamedTuple):
    """Bytes that all members sent together, and how the results lie."""

    forward: int
    backward: int
    layouts: list


def measure(entry: Expected, role: str, length: int, group, operands) -> Traffic:
    """Run the operator forward and backward with `role` split in `operands`."""
    arrays = entry.arrays({role: length})
    tensors = []
    for number, (array, roles) in enumerate(zip(arrays, entry.operands, strict=True)):
        splits = number in operands
        layout = (Shard(roles.index(role)) if splits else Replicate(),)
        tensor = laid_out(array, group.autodiff(), layout)
        tensors.append(tensor.require_grad() if array.dtype.kind == "f" else tensor)
    gathers = isinstance(entry.roles[role], Gathers)
    allowed = nullcontext() if gathers else tpm.no_implicit_gather()
    with warnings.catch_warnings(), allowed, tpm.random.scope(seed=1):
        warnings.simplefilter("ignore", tpm.ImplicitGatherWarning)
        with tpm.ledger() as forward:
            results = results_of(entry, tensors)
        recorded = [result for result in results if result.requires_grad]
        with tpm.ledger() as backward:
            if recorded and recorded[0].node.plan.operator.backward is not None:
                total = recorded[0].sum()
                for result in recorded[1:]:
                    total = total + result.sum()
                total.backward()
    sent = np.array([forward.bytes(), backward.bytes()])
    sent = group.all_reduce(sent)
    return Traffic(int(sent[0]), int(sent[1]), [result.layout[0] for result in results])


def results_of(entry: Expected, tensors) -> list[Tensor]:
    results = entry.call(*tensors)
    return list(results) if isinstance(results, tuple | list) else [results]


def whose_owner_changes(entry: Expected, role: str, length: int, members: int) -> int:
    """Bytes of the results' elements that another member had in the operands.

    The operator itself, on one device, moves the owners' numbers about.
    """
    device = tpm.device()
    arrays = []
    for array, roles in zip(entry.arrays({role: length}), entry.operands, strict=True):
        arrays.append(owners(array.shape, roles, role, members))
    changed = 0
    tensors = [tpm.tensor(array, device) for array in arrays]
    for result, roles in zip(results_of(entry, tensors), entry.results, strict=True):
        found = result.numpy()
        # What was filled in has no owner.
        wanted = owners(found.shape, roles, role, members)
        changed += int(((found != wanted) & (found != 0)).sum()) * found.itemsize
    return changed


def owners(shape, roles: str, role: str, members: int) -> np.ndarray:
    """The member, counted from 1, that has each element."""
    dim = roles.index(role)
    along = np.repeat(np.arange(1.0, members + 1), chunk_sizes(shape[dim], members))
    return np.broadcast_to(
        np.expand_dims(along, [i for i in range(len(shape)) if i != dim]), shape
    )


def splits(entry: Expected, role: str) -> list[set[int]]:
    """All operands that have the role split; where nothing travels, each alone too."""
    choices = [having(entry, role)]
    if entry.roles[role] in (KEPT, PARTIAL, STATISTICS) and len(choices[0]) > 1:
        choices += [{number} for number in choices[0]]
    return choices


def having(entry: Expected, role: str) -> set[int]:
    return {number for number, roles in enumerate(entry.operands) if role in roles}


@pytest.mark.parametrize(
    ("entry", "role"), ROLES, ids=[name_of(*pair) for pair in ROLES]
)
def test_a_split_dim_costs_what_the_mathematics_says(entry, role):
    for members in (2, 4):
        group = GROUPS.setdefault(members, tpm.group(tpm.devices()[:members]))
        if group.is_member:
            hold_to_its_class(entry, role, group)


def hold_to_its_class(entry: Expected, role: str, group) -> None:
    expected = entry.roles[role]
    for operands in splits(entry, role):
        short, long = (
            measure(entry, role, length, group, operands) for length in LENGTHS
        )
        case = (operands, short, long)
        if isinstance(expected, Gathers):
            assert long.forward > 0, "nothing travels: the entry is out of date"
            continue
        if operands == having(entry, role):
            assert_layouts(entry, role, long.layouts)
        if expected in (KEPT, PARTIAL):
            assert long.forward == 0, case
            # Slicing an operand that is whole sends nothing; its gradient is gathered.
            assert long.backward == 0 or operands != having(entry, role), case
        elif expected == STATISTICS:
            assert short[:2] == long[:2], case
        elif expected == RING:
            arrays = entry.arrays({role: LENGTHS[1]})
            round_trip = (group.size - 1) * sum(array.nbytes for array in arrays)
            assert 0 < long.forward <= round_trip, case
            assert long.backward <= 3 * round_trip, case
        else:
            assert expected == MOVES
            for length in (*LENGTHS, UNEVEN):
                sent = measure(entry, role, length, group, operands)
                changed = whose_owner_changes(entry, role, length, group.size)
                assert max(sent[:2]) <= changed, (length, sent, changed)


GROUPS: dict = {}


def assert_layouts(entry: Expected, role: str, layouts: list) -> None:
    for roles, found in zip(entry.results, layouts, strict=True):
        if role in roles:
            assert found == Shard(roles.index(role))
        elif entry.roles[role] == PARTIAL:
            assert isinstance(found, Partial)
        else:
            assert found == Replicate()


def test_every_promised_operator_has_an_entry():
    have = {entry.operator.split("/")[0] for entry in EXPECTED}
    assert set(NAMED) <= have


def test_every_role_has_a_class():
    for entry in EXPECTED:
        roles = set("".join(entry.operands)) - {"1"}
        # A diagonal's dims are one, which no layout can split in both its places.
        twice = {r for dims in entry.operands for r in dims if dims.count(r) > 1}
        assert set(entry.roles) == roles - twice, entry.operator
        for expected in entry.roles.values():
            assert isinstance(expected, Gathers) or expected in CLASSES


def test_every_record_is_run_by_an_entry(monkeypatch):
    """An operator that is added gets an entry: records whose forward ran, of all."""
    ran = set()

    def watch(record):
        forward = record.forward

        def watched(*arguments, **keywords):
            ran.add(record.name)
            return forward(*arguments, **keywords)

        monkeypatch.setattr(record, "forward", watched)

    for record in registry.values():
        watch(record)
    device = tpm.device()
    with tpm.random.scope(seed=1):
        for entry in EXPECTED:
            entry.call(*[tpm.tensor(array, device) for array in entry.arrays({})])
    missing = set(registry) - ran
    assert not missing, f"give them an entry in tests/expected_rules.py: {missing}"
