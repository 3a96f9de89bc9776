"""What a model that is too large for the machine is told."""

from __future__ import annotations

import re

import pytest

import tparmpi as tpm
from tparmpi.errors import DeviceError
from tparmpi.train.config import RunConfig
from tparmpi.train.model import build_model, memory_for


def model(**sizes):
    keys = {f"model.{key}": size for key, size in sizes.items()}
    return build_model(RunConfig().replace(keys).resolved(), tpm.device())


@pytest.mark.parametrize(
    "sizes", [{"d_model": 10**8}, {"d_model": 10**18}, {"vocab_size": 2**62}]
)
def test_more_than_the_machine_has_is_refused_before_anything_is_done(sizes):
    with (
        pytest.raises(DeviceError, match=r"training takes [\d,]{16,} bytes on each"),
        memory_for(model(**sizes), 4, "training"),
    ):
        raise AssertionError("it was begun")


def test_what_the_system_refuses_is_told_with_the_size_and_the_remedy():
    small = model(n_layer=1, d_model=8, n_head=2)
    values = sum(parameter.size for parameter in small.parameters())
    with (
        pytest.raises(DeviceError) as refused,
        memory_for(small, 4, "training"),
    ):
        raise MemoryError
    assert re.search(rf"takes {4 * 4 * values:,} bytes", str(refused.value))
    for word in ("model.d_model", "train.batch_size", "--tp"):
        assert word in str(refused.value)
    with memory_for(small, 4, "training"):
        pass
