"""Attention: of whole keys and values, or of keys and values passed round a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tparmpi.backend import dtypes
from tparmpi.backend.attention import Band
from tparmpi.errors import ShapeError, UsageError
from tparmpi.ops import ring
from tparmpi.tensors import Plan, Tensor, operator


def _attention_rule(
    *shapes: tuple[int, ...], causal: bool, window: int | None, ring: bool
) -> tuple[str, dict[str, int]]:
    """Queries and keys are ``t`` and ``s``, heads ``k`` times ``g`` in each group."""
    q, k, v, *mask = shapes
    _check_shapes(q, k, v, causal)
    sizes = {"k": k[2], "g": 1}
    if len(q) == 5:
        heads = ["k", "g"]
        sizes["g"] = q[3]
    elif q[2] == k[2]:
        heads = ["k"]
    else:
        heads = ["(kg)"]
        sizes["g"] = q[2] // k[2]
    queries, keys = ("<t>", "<t>") if ring else ("t", "[s]")
    if ring:
        sizes["t"] = q[1]
    left = [
        f"b{queries}{''.join(heads)}[e]",
        f"b{keys}k[e]",
        f"b{keys}kf",
        *(_mask_letters(shape, ["b", *heads, queries, "[s]"], q, k) for shape in mask),
    ]
    return f"{','.join(left)}->b{queries}{''.join(heads)}f", sizes


def _check_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], causal: bool
) -> None:
    if len(q) not in (4, 5) or len(k) != 4 or len(v) != 4:
        raise ShapeError(
            "attention: q must be (B, T, H, E) or (B, T, K, G, E), k (B, S, K, E) and "
            f"v (B, S, K, F); they are {q}, {k} and {v}"
        )
    heads = k[2] if len(q) == 5 else max(k[2], 1)
    if (len(q) == 5 and q[2] != heads) or (len(q) == 4 and q[2] % heads):
        raise ShapeError(
            f"attention: q has {q[2]} heads, in shape {q}, and k has {k[2]}, in shape "
            f"{k}; each head of k serves the same number of heads of q"
        )
    if causal and q[1] > k[1]:
        raise ShapeError(
            f"attention: {q[1]} queries over {k[1]} keys cannot be causal, since the "
            "last query stands at the last key; give causal=False"
        )


def _mask_letters(
    shape: tuple[int, ...], letters: list[str], q: tuple[int, ...], k: tuple[int, ...]
) -> str:
    whole = (*q[:1], *q[2:-1], q[1], k[1])
    if len(shape) > len(whole) or any(
        size not in (1, full)
        for size, full in zip(reversed(shape), reversed(whole), strict=False)
    ):
        raise ShapeError(
            f"attention: the mask, of shape {shape}, cannot be broadcast to the "
            f"scores, {whole}"
        )
    last = letters[len(letters) - len(shape) :]
    return "".join(
        "1" if size == 1 else letter for size, letter in zip(shape, last, strict=True)
    )


def _attention_dtype(
    operands: Sequence[np.dtype[Any]], attributes: dict[str, Any]
) -> np.dtype[Any]:
    dtype = dtypes.promote(*(d for d in operands if d.kind != "b"))
    return np.dtype(np.float64) if dtype.kind in "iu" else dtype


@operator(_attention_rule, name="attention", dtype=_attention_dtype, cast=False)
def _attention(
    plan: Plan, q: Any, k: Any, v: Any, *mask: Any, scale: float | None
) -> Any:
    """Return ``softmax(scale q k^T) v`` for each batch row and head."""
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5
    band = _band(plan)
    q_h, k_h, v_h, bias = _prepared(plan, q, k, v, mask)
    if _is_ring(plan):
        y, softmax = ring.attention(plan, q_h, k_h, v_h, scale, band, bias)
    else:
        y, softmax = plan.backend.attention(q_h, k_h, v_h, scale, band, bias)
    outputs = y.reshape(plan.outputs[0].local_shape)
    outputs = outputs.astype(plan.outputs[0].dtype, copy=False)
    return outputs, (q, k, v, mask, y, softmax, scale)


@_attention.define_backward
def _(plan: Plan, saved: Any, grad: Any, wanted: tuple[bool, ...]) -> Any:
    q, k, v, mask, y, softmax, scale = saved
    band = _band(plan)
    q_h, k_h, v_h, bias = _prepared(plan, q, k, v, mask)
    grad = grad.reshape(y.shape).astype(y.dtype, copy=False)
    given = (q_h, k_h, v_h, softmax, y, grad, scale, band, bias)
    of_mask = bool(mask) and wanted[3]
    all_wanted = (wanted[0], wanted[1], wanted[2], of_mask)
    if _is_ring(plan):
        grads = ring.attention_backward(plan, *given, all_wanted)
    else:
        grads = plan.backend.attention_backward(*given, all_wanted)
    return tuple(
        g if g is None else g.reshape(spec.local_shape).astype(spec.dtype, copy=False)
        for spec, g in zip(plan.inputs, grads[: len(wanted)], strict=True)
    )


def _is_ring(plan: Plan) -> bool:
    return plan.attributes["ring"] and bool(plan.factors["t"].axes)


def _band(plan: Plan) -> Band:
    """What the first query sees: of all queries in a ring, else of this rank's."""
    origin = plan.inputs[1].shape[1] - plan.inputs[0].shape[1]
    if not _is_ring(plan):
        origin += plan.factors["t"].offset
    window = plan.attributes["window"]
    behind = None if window is None else origin - window + 1
    if plan.attributes["causal"]:
        return behind, origin
    return behind, None if window is None else origin + window - 1


def _prepared(
    plan: Plan, q: Any, k: Any, v: Any, mask: tuple[Any, ...]
) -> tuple[Any, Any, Any, Any]:
    """Operands as the kernels take them: of one wide dtype, but for keys and values "
    "that travel; heads of q in one dim; the mask to be added.
    """
    narrow = plan.outputs[0].dtype
    dtype = dtypes.accumulation_dtype(narrow)
    travelling = narrow if _is_ring(plan) else dtype
    k, v = (x.astype(travelling, copy=False) for x in (k, v))
    q = q.astype(dtype, copy=False)
    batch, queries, *heads, size = q.shape
    if len(heads) == 2:
        q = q.reshape(batch, queries, heads[0] * heads[1], size)
    if not mask:
        return q, k, v, None
    (bias,) = mask
    if bias.dtype.kind == "b":
        bias = plan.xp.where(bias, dtype.type(0), dtype.type(-np.inf))
    bias = bias.astype(dtype, copy=False)
    return q, k, v, bias.reshape((1,) * (3 + len(heads) - bias.ndim) + bias.shape)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    ring: bool = False,
) -> Tensor:
    """Return ``softmax(scale q k^T + mask) v`` for each batch row and head.

    Vaswani et al., "Attention Is All You Need" (2017); with fewer heads of k and v than
    of q, Ainslie et al., "GQA" (2023). Query t stands at the key ``t + S - T``: the
    last query at the last key. A query that sees no key gets zeros.

    Batch, heads and the features of v may be split, in any chunks; heads of q as (B, T,
    H, E) only in whole groups of equal number where H > K, those of (B, T, K, G, E)
    freely, K and G even over axes of their own. Queries may be split; keys must be
    whole, and are gathered where they are not. With ``ring=True`` queries, keys and
    values are split along their positions over the same axis, and no member holds the
    keys and values of more than two others at a time: it computes with one block while
    the next arrives from its neighbour, and a block travels only as far as some query
    sees it (Liu et al., "Ring Attention", 2023). The backward passes them round once
    more, with their gradients.

    Collective over the axis that splits the positions, if `ring`; else local.

    Parameters
    ----------
    q : (B, T, H, E) or (B, T, K, G, E)
    k : (B, S, K, E)
    v : (B, S, K, F)
        Head h of q goes with head ``h // (H / K)`` of k and v.
    mask : broadcast to (B, H, T, S) or (B, K, G, T, S)
        Bool: false hides a key. Floating: added to the scores, minus infinity hides.
    causal
        Whether keys after the query's are hidden.
    window
        How many keys a query sees, its own and those before it; without `causal`, as
        many again on the other side. All of them if None.
    scale
        ``E**-0.5`` by default.
    ring
        Whether keys and values stay split.

    Returns
    -------
    Tensor : (B, T, H, F) or (B, T, K, G, F)

    Raises
    ------
    ShapeError
        If the shapes do not fit, or causal queries outnumber the keys.
    UsageError
        If the window is below 1, or the mask is of integers.
    """
    if window is not None and window < 1:
        raise UsageError(
            f"attention: a window of {window} hides every key; give 1 or more, or None"
        )
    operands = [q, k, v]
    if mask is not None:
        if isinstance(mask, Tensor) and mask.dtype.kind in "iu":
            raise UsageError(
                f"attention: the mask is {mask.dtype}; give a bool one, where false "
                "hides a key, or a floating one, which is added to the scores"
            )
        operands.append(mask)
    result: Tensor = _attention(
        *operands, causal=causal, window=window, ring=ring, scale=scale
    )
    return result
