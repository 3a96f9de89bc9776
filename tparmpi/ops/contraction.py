"""Products: einsum, matmul, outer and linear, all by the backend's matrix product."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tparmpi.backend import dtypes
from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops import subscripts
from tparmpi.ops.products import contract
from tparmpi.tensors import Plan, Tensor, method, operator


def _product(plan: Plan, rule: str, arrays: Sequence[Any]) -> Any:
    if len(arrays) == 2:
        return contract(plan.backend, rule, *arrays)
    dtype = arrays[0].dtype
    wide = dtypes.accumulation_dtype(dtype)
    arrays = [array.astype(wide, copy=False) for array in arrays]
    # A copy, since of one operand NumPy may return a view.
    return plan.xp.array(plan.xp.einsum(rule, *arrays, optimize=True), dtype=dtype)


def _product_gradient(
    plan: Plan, rule: str, arrays: Sequence[Any], grad: Any, number: int
) -> Any:
    """Gradient of operand `number`: the product of the output's with the others."""
    product, lone = _gradient_rule(rule, number)
    factors = (grad, *arrays[:number], *arrays[number + 1 :])
    result = _product(plan, product, factors)
    if not lone:
        return result
    spread = plan.backend.empty(arrays[number].shape, result.dtype)
    spread[...] = plan.xp.expand_dims(result, lone)
    return spread


@lru_cache(maxsize=4096)
def _gradient_rule(rule: str, number: int) -> tuple[str, tuple[int, ...]]:
    """The product that is the gradient of operand `number`, and its dims that the
    output and all others lack: the gradient is the same all along those.
    """
    operands, out = rule.split("->")
    letters = operands.split(",")
    own = letters.pop(number)
    present = set(out).union(*letters)
    kept = "".join(x for x in own if x in present)
    lone = tuple(i for i, x in enumerate(own) if x not in present)
    return f"{','.join([out, *letters])}->{kept}", lone


def _einsum_rule(*shapes: tuple[int, ...], rule: str) -> str:
    return rule


@operator(
    _einsum_rule,
    name="einsum",
    linear=lambda dtypes, _: tuple(range(len(dtypes))),
    fresh=True,
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

    A sum over a split dim stays pending. A letter that stands twice in one operand
    takes its diagonal, see `diagonal`. Collective where operands are moved; else local.

    Parameters
    ----------
    rule
        As in `numpy.einsum`: ``"btd,dhe->bthe"``; without ``->`` the output has the
        letters that stand once, in the order of the alphabet; ``...`` stands for any
        number of dims, which are broadcast.

    Raises
    ------
    ShapeError
        If the rule cannot be read or the shapes do not fit it.
    """
    if not _is_plain(rule):
        check_tensors("einsum", operands)
        shapes = tuple(operand.shape for operand in operands)
        rule, diagonals = subscripts.explicit(rule, shapes)
        operands = tuple(
            _diagonals(operand, pairs)
            for operand, pairs in zip(operands, diagonals, strict=True)
        )
    result: Tensor = _einsum(*operands, rule=_checked_rule(rule, "einsum"))
    return result


@lru_cache(maxsize=4096)
def _is_plain(rule: str) -> bool:
    left, arrow, _ = rule.partition("->")
    repeats = any(len(set(x)) != len(x) for x in left.replace(" ", "").split(","))
    return bool(arrow) and "." not in rule and not repeats


def _diagonals(x: Tensor, pairs: tuple[tuple[int, int], ...]) -> Tensor:
    for dim, other in pairs:
        x = diagonal(x, dim, other)
    return x


def check_tensors(name: str, operands: Sequence[Any]) -> None:
    """Raise UsageError unless all operands of the operator `name` are tensors."""
    for number, operand in enumerate(operands):
        if not isinstance(operand, Tensor):
            raise UsageError(
                f"{name}: operand {number} is a {type(operand).__name__}, not a "
                "tensor; make it one with tpm.tensor(array, group)"
            )


def _diagonal_rule(x: tuple[int, ...], *, dim: int, other: int) -> str:
    letters = string.ascii_letters[: len(x)]
    kept = "".join(letters[i] for i in range(len(x)) if i not in (dim, other))
    return f"{letters}->{kept}{letters[dim]}"


@operator(_diagonal_rule, name="diagonal", linear=(0,))
def _diagonal(plan: Plan, x: Any) -> Any:
    """Return the diagonal of the attributes `dim` and `other`: a product with ones.

    If `other` is split, each member gives the elements that it has, zeros elsewhere.
    """
    result = plan.backend.zeros(plan.outputs[0].local_shape, x.dtype)
    rows, columns = _diagonal_here(plan)
    square = plan.xp.moveaxis(x, _diagonal_dims(plan), (-2, -1))[..., rows, columns]
    result[..., rows] = plan.xp.diagonal(square, 0, -2, -1)
    return result, None


@_diagonal.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    xp = plan.xp
    dx = plan.backend.zeros(plan.inputs[0].local_shape, grad.dtype)
    rows, columns = _diagonal_here(plan)
    block = xp.moveaxis(dx, _diagonal_dims(plan), (-2, -1))
    row, column = (xp.arange(part.start, part.stop) for part in (rows, columns))
    block[..., row, column] = grad[..., rows]
    return (dx,)


def _diagonal_dims(plan: Plan) -> tuple[int, int]:
    return plan.attributes["dim"], plan.attributes["other"]


def _diagonal_here(plan: Plan) -> tuple[slice, slice]:
    """Where in the two dims this rank's block has elements of the diagonal."""
    first, second = (
        plan.factors[string.ascii_letters[i]] for i in _diagonal_dims(plan)
    )
    start = max(first.offset, second.offset)
    stop = max(min(first.offset + first.length, second.offset + second.length), start)
    return (
        slice(start - first.offset, stop - first.offset),
        slice(start - second.offset, stop - second.offset),
    )


@method
def diagonal(x: Tensor, dim: int = 0, other: int = 1) -> Tensor:
    """Return the elements of `x` at which two dims have one index, as its last dim.

    Local. If `dim` is split so is the result; if `other` is, the result is pending.

    Raises
    ------
    ShapeError
        If a dim does not exist, or the two differ in size.
    """
    for number in (dim, other):
        if not -x.ndim <= number < x.ndim:
            raise ShapeError(
                f"diagonal: a tensor of shape {x.shape} has no dim {number}"
            )
    dim, other = dim % x.ndim, other % x.ndim
    if dim == other or x.shape[dim] != x.shape[other]:
        raise ShapeError(
            f"diagonal: two dims of equal size are needed; dims {dim} and {other} of a "
            f"tensor of shape {x.shape} were given"
        )
    result: Tensor = _diagonal(x, dim=dim, other=other)
    return result


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of all elements of two vectors: (N,) and (M,) to (N, M).

    Local; either may be split, and pending sums pass.

    Raises
    ------
    ShapeError
        If an operand is no vector.
    """
    check_tensors("outer", (a, b))
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(
            f"outer: two vectors are needed, the shapes are {a.shape} and {b.shape}; "
            "use x.reshape((-1,)) to make one"
        )
    result: Tensor = _einsum(a, b, rule="n,m->nm")
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


@operator(_linear_rule, name="linear", linear=(0, 1), fresh=True)
def _linear(plan: Plan, x: Any, weight: Any, bias: Any) -> Any:
    """Return a product plus a bias, as the attribute `rule` says."""
    parts = _linear_parts(plan.attributes["rule"])
    y = contract(plan.backend, parts.product, x, weight)
    if plan.leads(2):
        y += _aligned(bias, parts.bias, parts.out)
    return y, (x, weight)


@_linear.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    parts = _linear_parts(plan.attributes["rule"])
    dx, dweight = (
        _product_gradient(plan, parts.product, saved, grad, number)
        if wanted[number]
        else None
        for number in (0, 1)
    )
    dbias = None
    if wanted[2]:
        # A sum by the matrix product: faster, and of halves in float32.
        shape = tuple(grad.shape[dim] for dim in parts.over)
        ones = plan.xp.ones(shape, grad.dtype)
        dbias = contract(plan.backend, parts.bias_sum, grad, ones)
    return dx, dweight, dbias


class _LinearParts(NamedTuple):
    """Attributes: the product; the letters of the bias and of the output; the product
    with ones that sums an output over what the bias lacks, and those dims.
    """

    product: str
    bias: str
    out: str
    bias_sum: str
    over: tuple[int, ...]


@lru_cache(maxsize=4096)
def _linear_parts(rule: str) -> _LinearParts:
    left, out = rule.split("->")
    product, bias = left.split("+")
    over = tuple(dim for dim, x in enumerate(out) if x not in bias)
    lacking = "".join(out[dim] for dim in over)
    return _LinearParts(
        f"{product}->{out}", bias, out, f"{out},{lacking}->{bias}", over
    )


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
    check_tensors("matmul", (a, b))
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
