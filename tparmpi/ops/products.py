"""A product of two operands in Einstein's notation, by one matrix product."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from tparmpi.backend import Backend, dtypes


def contract(backend: Backend, rule: str, a: Any, b: Any) -> Any:
    """Return ``einsum(rule, a, b)`` by one (batched) matrix product.

    Operands whose letters stand in a fitting order are viewed, not copied: transposed
    matrices are given to the matrix product as they are.

    Parameters
    ----------
    rule
        Explicit, such as ``"btd,dhe->bthe"``; no letter twice in one operand.
    """
    recipe = _recipe(rule)
    if recipe.swaps:
        a, b = b, a
    if recipe.is_matrices:
        left = a.swapaxes(-1, -2) if recipe.swap_a else a
        right = b.swapaxes(-1, -2) if recipe.swap_b else b
        product = backend.matmul(left, right)
        return product.transpose(recipe.order) if recipe.order else product
    for axes, which in ((recipe.lone_a, 0), (recipe.lone_b, 1)):
        if axes and which == 0:
            a = _summed(a, axes)
        elif axes:
            b = _summed(b, axes)
    sizes = dict(zip(recipe.letters_a, a.shape, strict=True))
    sizes.update(zip(recipe.letters_b, b.shape, strict=True))
    left = _matrix(a, recipe.letters_a, recipe.left, sizes)
    right = _matrix(b, recipe.letters_b, recipe.right, sizes)
    product = backend.matmul(left, right)
    batch, rows, _ = recipe.left
    columns = recipe.right[2]
    letters = batch + rows + columns
    product = product.reshape([sizes[letter] for letter in letters])
    return product.transpose(recipe.order) if recipe.order else product


def _summed(array: Any, axes: tuple[int, ...]) -> Any:
    wide = dtypes.accumulation_dtype(array.dtype)
    return array.sum(axis=axes, dtype=wide).astype(array.dtype, copy=False)


class _Recipe:
    """How a product of two operands becomes a matrix product.

    Attributes
    ----------
    swaps
        Whether the second operand's letters come first in the output: then the product
        of the operands in turn, which is the same, lies in memory as the output does.
    is_matrices
        Whether they are (batches of) matrices already, perhaps swapped.
    """

    __slots__ = (
        "is_matrices",
        "left",
        "letters_a",
        "letters_b",
        "lone_a",
        "lone_b",
        "order",
        "right",
        "swap_a",
        "swap_b",
        "swaps",
    )

    def __init__(self, rule: str) -> None:
        operands, out = rule.split("->")
        a, b = operands.split(",")
        self.swaps = _is_turned(a, b, out)
        if self.swaps:
            a, b = b, a
        self.lone_a = tuple(i for i, x in enumerate(a) if x not in b and x not in out)
        self.lone_b = tuple(i for i, x in enumerate(b) if x not in a and x not in out)
        a = "".join(x for i, x in enumerate(a) if i not in self.lone_a)
        b = "".join(x for i, x in enumerate(b) if i not in self.lone_b)
        batch = "".join(x for x in out if x in a and x in b)
        rows = "".join(x for x in out if x in a and x not in b)
        columns = "".join(x for x in out if x in b and x not in a)
        summed = "".join(x for x in b if x in a and x not in out)
        self.letters_a, self.letters_b = a, b
        self.left = (batch, rows, summed)
        self.right = (batch, summed, columns)
        made = batch + rows + columns
        self.order = None if made == out else tuple(made.index(x) for x in out)
        self.swap_a = a == batch + summed + rows
        self.swap_b = b == batch + columns + summed
        self.is_matrices = (
            not self.lone_a
            and not self.lone_b
            and len(rows) == len(summed) == len(columns) == 1
            and (self.swap_a or a == batch + rows + summed)
            and (self.swap_b or b == batch + summed + columns)
        )


def _is_turned(a: str, b: str, out: str) -> bool:
    """Whether in `out` the letters of `b` alone stand before those of `a` alone."""
    batch, rows, columns = (
        "".join(x for x in out if (x in a, x in b) == where)
        for where in ((True, True), (True, False), (False, True))
    )
    turned = batch + columns + rows
    return out == turned and out != batch + rows + columns


@lru_cache(maxsize=4096)
def _recipe(rule: str) -> _Recipe:
    return _Recipe(rule)


def _matrix(
    array: Any, letters: str, groups: tuple[str, str, str], sizes: dict[str, int]
) -> Any:
    """View `array` as (batch, rows, columns); (rows, columns) if nothing is batched."""
    batch, rows, columns = groups
    shape = [prod(sizes[x] for x in group) for group in (batch, rows, columns)]
    if letters == batch + columns + rows and letters != batch + rows + columns:
        shape[1], shape[2] = shape[2], shape[1]
        array = array.reshape(shape if batch else shape[1:])
        return array.swapaxes(-1, -2)
    wanted = batch + rows + columns
    if letters != wanted:
        array = array.transpose([letters.index(x) for x in wanted])
    return array.reshape(shape if batch else shape[1:])
