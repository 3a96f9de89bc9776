"""Operator rules: einsum-like strings that say which factors may be sharded.

A rule names every dim of the operands and outputs by factors, one letter each::

    mk,kn->mn          a product: `k` is contracted, its sums may stay pending
    mk,kn + n->mn      a sum of two terms; the second lacks `k`
    ...,...->...       leading dims of any number, broadcast as NumPy does
    b[t]d->b[t]d       `t` must be whole
    b{v},b->b          `v` may be sharded; the operator itself combines the pieces
    <d>e,<d>e-><d>e    `d` may be sharded, by one axis, and has a size of its own in
                       each operand and output; the operator itself moves the pieces
    b(hd)->bhd         a composite dim, of which only the leading factor may be sharded
    1d->bd             a dim of size 1 that no factor names
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tparmpi.errors import ShapeError

Dim = tuple[str, ...]
"""The factors whose product is a dim, outermost first; empty for a dim of size 1."""

WHOLE = "whole"
COMBINE = "combine"
MOVED = "moved"
FREE = "free"


@dataclass(frozen=True)
class Rule:
    """A rule with its letters bound to the dims of given shapes.

    Attributes
    ----------
    operands, outputs
        For each operand or output, its dims.
    terms
        For each operand, the number of the term it stands in.
    sizes
        Size of each factor; of a moved one, in the first operand that has it.
    kinds
        ``"free"``, ``"whole"``, ``"combine"`` or ``"moved"`` for each factor.
    output_shapes
        Shape of each output.
    """

    operands: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    terms: tuple[int, ...]
    sizes: Mapping[str, int]
    kinds: Mapping[str, str]
    output_shapes: tuple[tuple[int, ...], ...]

    def leading_dim(self, dims: tuple[Dim, ...], factor: str) -> int | None:
        """Return the number of the dim that `factor` leads, or None."""
        for number, dim in enumerate(dims):
            if dim and dim[0] == factor:
                return number
        return None

    def has(self, dims: tuple[Dim, ...], factor: str) -> bool:
        """Return whether `factor` occurs in any of `dims`."""
        return any(factor in dim for dim in dims)

    def term_has(self, term: int, factor: str) -> bool:
        """Return whether any operand of `term` has `factor`."""
        return any(
            number == term and self.has(dims, factor)
            for number, dims in zip(self.terms, self.operands, strict=True)
        )

    def shardable(self, factor: str, axis_sizes: Sequence[int]) -> bool:
        """Return whether `factor` may be split over axes of `axis_sizes`."""
        if self.kinds[factor] == WHOLE:
            return False
        if self.kinds[factor] == MOVED:
            return len(axis_sizes) == 1
        parts = prod(axis_sizes)
        for dims in (*self.operands, *self.outputs):
            for dim in dims:
                if factor not in dim:
                    continue
                if dim[0] != factor:
                    return False
                if (
                    prod(self.sizes[f] for f in dim[1:]) != 1
                    and self.sizes[factor] % parts
                ):
                    return False
        return True


def bind(
    text: str,
    shapes: Sequence[tuple[int, ...]],
    name: str,
    sizes: Mapping[str, int | tuple[int, ...]] | None = None,
) -> Rule:
    """Bind the rule `text` to operands of `shapes`.

    Parameters
    ----------
    name
        The operator's name, for error messages.
    sizes
        Sizes of factors that no operand dim tells alone; of a moved factor, those that
        it has in the outputs, one for each or one for all.

    Raises
    ------
    ShapeError
        If the shapes do not fit the rule.
    """
    terms, outputs = _parse(text)
    written = [
        (operand, number) for number, term in enumerate(terms) for operand in term
    ]
    if len(written) != len(shapes):
        raise ShapeError(
            f"{name}: takes {len(written)} operands, but {len(shapes)} were given"
        )
    kinds = {
        factor: kind
        for operand, _ in written
        for _, factors, kind in operand
        for factor in factors
    }
    known: dict[str, int] = {}
    moved: dict[str, int | tuple[int, ...]] = {}
    for factor, size in (sizes or {}).items():
        if kinds.get(factor) == MOVED:
            moved[factor] = size
        else:
            assert isinstance(size, int)
            known[factor] = size
    operands: list[tuple[Dim, ...]] = []
    expanded = [
        _expand(operand, len(shape), name, position, text)
        for position, ((operand, _), shape) in enumerate(
            zip(written, shapes, strict=True)
        )
    ]
    stretched = _stretched_factors(expanded, shapes)
    for position, dims in enumerate(expanded):
        operands.append(_bind_dims(dims, shapes, known, stretched, name, position))
    ellipsis = max(
        _ellipsis_length(operand, shape)
        for (operand, _), shape in zip(written, shapes, strict=True)
    )
    results = tuple(_expand_output(output, ellipsis) for output in outputs)
    seen = {factor for made in operands for dim in made for factor in dim}
    for factor in {factor for made in results for dim in made for factor in dim}:
        if factor.startswith("."):
            known.setdefault(factor, 1)
        if factor not in known:
            raise ShapeError(f"{name}: the size of '{factor}' is not known")
        if factor not in seen:
            kinds[factor] = WHOLE
    for factor in known:
        kinds.setdefault(factor, FREE)
    output_shapes = tuple(
        tuple(_output_size(dim, number, known, moved) for dim in dims)
        for number, dims in enumerate(results)
    )
    terms_of = tuple(number for _, number in written)
    return Rule(tuple(operands), results, terms_of, known, kinds, output_shapes)


def _output_size(
    dim: Dim,
    number: int,
    known: Mapping[str, int],
    moved: Mapping[str, int | tuple[int, ...]],
) -> int:
    """Size of a dim of output `number`."""
    if dim and dim[0] in moved:
        size = moved[dim[0]]
        return size[number] if isinstance(size, tuple) else size
    return prod(known[factor] for factor in dim)


_Item = tuple[str, Dim, str]
"""Of one written dim: "dim", "one" or "ellipsis"; its factors; their kind."""


@lru_cache(maxsize=4096)
def _parse(
    text: str,
) -> tuple[tuple[tuple[tuple[_Item, ...], ...], ...], tuple[tuple[_Item, ...], ...]]:
    left, arrow, right = text.replace(" ", "").partition("->")
    if not arrow:
        raise ShapeError(f"the rule '{text}' has no '->'")
    terms = tuple(
        tuple(tuple(_items(operand, text)) for operand in term.split(","))
        for term in left.split("+")
    )
    return terms, tuple(tuple(_items(output, text)) for output in right.split(","))


def _items(operand: str, text: str) -> Iterator[_Item]:
    closing = {
        "(": (")", FREE),
        "[": ("]", WHOLE),
        "{": ("}", COMBINE),
        "<": (">", MOVED),
    }
    at = 0
    while at < len(operand):
        char = operand[at]
        if operand.startswith("...", at):
            yield "ellipsis", (), FREE
            at += 3
        elif char == "1":
            yield "one", (), FREE
            at += 1
        elif char in closing:
            close, kind = closing[char]
            end = operand.find(close, at)
            if end < 0:
                raise ShapeError(f"the rule '{text}' lacks a '{close}'")
            yield "dim", tuple(operand[at + 1 : end]), kind
            at = end + 1
        elif char.isalpha():
            yield "dim", (char,), FREE
            at += 1
        else:
            raise ShapeError(f"the rule '{text}' has an unexpected '{char}'")


def _ellipsis_length(operand: tuple[_Item, ...], shape: tuple[int, ...]) -> int:
    if any(kind == "ellipsis" for kind, _, _ in operand):
        return len(shape) - len(operand) + 1
    return 0


def _expand(
    operand: tuple[_Item, ...], ndim: int, name: str, position: int, text: str
) -> list[tuple[str, Dim]]:
    """Replace an ellipsis by as many dims as the operand has, numbered "
    "from the right.
    """
    has_ellipsis = any(kind == "ellipsis" for kind, _, _ in operand)
    count = ndim - (len(operand) - has_ellipsis)
    if count < 0 or (count and not has_ellipsis):
        raise ShapeError(
            f"{name}: operand {position} has {ndim} dims, but the rule '{text}' wants "
            f"{len(operand) - has_ellipsis}{' or more' if has_ellipsis else ''}"
        )
    dims: list[tuple[str, Dim]] = []
    for item, factors, kind in operand:
        if item == "ellipsis":
            dims += [("broadcast", (f".{k}",)) for k in reversed(range(count))]
        else:
            dims.append((MOVED if kind == MOVED else item, factors))
    return dims


def _expand_output(operand: tuple[_Item, ...], ellipsis: int) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for kind, factors, _ in operand:
        if kind == "ellipsis":
            dims += [(f".{k}",) for k in reversed(range(ellipsis))]
        else:
            dims.append(factors)
    return tuple(dims)


def _stretched_factors(
    expanded: list[list[tuple[str, Dim]]], shapes: Sequence[tuple[int, ...]]
) -> set[str]:
    """Factors of broadcast dims that some operand has in another size than 1."""
    return {
        factors[0]
        for dims, shape in zip(expanded, shapes, strict=True)
        for (kind, factors), size in zip(dims, shape, strict=True)
        if kind == "broadcast" and size != 1
    }


def _bind_dims(
    dims: list[tuple[str, Dim]],
    shapes: Sequence[tuple[int, ...]],
    known: dict[str, int],
    stretched: set[str],
    name: str,
    position: int,
) -> tuple[Dim, ...]:
    bound: list[Dim] = []
    shape = shapes[position]
    for number, ((kind, factors), size) in enumerate(zip(dims, shape, strict=True)):
        if kind == "broadcast" and size == 1 and factors[0] in stretched:
            bound.append(())
            continue
        if kind == MOVED:
            known.setdefault(factors[0], size)
            bound.append(factors)
            continue
        unknown = [f for f in factors if f not in known]
        if len(unknown) == 1:
            others = prod(known[f] for f in factors if f in known)
            if others and size % others == 0:
                known[unknown[0]] = size // others
        if any(f not in known for f in factors):
            raise ShapeError(
                f"{name}: dim {number} of operand {position} ({size}) cannot be "
                f"factored as {'·'.join(factors)}"
            )
        expected = prod(known[f] for f in factors)
        if expected != size:
            raise ShapeError(
                f"{name}: dim {number} of operand {position} is {size}, but {expected} "
                f"is needed to fit the others; the operands' shapes are "
                f"{', '.join(map(str, shapes))}"
            )
        bound.append(factors)
    return tuple(bound)
