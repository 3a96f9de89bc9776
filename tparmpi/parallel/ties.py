"""Tied weights of layers on different places: one owner, and copies of its values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tparmpi.nn import Parameter
from tparmpi.tensors import Spec, redistribute
from tparmpi.tensors.bridge import Bridge, bridge_between


class Ties:
    """The copies of a model's parameters.

    The owner has the optimizer's state, counts in norms and is saved. Its copies get
    its values, and give it their gradients.

    Parameters
    ----------
    parameters
        Of a model, copies included, in the same order on all ranks.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._copies = [each for each in parameters if each.copy_of is not None]
        self._given: dict[int, int] = {}

    def give_values(self) -> None:
        """Bring the owners' values to copies that have not got them yet.

        Collective over the places of owners and copies: one small message each where
        nothing was changed.
        """
        for copy in self._copies:
            owner = copy.copy_of
            assert owner is not None
            self._give_values(owner, copy)

    def take_gradients(self) -> None:
        """Add the copies' gradients to their owners', and forget them there.

        Collective over the places of owners and copies.
        """
        for copy in self._copies:
            owner = copy.copy_of
            assert owner is not None
            if owner.requires_grad:
                self._take_gradient(owner, copy)
            copy.zero_grad()

    def _give_values(self, owner: Parameter, copy: Parameter) -> None:
        bridge = bridge_between(owner.spec.place, copy.spec.place)
        block = None
        if not owner.is_shell and self._given.get(id(copy)) != owner.version:
            self._given[id(copy)] = owner.version
            block = owner.array
        for come in _carry(bridge, block, owner.spec, copy.spec):
            copy.write_local(come)

    def _take_gradient(self, owner: Parameter, copy: Parameter) -> None:
        bridge = bridge_between(copy.spec.place, owner.spec.place)
        block = None
        gradient = copy.grad
        if not copy.is_shell and gradient is not None:
            block = redistribute(gradient.array, gradient.spec, copy.layout)
        for come in _carry(bridge, block, copy.spec, owner.spec):
            owner.add_grad(come, owner.layout)


def _carry(bridge: Bridge, block: Any, spec: Spec, target: Spec) -> list[Any]:
    """Bring a block, or none, over a bridge; return what has come here.

    Collective over the bridge's members. The lead says whether there is one.
    """
    some, none = bridge.route([spec], [target]), bridge.route([], [])
    handles = []
    if bridge.as_source is not None:
        blocks, route = ([], none) if block is None else ([block], some)
        heads = [np.array([len(blocks)], np.uint8)]
        handles = bridge.send(blocks, route, heads, are_foreseen=False)
    come: list[Any] = []
    if bridge.as_target is not None:
        lead = np.ones(1, np.uint8)
        come = bridge.expect(None, lead, lambda lead: some if lead[0] else none).wait()
    for handle in handles:
        handle.wait()
    return come
