"""What a case of an operator is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tparmpi.sharding import Shard
from tparmpi.testing import all_layouts


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Distinct numbers of order one, so that no permuted result can pass."""
    count = int(np.prod(shape))
    return np.sin(np.arange(1, count + 1) * 1.7 + seed).reshape(shape) + 0.1 * seed


@dataclass
class Case:
    """One operator with operands and the NumPy function it must equal.

    Attributes
    ----------
    operator
        Name of the record that the case is for.
    apply
        Takes tensors, returns one or a tuple of them.
    reference
        Takes the arrays, returns what `apply` must; None where NumPy has no like.
    arrays
        float64 ones at which the operator is smooth, or others.
    name
        Tells cases of one operator apart.
    whole
        Dims by operand that are left unsplit, to keep the number of layouts small.
    constant
        Numbers of the float64 operands that have no gradient.
    """

    operator: str
    apply: Callable
    reference: Callable | None
    arrays: list[np.ndarray]
    name: str = ""
    whole: dict[int, set[int]] = field(default_factory=dict)
    constant: tuple[int, ...] = ()

    @property
    def differentiable(self) -> list[int]:
        """Numbers of the operands whose gradients are compared."""
        return [
            number
            for number, array in enumerate(self.arrays)
            if array.dtype.kind == "f" and number not in self.constant
        ]

    def layouts(self, axes: int) -> list[list]:
        return [
            [
                layout
                for layout in all_layouts(a.ndim, axes, partial=a.dtype.kind == "f")
                if not any(
                    isinstance(p, Shard) and p.dim in self.whole.get(number, ())
                    for p in layout
                )
            ]
            for number, a in enumerate(self.arrays)
        ]
