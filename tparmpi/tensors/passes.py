"""Backward passes: which calls of the tape run, in which order, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tparmpi.sharding import Layout
from tparmpi.tensors.tape import Leaf, Node, OperatorCall, Parent, mode, reach


class Seed(NamedTuple):
    """A gradient that a pass starts from.

    Attributes
    ----------
    sums
        As in a `Slot`; without arrays on ranks that hold nothing of it.
    """

    node: Node | Leaf
    slot: int
    sums: dict[Layout, tuple[Any, bool]]


class Pass:
    """One backward pass.

    Parameters
    ----------
    leaves
        The only leaves that get gradients; all that are found if None.
    later
        Takes what only gradients of parameters need, instead of its being run.

    Attributes
    ----------
    outside
        The other leaves that were found, with which the seeds' tensors were made.
    """

    def __init__(
        self, leaves: set[Leaf] | None = None, later: Deferred | None = None
    ) -> None:
        self.leaves = leaves
        self.later = later
        self.is_plain = leaves is None and later is None
        self.outside: list[Parent] = []
        self._running: set[int] = set()
        self._of_parameters: set[int] = set()
        self._uses: dict[Node | Leaf, int] = {}
        """Of leaves that are stored in pieces, the uses whose gradients are to come."""

    def run(self, seeds: Sequence[Seed], first: int = -1) -> None:
        """Run all calls that the seeds' tensors were made by.

        Collective over the places of the tensors on the tape. Calls are freed on the
        way. Nothing is changed where one of them is refused.

        Parameters
        ----------
        first
            Calls before this one in the program are not run; their slots are left
            filled.

        Raises
        ------
        AutodiffError
            See `Node.check`.
        """
        nodes = self._collect([seed.node for seed in seeds], first)
        for node, slot, sums in seeds:
            if self.wants(node):
                for layout, (array, owned) in sums.items():
                    if array is None:
                        reach((node, slot))
                    else:
                        node.slots[slot].add(array, layout, owned)
        while nodes:
            node = nodes.pop()
            if node.order in self._of_parameters:
                assert self.later is not None
                self.later.calls.append(node)
            else:
                if mode.told is not None:
                    mode.told(node.order)
                node.run_backward(self)
                if self._uses:
                    self._scatter_below(node)
                node.parents = ()

    def wants(self, node: Node | Leaf) -> bool:
        """Say whether `node`, whose users were collected, takes a gradient. Local."""
        if self.leaves is None:
            return True
        if isinstance(node, Leaf):
            return node in self.leaves
        return node.order in self._running

    def sort(self, call: OperatorCall) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return the operands whose gradients are wanted now, and later. Local."""
        now, later = [], []
        for parent in call.parents:
            wanted = parent is not None and self.wants(parent[0])
            waits = wanted and parent is not None and self._can_wait(parent[0])
            now.append(wanted and not waits)
            later.append(waits)
        return tuple(now), tuple(later)

    def _can_wait(self, node: Node | Leaf) -> bool:
        if self.later is None:
            return False
        if isinstance(node, Leaf):
            return node.is_parameter
        return node.order in self._of_parameters

    def _collect(self, roots: Sequence[Node | Leaf], first: int) -> list[Node]:
        """Return the calls to run, the last of the program at the end."""
        found: dict[int, Node] = {}
        queue = list(roots)
        while queue:
            node = queue.pop()
            if isinstance(node, Leaf):
                if node.stored_over is not None and self.later is None:
                    self._uses[node] = self._uses.get(node, 0) + 1
            elif node.order >= first and node.order not in found:
                if self.leaves is None:
                    node.check()
                found[node.order] = node
                queue.extend(parent[0] for parent in node.parents if parent is not None)
        nodes = [found[order] for order in sorted(found)]
        if self.leaves is not None:
            nodes = [node for node in nodes if self._leads_to_leaves(node)]
            for node in nodes:
                node.check()
        if self.later is not None:
            for node in nodes:
                self._find_parameters(node)
        return nodes

    def _scatter_below(self, node: Node) -> None:
        """Scatter the gradients that `node`, which has run, was the last to add to."""
        for parent in node.parents:
            if parent is None or parent[0] not in self._uses:
                continue
            leaf = parent[0]
            self._uses[leaf] -= 1
            if self._uses[leaf] == 0:
                assert isinstance(leaf, Leaf)
                leaf.scatter()

    def _leads_to_leaves(self, node: Node) -> bool:
        """Say whether `node` runs; those it was made from were asked before."""
        assert self.leaves is not None
        for parent in node.parents:
            if parent is None:
                continue
            if self.wants(parent[0]):
                self._running.add(node.order)
            elif isinstance(parent[0], Leaf):
                self.outside.append(parent)
        return node.order in self._running

    def _find_parameters(self, node: Node) -> None:
        """Note a call that makes a parameter's value into another form."""
        if not isinstance(node, OperatorCall) or len(node.parents) != 1:
            return
        parent = node.parents[0]
        if parent is not None and self._can_wait(parent[0]):
            self._of_parameters.add(node.order)


class Deferred:
    """Weight gradients that a backward pass left for later.

    ``loss.backward(later=deferred)`` computes the gradients of activations, up to the
    inputs, and leaves here what only gradients of parameters need: for each operator
    that has a parameter for operand what it saved and the gradient of its output.
    `run` does the rest; the gradients are then bit for bit those of one pass. A
    pipeline fills its bubble with it.

    Attributes
    ----------
    calls
        What waits, in the order in which it will run.
    """

    def __init__(self) -> None:
        self.calls: list[Node] = []

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"<Deferred: {len(self.calls)} calls wait>"

    def run(self) -> None:
        """Add the gradients to `grad` of the parameters, and forget the rest.

        Collective over the places of the tensors on the tape. Without effect where
        nothing waits.

        Raises
        ------
        AutodiffError
            If an operand was written to since the forward; nothing is changed then.
        """
        for call in self.calls:
            call.check()
        calls = self.calls[::-1]
        self.calls = []
        run = Pass()
        while calls:
            call = calls.pop()
            call.run_backward(run)
            call.parents = ()
