"""What must become of a split dim, for every operator and dim, from the mathematics.

Written without a look at the operators' records. Each entry calls one operator on
operands whose dims have roles, one letter each, as in ``"mk,kn->mn"``, and says for
each role what the operator may do where that dim of all operands, or of one of them, is
split over members:

kept
    Each element of the result needs elements of one chunk only, or of operands that are
    whole: nothing travels, and the result is split along the same role.
statistics
    Small statistics travel: numbers for each row, of which there are as many however
    long the dim is. A result that has the role is split along it, another is whole.
partial
    The result is a sum over the dim, each member has its summand, and the sum stays
    pending: nothing travels.
moves
    Elements of the result stand elsewhere than in the operand. Exactly those travel
    whose owner changes, once, and nothing else does.
ring
    Every member needs all chunks, one at a time: they go round, each of them once (in
    the backward with a gradient for each), and nobody holds the whole.
gathers
    The dim is made whole, because of the reason beside it.

The same holds for the backward pass; there a pending gradient of an operand that is
whole counts as kept. The classes are in the order of what a user pays: a `Gathers` in
place of another is a downgrade and says why it is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tparmpi as tpm

KEPT = "kept"
STATISTICS = "statistics"
PARTIAL = "partial"
MOVES = "moves"
RING = "ring"


@dataclass(frozen=True)
class Gathers:
    """The dim is made whole, for a reason."""

    reason: str


@dataclass(frozen=True)
class Expected:
    """One operator, called in one way.

    Attributes
    ----------
    operator
        As the users' list of operators names it; after a slash the way it is called.
    dims
        Roles of the dims of operands and results; ``1`` is a dim of size 1.
    roles
        The class of each role that may be split.
    call
        Takes the operands.
    kinds
        For each operand ``f`` (floating, between 0 and 1, distinct), ``b`` (booleans)
        or ``i`` and a role (integers below the size of the role); all ``f`` if empty.
    sizes
        Sizes of roles that differ from `SIZE`, or that no operand has.
    """

    operator: str
    dims: str
    roles: dict[str, str | Gathers]
    call: Callable[..., Any]
    kinds: str = ""
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def operands(self) -> list[str]:
        return self.dims.split("->")[0].split(",")

    @property
    def results(self) -> list[str]:
        return self.dims.split("->")[1].split(",")

    def arrays(self, sizes: dict[str, int]) -> list[np.ndarray]:
        """Operands whose roles have `sizes`, and the entry's own or `SIZE` where not
        given.
        """
        sizes = {**dict.fromkeys("".join(self.operands), SIZE), **self.sizes, **sizes}
        sizes["1"] = 1
        kinds = self.kinds.split(",") if self.kinds else ["f"] * len(self.operands)
        return [
            _made(kind, tuple(sizes[role] for role in roles), sizes, number)
            for number, (kind, roles) in enumerate(
                zip(kinds, self.operands, strict=True)
            )
        ]


SIZE = 4
"""Size of the roles that are not split."""


def _made(
    kind: str, shape: tuple[int, ...], sizes: dict[str, int], number: int
) -> np.ndarray:
    count = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if kind[0] == "i":
        return (count * 5 + number) % sizes[kind[1]]
    spread = ((count + 1) * 0.6180339887 + number * 0.377) % 1
    return spread > 0.5 if kind == "b" else 0.1 + 0.8 * spread


def elementwise(
    name: str, operands: int = 1, kinds: str = "", **calls: Callable[..., Any]
) -> list[Expected]:
    """Every element for itself; a dim along which an operand is repeated is split with
    the others'.
    """
    function = calls.get("call") or (lambda *x: getattr(tpm, name)(*x))
    kept = {"a": KEPT, "b": KEPT}
    dims = ",".join(["ab"] * operands) + "->ab"
    entries = [Expected(name, dims, kept, function, kinds)]
    if operands == 2:
        entries += [
            Expected(f"{name}/repeated", "ab,b->ab", kept, function, kinds),
            Expected(f"{name}/size 1", "1b,a1->ab", kept, function, kinds),
        ]
    return entries


def reduction(
    name: str, reduced: str | Gathers, call: Callable[..., Any], kinds: str = ""
) -> list[Expected]:
    """The other dims are kept; the reduced one is gone."""
    return [Expected(name, "br->b", {"b": KEPT, "r": reduced}, call, kinds)]


def summed(loss: str) -> list[Expected]:
    """A loss's sum over all elements; their number is known to all."""
    partial = {"a": PARTIAL, "b": PARTIAL}
    function = lambda *x: getattr(tpm, f"{loss}_sum")(*x)[0]  # noqa: E731
    return [Expected(f"{loss}/sum", "ab,ab->", partial, function)]


ELEMENTWISE = [
    *elementwise("add", 2),
    *elementwise("sub", 2),
    *elementwise("mul", 2),
    *elementwise("div", 2),
    *elementwise("floor_divide", 2),
    *elementwise("pow", 2),
    *elementwise("maximum", 2),
    *elementwise("minimum", 2),
    *elementwise("eq", 2),
    *elementwise("ne", 2),
    *elementwise("lt", 2),
    *elementwise("le", 2),
    *elementwise("gt", 2),
    *elementwise("ge", 2),
    *elementwise("logical_and", 2, "b,b"),
    *elementwise("logical_or", 2, "b,b"),
    *elementwise("logical_xor", 2, "b,b"),
    *elementwise("logical_not", 1, "b"),
    *elementwise("where", 3, "b,f,f"),
    *elementwise("neg"),
    *elementwise("abs"),
    *elementwise("sqrt"),
    *elementwise("rsqrt"),
    *elementwise("exp"),
    *elementwise("log"),
    *elementwise("sin"),
    *elementwise("cos"),
    *elementwise("tanh"),
    *elementwise("sigmoid"),
    *elementwise("erf"),
    *elementwise("relu"),
    *elementwise("gelu"),
    *elementwise("gelu/erf", call=lambda x: tpm.gelu(x, approximate="none")),
    *elementwise("silu"),
    *elementwise("softplus"),
    *elementwise("clip", call=lambda x: tpm.clip(x, 0.3, 0.7)),
    *elementwise("cast", call=lambda x: tpm.cast(x, "float32")),
    *elementwise("scale", call=lambda x: x * 2.5),
    *elementwise("divide", call=lambda x: x / 2.5),
    *elementwise("power", call=lambda x: x**3),
    *elementwise("bitwise_and", 2, "b,b"),
    *elementwise("bitwise_or", 2, "b,b"),
    *elementwise("bitwise_xor", 2, "b,b"),
    *elementwise("bitwise_not", 1, "b"),
    *elementwise("isfinite"),
    *elementwise("isinf"),
    *elementwise("isnan"),
    *elementwise("copy"),
]

LINEAR_ALGEBRA = [
    Expected("matmul", "mk,kn->mn", {"m": KEPT, "k": PARTIAL, "n": KEPT}, tpm.matmul),
    Expected(
        "matmul/batch",
        "bmk,bkn->bmn",
        {"b": KEPT, "m": KEPT, "k": PARTIAL, "n": KEPT},
        tpm.matmul,
    ),
    Expected("matmul/left vector", "k,kn->n", {"k": PARTIAL, "n": KEPT}, tpm.matmul),
    Expected("matmul/right vector", "mk,k->m", {"m": KEPT, "k": PARTIAL}, tpm.matmul),
    Expected("matmul/vectors", "k,k->", {"k": PARTIAL}, tpm.matmul),
    Expected(
        "einsum",
        "abc,cad->dba",
        {"a": KEPT, "b": KEPT, "c": PARTIAL, "d": KEPT},
        lambda x, y: tpm.einsum("abc,cad->dba", x, y),
    ),
    Expected(
        "einsum/three",
        "ab,bc,c->a",
        {"a": KEPT, "b": PARTIAL, "c": PARTIAL},
        lambda x, y, z: tpm.einsum("ab,bc,c->a", x, y, z),
    ),
    Expected(
        "einsum/diagonal",
        "iib->ib",
        {"b": KEPT},
        lambda x: tpm.einsum("iib->ib", x),
    ),
    Expected("outer", "m,n->mn", {"m": KEPT, "n": KEPT}, lambda x, y: tpm.outer(x, y)),
    Expected(
        "linear",
        "btk,kn,n->btn",
        {"b": KEPT, "t": KEPT, "k": PARTIAL, "n": KEPT},
        lambda x, w, b: tpm.linear(x, w, b, "btk,kn->btn"),
    ),
]

REDUCTIONS = [
    *reduction("sum", PARTIAL, lambda x: x.sum(1)),
    *reduction("mean", PARTIAL, lambda x: x.mean(1)),
    *reduction("max", STATISTICS, lambda x: x.max(1)),
    *reduction("min", STATISTICS, lambda x: x.min(1)),
    *reduction("prod", STATISTICS, lambda x: x.prod(1)),
    *reduction("var", STATISTICS, lambda x: x.var(1)),
    *reduction("std", STATISTICS, lambda x: x.std(1)),
    *reduction("argmax", STATISTICS, lambda x: x.argmax(1)),
    *reduction("argmin", STATISTICS, lambda x: x.argmin(1)),
    *reduction("logsumexp", STATISTICS, lambda x: x.logsumexp(1)),
    *reduction("norm", STATISTICS, lambda x: x.norm(1)),
    *reduction("any", STATISTICS, lambda x: x.any(1), "b"),
    *reduction("all", STATISTICS, lambda x: x.all(1), "b"),
    # A member needs the sum of those before it: one number a row from each.
    Expected("cumsum", "br->br", {"b": KEPT, "r": STATISTICS}, lambda x: x.cumsum(1)),
]

INNER = Gathers(
    "an inner factor of a merged dim is no run of it: its elements lie all over"
)
ORDER = Gathers("any element may come to stand anywhere; allowed, and documented")
SHAPE = [
    Expected(
        "reshape",
        "abc->ab",
        {"a": KEPT, "b": KEPT, "c": INNER},
        lambda x: x.reshape((x.shape[0], -1)),
    ),
    Expected(
        "reshape/split",
        "ab->a1b",
        {"a": KEPT, "b": KEPT},
        lambda x: x.reshape((x.shape[0] // 2, 2, x.shape[1])),
    ),
    Expected(
        "transpose",
        "abc->cab",
        {"a": KEPT, "b": KEPT, "c": KEPT},
        lambda x: x.transpose((2, 0, 1)),
    ),
    Expected(
        "swap",
        "abc->cba",
        {"a": KEPT, "b": KEPT, "c": KEPT},
        lambda x: x.swap(0, 2),
    ),
    Expected(
        "expand",
        "a1->xay",
        {"a": KEPT},
        lambda x: x.expand((3, x.shape[0], 5)),
    ),
    Expected("squeeze", "a1b->ab", {"a": KEPT, "b": KEPT}, lambda x: x.squeeze(1)),
    Expected(
        "stack",
        "ab,ab->axb",
        {"a": KEPT, "b": KEPT},
        lambda x, y: tpm.stack([x, y], 1),
    ),
    Expected(
        "concat",
        "da,da->da",
        {"a": KEPT, "d": MOVES},
        lambda x, y: tpm.concat([x, y], 0),
    ),
    Expected(
        "split",
        "da->da,da",
        {"a": KEPT, "d": MOVES},
        lambda x: x.split((3, x.shape[0] - 3), 0),
    ),
    Expected("slice", "da->da", {"a": KEPT, "d": MOVES}, lambda x: x[1:-2]),
    # One row is what its owner has plus nothing from the others.
    Expected("slice/one", "da->a", {"a": KEPT, "d": PARTIAL}, lambda x: x[3]),
    Expected(
        "pad",
        "da->da",
        {"a": KEPT, "d": MOVES},
        lambda x: tpm.pad(x, ((1, 2), (0, 0))),
    ),
    # Products with a matrix of ones and zeros, hence sums over the dim that is indexed.
    Expected(
        "take",
        "dav,i->dai",
        {"d": KEPT, "a": KEPT, "i": KEPT, "v": PARTIAL},
        lambda x, i: tpm.take(x, i, 2),
        "f,iv",
    ),
    Expected(
        "gather",
        "bv,bi->bi",
        {"b": KEPT, "i": KEPT, "v": PARTIAL},
        lambda x, i: tpm.gather(x, i, 1),
        "f,iv",
    ),
    Expected(
        "scatter_add",
        "bv,bi,bi->bv",
        {"b": KEPT, "i": PARTIAL, "v": KEPT},
        lambda x, i, y: tpm.scatter_add(x, i, y, 1),
        "f,iv,f",
    ),
    Expected(
        "integer indexing",
        "vab,i->iab",
        {"a": KEPT, "b": KEPT, "i": KEPT, "v": PARTIAL},
        lambda x, i: x[i],
        "f,iv",
    ),
    Expected(
        "triangular",
        "atb->atb",
        {"a": KEPT, "t": KEPT, "b": KEPT},
        lambda x: tpm.tril(x),
    ),
    Expected(
        "triangular/upper",
        "atb->atb",
        {"a": KEPT, "t": KEPT, "b": KEPT},
        lambda x: tpm.triu(x, 1),
    ),
    Expected(
        "one_hot",
        "ab->abx",
        {"a": KEPT, "b": KEPT},
        lambda x: tpm.one_hot(x, 6),
        "ix",
        {"x": 6},
    ),
    Expected(
        "strided slice",
        "da->da",
        {"a": KEPT, "d": MOVES},
        lambda x: x[::2],
    ),
    Expected(
        "repeat",
        "da->da",
        {"a": KEPT, "d": MOVES},
        lambda x: tpm.repeat(x, 2, 0),
    ),
    Expected("flip", "da->da", {"a": KEPT, "d": MOVES}, lambda x: tpm.flip(x, 0)),
    Expected("roll", "da->da", {"a": KEPT, "d": MOVES}, lambda x: tpm.roll(x, 3, 0)),
    # The k largest of all are among the k largest of each member.
    Expected(
        "topk",
        "da->xa,xa",
        {"a": KEPT, "d": STATISTICS},
        lambda x: tpm.topk(x, 2, 0),
    ),
    Expected("sort", "da->da,da", {"a": KEPT, "d": ORDER}, lambda x: tpm.sort(x, 0)),
]

PAIRS = Gathers(
    "a rotated pair is made of two elements, one of each half or neighbours: both must "
    "be here, in whichever chunks they would come to lie"
)
SCORES = Gathers(
    "scores are sums over the features; their partial ones are larger than q and k"
)
KEYS = Gathers("every query sees every key: K and V are gathered, or go round a ring")

NETWORK = [
    Expected("softmax", "bv->bv", {"b": KEPT, "v": STATISTICS}, lambda x: x.softmax(1)),
    Expected(
        "log_softmax",
        "bv->bv",
        {"b": KEPT, "v": STATISTICS},
        lambda x: x.log_softmax(1),
    ),
    Expected(
        "layer_norm",
        "btd,d,d->btd",
        {"b": KEPT, "t": KEPT, "d": STATISTICS},
        tpm.layer_norm,
    ),
    Expected(
        "rms_norm",
        "btd,d->btd",
        {"b": KEPT, "t": KEPT, "d": STATISTICS},
        lambda x, gain: tpm.rms_norm(x, gain),
    ),
    Expected(
        "group_norm",
        "bcs,c,c->bcs",
        {"b": KEPT, "c": KEPT, "s": STATISTICS},
        lambda x, gain, bias: tpm.group_norm(x, 4, gain, bias),
    ),
    Expected(
        "dropout", "ab->ab", {"a": KEPT, "b": KEPT}, lambda x: x.dropout(0.5, "s")
    ),
    Expected(
        "embedding",
        "vd,bt->btd",
        {"b": KEPT, "t": KEPT, "d": KEPT, "v": PARTIAL},
        tpm.embedding,
        "f,iv",
    ),
    Expected(
        "cross_entropy",
        "btv,bt->bt",
        {"b": KEPT, "t": KEPT, "v": STATISTICS},
        tpm.cross_entropy,
        "f,iv",
    ),
    Expected(
        "cross_entropy/smooth",
        "btv,bt->bt",
        {"b": KEPT, "t": KEPT, "v": STATISTICS},
        lambda x, i: tpm.cross_entropy(x, i, label_smoothing=0.1, ignore_index=2),
        "f,iv",
    ),
    Expected(
        "cross_entropy/sum",
        "btv,bt->,",
        {"b": PARTIAL, "t": PARTIAL, "v": STATISTICS},
        lambda x, i: tpm.cross_entropy_sum(x, i, ignore_index=2),
        "f,iv",
    ),
    Expected(
        "rotary positions/interleaved",
        "bthe->bthe",
        {"b": KEPT, "t": KEPT, "h": KEPT, "e": PAIRS},
        lambda x: tpm.rotary(x, interleaved=True),
    ),
    Expected(
        "rotary positions/given",
        "bthe,bt->bthe",
        {"b": KEPT, "t": KEPT, "h": KEPT, "e": PAIRS},
        tpm.rotary,
        "f,it",
    ),
    Expected(
        "rotary positions",
        "bthe->bthe",
        {"b": KEPT, "t": KEPT, "h": KEPT, "e": PAIRS},
        lambda x: tpm.rotary(x),
    ),
    Expected(
        "attention",
        "bthe,bshe,bshf->bthf",
        {"b": KEPT, "t": KEPT, "h": KEPT, "e": SCORES, "f": KEPT, "s": KEYS},
        lambda q, k, v: tpm.attention(q, k, v, causal=False),
    ),
    Expected(
        "attention/causal",
        "bthe,bthe,bthf->bthf",
        {"b": KEPT, "t": KEYS, "h": KEPT, "e": SCORES, "f": KEPT},
        tpm.attention,
    ),
    Expected(
        "attention/window",
        "bthe,bshe,bshf->bthf",
        {"b": KEPT, "t": KEPT, "h": KEPT, "e": SCORES, "f": KEPT, "s": KEYS},
        lambda q, k, v: tpm.attention(q, k, v, causal=False, window=2),
    ),
    Expected(
        "attention/mask",
        "bthe,bshe,bshf,bhts->bthf",
        {"b": KEPT, "t": KEPT, "h": KEPT, "e": SCORES, "f": KEPT, "s": KEYS},
        lambda q, k, v, mask: tpm.attention(q, k, v, mask, causal=False),
        "f,f,f,b",
    ),
    Expected(
        "attention/grouped",
        "btkge,bske,bskf->btkgf",
        {
            "b": KEPT,
            "t": KEPT,
            "k": KEPT,
            "g": KEPT,
            "f": KEPT,
            "e": SCORES,
            "s": KEYS,
        },
        lambda q, k, v: tpm.attention(q, k, v, causal=False),
    ),
    Expected(
        "attention/ring",
        "bthe,bthe,bthf->bthf",
        {"b": KEPT, "t": RING, "h": KEPT, "e": SCORES, "f": KEPT},
        lambda q, k, v: tpm.attention(q, k, v, causal=False, ring=True),
    ),
    *elementwise("swiglu", 2)[:1],
    *elementwise("geglu", 2)[:1],
    *elementwise("mse", 2)[:1],
    *elementwise("bce", 2)[:1],
    *summed("mse"),
    *summed("bce"),
]

EXPECTED = [*ELEMENTWISE, *LINEAR_ALGEBRA, *REDUCTIONS, *SHAPE, *NETWORK]

NAMED = [
    *("add", "sub", "mul", "div", "floor_divide", "pow", "neg", "abs", "sqrt", "rsqrt"),
    *("exp", "log", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "gelu", "silu"),
    *("softplus", "clip", "maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt"),
    *("ge", "logical_and", "logical_or", "logical_xor", "logical_not", "cast"),
    *("matmul", "einsum", "outer", "linear"),
    *("sum", "mean", "max", "min", "prod", "var", "argmax", "logsumexp", "cumsum"),
    *("norm", "any", "all"),
    *("reshape", "transpose", "swap", "expand", "squeeze", "stack", "concat", "split"),
    *("slice", "pad", "take", "gather", "scatter_add", "integer indexing"),
    *("triangular", "one_hot", "strided slice", "repeat", "flip", "roll", "topk"),
    "sort",
    *("softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "dropout"),
    *("embedding", "cross_entropy", "rotary positions", "attention", "swiglu"),
    *("geglu", "mse", "bce"),
]
"""The operators that users are promised; each has an entry."""
