"""Products: einsum, matmul and linear, all by the backend's matrix product."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

from tparmpi.errors import ShapeError, UsageError
from tparmpi.tensors import Plan, Tensor, method, operator


def contract(xp: Any, rule: str, a: Any, b: Any) -> Any:
    """Return ``einsum(rule, a, b)`` by one (batched) matrix product.

    Operands whose letters stand in a fitting order are viewed, not copied: transposed
    matrices are given to the matrix product as they are.

    Parameters
    ----------
    rule
        Explicit, such as ``"btd,dhe->bthe"``; no letter twice in one operand.
    """
    recipe = _recipe(rule)
    for axes, which in ((recipe.lone_a, 0), (recipe.lone_b, 1)):
        if axes and which == 0:
            a = a.sum(axis=axes)
        elif axes:
            b = b.sum(axis=axes)
    sizes = dict(zip(recipe.letters_a, a.shape, strict=True))
    sizes.update(zip(recipe.letters_b, b.shape, strict=True))
    left = _matrix(a, recipe.letters_a, recipe.left, sizes)
    right = _matrix(b, recipe.letters_b, recipe.right, sizes)
    product = xp.matmul(left, right)
    batch, rows, _ = recipe.left
    columns = recipe.right[2]
    letters = batch + rows + columns
    product = product.reshape([sizes[letter] for letter in letters])
    return product.transpose(recipe.order) if recipe.order else product


class _Recipe:
    """How a product of two operands becomes a matrix product."""

    __slots__ = ("left", "letters_a", "letters_b", "lone_a", "lone_b", "order", "right")

    def __init__(self, rule: str) -> None:
        operands, out = rule.split("->")
        a, b = operands.split(",")
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


@lru_cache(maxsize=4096)
def _recipe(rule: str) -> _Recipe:
    return _Recipe(rule)


def _matrix(
    array: Any, letters: str, groups: tuple[str, str, str], sizes: dict[str, int]
) -> Any:
    """View `array` as (batch, rows, columns), or (rows, columns) without "
    "batch letters.
    """
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


def _product(plan: Plan, rule: str, arrays: Sequence[Any]) -> Any:
    if len(arrays) == 2:
        return contract(plan.xp, rule, *arrays)
    # A copy, since of one operand NumPy may return a view.
    return plan.xp.array(plan.xp.einsum(rule, *arrays, optimize=True))


def _product_gradient(
    plan: Plan, rule: str, arrays: Sequence[Any], grad: Any, number: int
) -> Any:
    """Gradient of operand `number`: the product of the output's with the others."""
    operands, out = rule.split("->")
    letters = operands.split(",")
    own = letters[number]
    others = [x for i, x in enumerate(letters) if i != number]
    present = set(out).union(*others)
    kept = "".join(x for x in own if x in present)
    factors = [grad, *(x for i, x in enumerate(arrays) if i != number)]
    result = _product(plan, ",".join([out, *others]) + "->" + kept, factors)
    if kept == own:
        return result
    shape = arrays[number].shape
    lone = tuple(i for i, x in enumerate(own) if x not in present)
    return plan.xp.broadcast_to(plan.xp.expand_dims(result, lone), shape)


def _einsum_rule(*shapes: tuple[int, ...], rule: str) -> str:
    return rule


@operator(
    _einsum_rule, name="einsum", linear=lambda dtypes, _: tuple(range(len(dtypes)))
)
def _einsum(plan: Plan, *operands: Any) -> Any:
    """Return the sum of products that the attribute `rule` says."""
    return _product(plan, plan.attributes["rule"], operands), operands


@_einsum.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    rule = plan.attributes["rule"]
    return tuple(
        _product_gradient(plan, rule, saved, grad, number) if want else None
        for number, want in enumerate(wanted)
    )


def einsum(rule: str, *operands: Tensor) -> Tensor:
    """Return the sum of products over the letters that the output lacks.

    Parameters
    ----------
    rule
        An explicit einsum string, such as ``"btd,dhe->bthe"``, without ``...`` and
        without a letter twice in one operand.

    Raises
    ------
    ShapeError
        If the rule cannot be read or the shapes do not fit it.
    """
    result: Tensor = _einsum(*operands, rule=_checked_rule(rule, "einsum"))
    return result


@lru_cache(maxsize=4096)
def _checked_rule(rule: str, name: str) -> str:
    rule = rule.replace(" ", "")
    left, arrow, out = rule.partition("->")
    operands = left.replace("+", ",").split(",")
    if not arrow or not set(left + out) <= set(string.ascii_letters + ",+"):
        raise ShapeError(
            f"{name}: the rule '{rule}' must be letters, ',' and one '->', "
            "such as 'btd,df->btf'"
        )
    for letters in (*operands, out):
        if len(set(letters)) != len(letters):
            raise ShapeError(
                f"{name}: the rule '{rule}' has a letter twice in '{letters}'"
            )
    missing = set(out) - set(left)
    if missing:
        raise ShapeError(
            f"{name}: the rule '{rule}' has '{min(missing)}' in the output only"
        )
    return rule


def _linear_rule(
    x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...], *, rule: str
) -> str:
    return rule


@operator(_linear_rule, name="linear", linear=(0, 1))
def _linear(plan: Plan, x: Any, weight: Any, bias: Any) -> Any:
    """Return a product plus a bias, as the attribute `rule` says."""
    product, bias_letters, out = _linear_parts(plan.attributes["rule"])
    y = contract(plan.xp, product, x, weight)
    if plan.leads(2):
        y += _aligned(bias, bias_letters, out)
    return y, (x, weight)


@_linear.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    product, bias_letters, out = _linear_parts(plan.attributes["rule"])
    dx, dweight = (
        _product_gradient(plan, product, saved, grad, number)
        if wanted[number]
        else None
        for number in (0, 1)
    )
    dbias = None
    if wanted[2]:
        lacking = tuple(i for i, x in enumerate(out) if x not in bias_letters)
        dbias = grad.sum(axis=lacking)
        kept = [x for x in out if x in bias_letters]
        dbias = dbias.transpose([kept.index(x) for x in bias_letters])
    return dx, dweight, dbias


@lru_cache(maxsize=4096)
def _linear_parts(rule: str) -> tuple[str, str, str]:
    left, out = rule.split("->")
    product, bias = left.split("+")
    return f"{product}->{out}", bias, out


def _aligned(bias: Any, letters: str, out: str) -> Any:
    """View `bias` with the dims of the output, of size 1 where it lacks them."""
    order = sorted(range(len(letters)), key=lambda i: out.index(letters[i]))
    bias = bias.transpose(order)
    shape = iter(bias.shape)
    return bias.reshape([next(shape) if x in letters else 1 for x in out])


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, rule: str = "btd,df->btf"
) -> Tensor:
    """Return ``einsum(rule, x, weight)``, plus `bias` over the output's last dims.

    Where the contracted dims are sharded the result is a pending sum, to which one
    member adds the bias.

    Parameters
    ----------
    bias
        Has the letters of the output that the weight brings, in output order.

    Raises
    ------
    ShapeError
        If the rule cannot be read or the shapes do not fit it.
    """
    rule = _checked_rule(rule, "linear")
    if bias is None:
        return einsum(rule, x, weight)
    result: Tensor = _linear(x, weight, bias, rule=_with_bias(rule))
    return result


@lru_cache(maxsize=4096)
def _with_bias(rule: str) -> str:
    operands, out = rule.split("->")
    x, weight = operands.split(",")
    letters = "".join(letter for letter in out if letter in weight and letter not in x)
    return f"{operands} + {letters}->{out}".replace(" ", "")


@method
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product ``a @ b`` as NumPy defines it.

    Vectors, batches and broadcasting of batch dims included.

    Raises
    ------
    ShapeError
        If an operand has no dims, or the shapes do not fit.
    """
    for number, operand in enumerate((a, b)):
        if not isinstance(operand, Tensor):
            raise UsageError(
                f"matmul: operand {number} is a {type(operand).__name__}, not a "
                "tensor; make it one with tpm.tensor(array, group)"
            )
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError("matmul: an operand has no dims; use a * b to scale")
    inner = a.shape[-1], b.shape[-2 if b.ndim > 1 else 0]
    if inner[0] != inner[1]:
        raise ShapeError(
            f"matmul: the last dim of 'a' is {inner[0]}, but "
            f"{'dim -2' if b.ndim > 1 else 'dim 0'} of 'b' is {inner[1]}; "
            f"the shapes are {a.shape} and {b.shape}"
        )
    result: Tensor = _einsum(a, b, rule=_matmul_rule(a.shape, b.shape))
    return result


@lru_cache(maxsize=4096)
def _matmul_rule(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    """The einsum string of ``a @ b``; a broadcast dim of size 1 gets its own letter."""
    batch_a, batch_b = a[:-2], b[:-2]
    names = iter(
        string.ascii_lowercase.replace("m", "").replace("k", "").replace("n", "")
    )
    spare = iter(string.ascii_uppercase)
    count = max(len(batch_a), len(batch_b))
    left = right = out = ""
    for i in range(count):
        at_a, at_b = i - count + len(batch_a), i - count + len(batch_b)
        size_a = batch_a[at_a] if at_a >= 0 else None
        size_b = batch_b[at_b] if at_b >= 0 else None
        letter = next(names)
        out += letter
        if size_a is not None:
            alone = size_a == 1 and size_b not in (None, 1)
            left += next(spare) if alone else letter
        if size_b is not None:
            alone = size_b == 1 and size_a not in (None, 1)
            right += next(spare) if alone else letter
    rows = "m" if len(a) > 1 else ""
    columns = "n" if len(b) > 1 else ""
    return f"{left}{rows}k,{right}k{columns}->{out}{rows}{columns}"
