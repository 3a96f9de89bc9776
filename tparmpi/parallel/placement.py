"""Which layer lives where."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tparmpi.comm import Place
from tparmpi.errors import UsageError, counted
from tparmpi.sharding import chunk_sizes


@dataclass(frozen=True)
class Stage:
    """Neighbouring layers on one place.

    Attributes
    ----------
    place
        Where they live.
    layers
        Their numbers: 0 is the input layer, the hidden ones follow, then the output.
    """

    place: Place
    layers: range


class LayerPlacement:
    """A place for the input layer, for each hidden layer, and for the output layer.

    Places are devices, groups or meshes, or their autodiff views.

    Parameters
    ----------
    input, output
        Places of the first and the last layer.
    hidden
        Place of each layer between.
    """

    def __init__(self, input: Place, hidden: Sequence[Place], output: Place) -> None:
        self.input = input
        self.hidden = tuple(hidden)
        self.output = output
        for place in self.places:
            if not isinstance(place, Place):
                raise UsageError(
                    f"LayerPlacement: {place!r} is no place for a layer; give devices, "
                    "groups or meshes"
                )

    @classmethod
    def new(cls, parts: Sequence[tuple[Place, int]]) -> LayerPlacement:
        """Return the placement of so many hidden layers on each place, in order.

        The input layer goes to the first place, the output layer to the last.

        Raises
        ------
        UsageError
            If there are no parts, or a number of layers is negative.
        """
        if not parts:
            raise UsageError("LayerPlacement.new: give at least one (place, layers)")
        hidden = []
        for place, count in parts:
            if count < 0:
                raise UsageError(
                    f"LayerPlacement.new: {count} layers cannot be put on {place!r}"
                )
            hidden += [place] * count
        return cls(parts[0][0], hidden, parts[-1][0])

    @classmethod
    def even(cls, places: Sequence[Place], n: int) -> LayerPlacement:
        """Return `n` hidden layers in equal parts on `places`, in order.

        The first places take one layer more where they do not divide. Places beyond the
        number of layers are left out, with a warning.
        """
        return cls.interleaved(places, n, 1)

    @classmethod
    def interleaved(
        cls, places: Sequence[Place], n: int, chunks: int
    ) -> LayerPlacement:
        """Return `n` hidden layers in ``chunks`` rounds over `places`.

        Each place has several parts that are not neighbours, which shortens the time
        that stages wait for each other.

        Raises
        ------
        UsageError
            If there are no places, or fewer layers than parts.
        """
        used = list(places)
        if not used or chunks < 1 or n < 1:
            raise UsageError(
                "LayerPlacement: at least one place, one layer and one chunk are "
                f"needed, not {counted(len(used), 'place')}, "
                f"{counted(n, 'layer')} and {counted(chunks, 'chunk')}"
            )
        if chunks == 1 and n < len(used):
            warnings.warn(
                f"LayerPlacement: {counted(n, 'hidden layer')} for "
                f"{counted(len(used), 'place')}: the last {len(used) - n} stay idle",
                stacklevel=3,
            )
            used = used[:n]
        if n < len(used) * chunks:
            raise UsageError(
                f"LayerPlacement: {counted(n, 'hidden layer')} cannot be cut into "
                f"{chunks} chunks for each of {counted(len(used), 'place')}; use fewer "
                "chunks or places"
            )
        sizes = chunk_sizes(n, len(used) * chunks)
        return cls.new(list(zip(used * chunks, sizes, strict=True)))

    @classmethod
    def balanced(
        cls,
        places: Sequence[Place],
        costs: Sequence[float],
        *,
        input_cost: float = 0.0,
        output_cost: float = 0.0,
    ) -> LayerPlacement:
        """Return the layers cut so that the costliest place costs least.

        Parameters
        ----------
        costs
            Of each hidden layer, in any unit.
        input_cost, output_cost
            Of the layers that the first and the last place have besides.

        Raises
        ------
        UsageError
            If there are fewer layers than places, or a cost is negative.
        """
        if len(costs) < len(places) or not places:
            raise UsageError(
                f"LayerPlacement.balanced: {counted(len(costs), 'hidden layer')} for "
                f"{counted(len(places), 'place')}; each place needs one"
            )
        if min(*costs, input_cost, output_cost) < 0:
            raise UsageError("LayerPlacement.balanced: a cost is negative")
        counts = _balanced(list(costs), len(places), input_cost, output_cost)
        return cls.new(list(zip(places, counts, strict=True)))

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of every layer, input and output included, in forward order."""
        return (self.input, *self.hidden, self.output)

    def check_count(self, layers: int) -> None:
        """Raise `UsageError` unless there is a place for each hidden layer. Local."""
        if layers != len(self.hidden):
            raise UsageError(
                f"the model has {counted(layers, 'hidden layer')}, the placement gives "
                f"{counted(len(self.hidden), 'place')} for them"
            )

    def devices(self) -> list[Place]:
        """Return the places without repeats, in forward order. Local."""
        found: dict[Place, Place] = {}
        for place in self.places:
            found.setdefault(place.inner(), place)
        return list(found.values())

    def stages(self) -> list[Stage]:
        """Return runs of layers on one place, in forward order. Local.

        A place has several where its layers are interleaved with others'.
        """
        places = self.places
        stages: list[Stage] = []
        first = 0
        for number in range(1, len(places) + 1):
            ends = number == len(places)
            if ends or places[number].inner() is not places[first].inner():
                stages.append(Stage(places[first], range(first, number)))
                first = number
        return stages

    def __repr__(self) -> str:
        stages = ", ".join(
            f"{stage.place!r}: layers {stage.layers.start}-{stage.layers.stop - 1}"
            for stage in self.stages()
        )
        return f"LayerPlacement({stages})"


def _balanced(
    costs: list[float], parts: int, first_extra: float, last_extra: float
) -> list[int]:
    """How many neighbouring costs each part takes, so that the largest sum is least.

    By dynamic programming over (parts so far, layers so far), each part taking one at
    least; among equal ones the first parts take fewer.
    """
    count = len(costs)
    before = [0.0, *accumulate(costs)]
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    cut = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        extra = (first_extra if part == 1 else 0.0) + (
            last_extra if part == parts else 0.0
        )
        for end in range(part, count + 1):
            for start in range(part - 1, end):
                worst = max(best[part - 1][start], before[end] - before[start] + extra)
                if worst < best[part][end]:
                    best[part][end], cut[part][end] = worst, start
    sizes = []
    end = count
    for part in range(parts, 0, -1):
        sizes.append(end - cut[part][end])
        end = cut[part][end]
    return sizes[::-1]
