"""Tied weights of layers on different places: one owner, and copies of its values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tparmpi.nn import Parameter
from tparmpi.tensors import Spec, redistribute
from tparmpi.tensors.bridge import bridge_between


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
        handles = []
        if not owner.is_shell:
            is_new = self._given.get(id(copy)) != owner.version
            self._given[id(copy)] = owner.version
            blocks, specs, targets = _if(is_new, owner.array, owner.spec, copy.spec)
            head = [np.array(is_new)]
            handles = bridge.send(blocks, specs, targets, head)
        if not copy.is_shell:
            incoming = bridge.expect()
            (is_new,) = incoming.head(1)
            _, specs, targets = _if(bool(is_new), None, owner.spec, copy.spec)
            for block in incoming.blocks(specs, targets):
                copy.write_local(block)
        for handle in handles:
            handle.wait()

    def _take_gradient(self, owner: Parameter, copy: Parameter) -> None:
        bridge = bridge_between(copy.spec.place, owner.spec.place)
        handles = []
        if not copy.is_shell:
            gradient = copy.grad
            blocks: list[Any] = []
            if gradient is not None:
                blocks = [redistribute(gradient.array, gradient.spec, copy.layout)]
            has = [np.array(bool(blocks))]
            specs = [copy.spec] * len(blocks)
            targets = [owner.spec] * len(blocks)
            handles = bridge.send(blocks, specs, targets, has)
        if not owner.is_shell:
            incoming = bridge.expect()
            (has_one,) = incoming.head(1)
            _, specs, targets = _if(bool(has_one), None, copy.spec, owner.spec)
            for block in incoming.blocks(specs, targets):
                owner.add_grad(block, owner.layout)
        for handle in handles:
            handle.wait()


def _if(
    wanted: bool, block: Any, spec: Spec, target: Spec
) -> tuple[list[Any], list[Spec], list[Spec]]:
    """What goes over a bridge: one tensor, or nothing."""
    return ([block], [spec], [target]) if wanted else ([], [], [])
