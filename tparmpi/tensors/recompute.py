"""Running a part of the program again in the backward pass instead of keeping it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tparmpi.errors import AutodiffError
from tparmpi.tensors import nests, random, tape
from tparmpi.tensors.passes import Pass, Seed
from tparmpi.tensors.tensor import Tensor


def recompute(function: Any) -> Any:
    """Return `function`, which keeps its inputs only and runs again in the backward.

    Values and gradients stay the same bit for bit, with dropout too: random streams are
    replayed. What runs again communicates again. Recomputed parts may be nested.

    Parameters
    ----------
    function
        Takes anything and returns tensors, or nests of tuples, lists, dicts and
        dataclasses with tensors. It gives the same results when it is called again with
        the same arguments, and keeps no tensor elsewhere. Or a module, which is changed
        so that all its calls are recomputed, and returned: its parameters keep their
        names. All tensors that it uses get gradients, parameters too.

    Examples
    --------
    >>> model.blocks = [tpm.recompute(block) for block in model.blocks]
    >>> hidden = tpm.recompute(lambda x: (x @ w).gelu())(x)

    Raises
    ------
    AutodiffError
        In the backward pass, if a tensor that `function` used was written to since, or
        if `function` gives other results than before.
    """
    if isinstance(function, _Recomputed):
        return function
    if callable(getattr(function, "forward", None)):
        function.forward = recompute(function.forward)
        return function
    return _Recomputed(function)


class _Recomputed:
    """A function whose calls are not kept."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        mode = tape.mode
        if not mode.recording or mode.watching is not None:
            # Inside of another one, whose first run keeps nothing either.
            return self.function(*operands, **keywords)
        call = _Call(self.function, operands, keywords)
        watch = _Watch()
        mode.watching = watch
        try:
            results = call.function(*operands, **keywords)
        finally:
            mode.watching = None
        _Segment(call, watch, nests.tensors_in(results))
        return results


class _Call:
    """A call that can be made again as it was made."""

    def __init__(
        self,
        function: Callable[..., Any],
        operands: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self.function = function
        self.operands = nests.replace(operands, _lean)
        self.keywords = nests.replace(keywords, _lean)
        self.streams = random.state()
        self.gathering = tape.mode.gathering

    def repeat(self) -> list[Tensor]:
        """Return the tensors of the results, recorded this time."""
        mode = tape.mode
        before = dict(vars(mode))
        mode.recording, mode.watching, mode.gathering = True, None, self.gathering
        # The backward follows at once: what was gathered serves it too.
        mode.regathering = False
        operands = nests.replace(self.operands, _whole)
        keywords = nests.replace(self.keywords, _whole)
        try:
            with random.replay(self.streams):
                return nests.tensors_in(self.function(*operands, **keywords))
        finally:
            vars(mode).clear()
            vars(mode).update(before)


def _lean(tensor: Tensor) -> Tensor:
    """The tensor without an array that can be gathered again."""
    kept = tensor.regather
    if kept is None:
        return tensor
    lean = Tensor(tensor.spec, None, tensor.device, tensor.node, tensor.slot)
    lean.cell, lean.regather = tensor.cell, kept
    return lean


def _whole(tensor: Tensor) -> Tensor:
    kept = tensor.regather
    if kept is None:
        return tensor
    kept.readers += 1
    array = kept.fetch()
    node, slot, cell = tensor.node, tensor.slot, tensor.cell
    return Tensor(tensor.spec, array, tensor.device, node, slot, cell)


class _Watch(tape.Node):
    """Stands for all calls of a function's first run, and notes what they used."""

    __slots__ = ("cells", "used")

    def __init__(self) -> None:
        super().__init__(())
        self.used: dict[tape.Parent, None] = {}
        self.cells: dict[int, tuple[list[int], int]] = {}

    def see(self, operands: Sequence[Tensor]) -> _Watch:
        """Note the operands of a call that would have been recorded. Local."""
        for operand in operands:
            node, cell = operand.node, operand.cell
            if node is not None and node is not self:
                self.used[node, operand.slot] = None
            if cell is not None:
                self.cells.setdefault(id(cell), (cell, cell[0]))
        return self

    def check(self) -> None:
        """Raise `AutodiffError`: none of the calls was kept."""
        raise AutodiffError(
            "backward: a tensor was taken out of a recomputed function, which keeps "
            "none but its results; let the function return it"
        )


class _Segment(tape.Node):
    """A call of a recomputed function on the tape."""

    __slots__ = ("call", "numbers")

    def __init__(self, call: _Call, watch: _Watch, results: list[Tensor]) -> None:
        made = {id(t): (n, t) for n, t in enumerate(results) if t.node is watch}
        super().__init__(
            tuple(watch.used),
            [tensor.spec for _, tensor in made.values()],
            list(watch.cells.values()),
        )
        self.call: _Call | None = call
        self.numbers = [number for number, _ in made.values()]
        for slot, (_, tensor) in enumerate(made.values()):
            tensor.node, tensor.slot = self, slot

    def check(self) -> None:
        """Raise unless the backward of this call can run. Local.

        Raises
        ------
        AutodiffError
            If it has run, or a tensor that it used was written to since.
        """
        if self.call is None:
            raise tape.used_already()
        self.check_versions("a recomputed function")

    def run_backward(self, run: Pass) -> None:
        """Run the function again, and the backward pass through what it records."""
        call = self.call
        assert call is not None
        self.call = None
        first = tape.next_order()
        results = call.repeat()
        del call
        seeds = []
        for slot, number in zip(self.slots, self.numbers, strict=True):
            if not slot.sums:
                continue
            again = results[number] if number < len(results) else None
            if again is None or again.node is None or again.shape != slot.spec.shape:
                raise AutodiffError(
                    "backward: a recomputed function gave other results when it ran "
                    "again; it must depend on its arguments only"
                )
            seeds.append(Seed(again.node, again.slot, dict(slot.sums)))
            slot.sums.clear()
        results.clear()
        run.run(seeds, first)
