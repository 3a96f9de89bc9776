"""Einsum strings: from what NumPy reads to explicit ones without repeated letters."""

from __future__ import annotations

import string
from collections import Counter
from functools import lru_cache

from tparmpi.errors import ShapeError

Shape = tuple[int, ...]


@lru_cache(maxsize=4096)
def explicit(
    rule: str, shapes: tuple[Shape, ...]
) -> tuple[str, tuple[tuple[tuple[int, int], ...], ...]]:
    """Return an explicit string for `rule`, and the diagonals to take first.

    Dims that ``...`` stands for get letters of their own, from the right; one of size 1
    that is broadcast gets a letter that the output lacks.

    Returns
    -------
    rule
        Such as ``"ab,bc->ac"``, for the operands after their diagonals were taken.
    diagonals
        For each operand the pairs of dims that have one letter, in the order in which
        to take their diagonals; each puts the common dim last.

    Raises
    ------
    ShapeError
        If the rule cannot be read or does not fit the shapes.
    """
    left, arrow, out = rule.replace(" ", "").partition("->")
    written = left.split(",")
    if len(written) != len(shapes):
        raise ShapeError(
            f"einsum: the rule '{rule}' has {len(written)} operands, but "
            f"{len(shapes)} were given"
        )
    for text in (*written, out):
        _check(rule, text)
    used = set(left + out)
    spare = iter([x for x in string.ascii_letters if x not in used])
    broadcast = _broadcast_sizes(rule, written, shapes)
    shared = {number: next(spare) for number in range(len(broadcast))}
    operands = []
    for text, shape in zip(written, shapes, strict=True):
        before, dots, after = text.partition("...")
        inside = len(shape) - len(before) - len(after)
        middle = ""
        for place in range(inside if dots else 0):
            number = inside - 1 - place
            stretched = shape[len(before) + place] == 1 and broadcast[number] != 1
            middle += next(spare) if stretched else shared[number]
        operands.append(before + middle + after)
    dots = "".join(shared[number] for number in reversed(range(len(broadcast))))
    if not arrow:
        count = Counter("".join(written).replace(".", ""))
        out = "..." + "".join(sorted(x for x, times in count.items() if times == 1))
        out = out if dots else out[3:]
    if dots and "..." not in out:
        raise ShapeError(
            f"einsum: the rule '{rule}' has '...' in an operand but not in the output"
        )
    out = out.replace("...", dots)
    missing = set(out) - set("".join(operands))
    if missing or len(set(out)) != len(out):
        letter = min(missing) if missing else Counter(out).most_common(1)[0][0]
        problem = "in the output only" if missing else "twice in the output"
        raise ShapeError(f"einsum: the rule '{rule}' has '{letter}' {problem}")
    made = [
        _without_repeats(rule, letters, shape)
        for letters, shape in zip(operands, shapes, strict=True)
    ]
    text = ",".join(letters for letters, _ in made)
    return f"{text}->{out}", tuple(pairs for _, pairs in made)


def _check(rule: str, text: str) -> None:
    if not set(text.replace("...", "", 1)) <= set(string.ascii_letters):
        raise ShapeError(
            f"einsum: the rule '{rule}' must be letters, ',', at most one '...' in "
            "each operand and at most one '->', such as 'btd,df->btf'"
        )


def _broadcast_sizes(
    rule: str, written: list[str], shapes: tuple[Shape, ...]
) -> list[int]:
    """Sizes of the dims that ``...`` stands for, from the right."""
    sizes: list[int] = []
    for number, (text, shape) in enumerate(zip(written, shapes, strict=True)):
        before, dots, after = text.partition("...")
        inside = len(shape) - len(before) - len(after)
        if inside < 0 or (inside and not dots):
            raise ShapeError(
                f"einsum: operand {number} has {len(shape)} dims, but '{text}' in the "
                f"rule '{rule}' names {len(before) + len(after)}"
            )
        for place in range(inside):
            size = shape[len(shape) - len(after) - 1 - place]
            if place == len(sizes):
                sizes.append(size)
            elif sizes[place] == 1:
                sizes[place] = size
            elif size not in (1, sizes[place]):
                raise ShapeError(
                    f"einsum: the dims of '...' in the rule '{rule}' cannot be "
                    f"broadcast; the shapes are {', '.join(map(str, shapes))}"
                )
    return sizes


def _without_repeats(
    rule: str, letters: str, shape: Shape
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The letters after the diagonals of equal ones were taken, and these."""
    pairs = []
    sizes = list(shape)
    while len(set(letters)) != len(letters):
        letter = Counter(letters).most_common(1)[0][0]
        first = letters.index(letter)
        second = letters.index(letter, first + 1)
        if sizes[first] != sizes[second]:
            raise ShapeError(
                f"einsum: '{letter}' in the rule '{rule}' names two dims of one "
                f"operand, of sizes {sizes[first]} and {sizes[second]}"
            )
        pairs.append((first, second))
        kept = [i for i in range(len(letters)) if i not in (first, second)]
        sizes = [*(sizes[i] for i in kept), sizes[first]]
        letters = "".join(letters[i] for i in kept) + letter
    return letters, tuple(pairs)
