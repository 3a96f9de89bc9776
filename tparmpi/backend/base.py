"""The interface of one rank's arrays: how they are made and what runs on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import attention as attention_kernels
from . import kernels, random
from .attention import Band, Softmax
from .random import Key

Array = Any


class Backend(ABC):
    """Arrays of one kind of device, and the kernels that run on them.

    All calls are local. Kernels take arrays of this backend, of any strides and with
    any dim empty, never write into their inputs (save the updates in place), and return
    fresh arrays of the input's dtype (float32 or float64). `tparmpi.backend.kernels`
    says what each computes; a backend may replace any of them by a faster one that
    gives the same to rounding.

    Attributes
    ----------
    kind : str
        ``"cpu"``, ``"cuda"`` or ``"meta"``.
    xp : module
        The array module: ``numpy``, ``cupy``, or for ``"meta"`` one like NumPy.
    supported_dtypes : frozenset of str
        Names of the dtypes that this kind of device computes with.
    """

    kind: str
    xp: Any
    supported_dtypes: frozenset[str]

    def __repr__(self) -> str:
        return f"<tparmpi backend {self.kind!r}>"

    # Arrays

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an array of ``shape`` with undefined values."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an array of ``shape`` filled with zeros."""

    @abstractmethod
    def from_host(self, array: Any) -> Array:
        """Return a fresh, C-contiguous copy on the device of a NumPy array."""

    @abstractmethod
    def to_host(self, array: Array, out: np.ndarray | None = None) -> np.ndarray:
        """Return the values as a NumPy array (the array itself where it is one).

        With ``out``, a C-contiguous array of the same shape and dtype, they are copied
        to it and it is returned.
        """

    @abstractmethod
    def contiguous(self, array: Array) -> Array:
        """Return ``array`` if it is C-contiguous, else a C-contiguous copy.

        A 0-d array stays 0-d.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work given to the device by this thread is done."""

    # Products

    def matmul(self, a: Array, b: Array) -> Array:
        """Return the matrix product as NumPy defines it, sums of halves in float32."""
        return self.xp.matmul(a, b)

    # Elementwise and normalisation

    @abstractmethod
    def erf(self, x: Array) -> Array:
        """Return the error function of ``x``."""

    @abstractmethod
    def erfc(self, x: Array) -> Array:
        """Return ``1 - erf(x)``, precise where that is small."""

    def gelu(self, x: Array) -> Array:
        """See `kernels.gelu`."""
        return kernels.gelu(self.xp, x)

    def gelu_backward(self, x: Array, grad: Array) -> Array:
        """See `kernels.gelu_backward`."""
        return kernels.gelu_backward(self.xp, x, grad)

    def sigmoid(self, x: Array) -> Array:
        """See `kernels.sigmoid`."""
        return kernels.sigmoid(self.xp, x)

    def swiglu(self, gate: Array, up: Array) -> Array:
        """See `kernels.swiglu`."""
        return kernels.swiglu(self.xp, gate, up)

    def swiglu_backward(
        self,
        gate: Array,
        up: Array,
        grad: Array,
        wanted: tuple[bool, bool] = (True, True),
    ) -> tuple[Array | None, Array | None]:
        """See `kernels.swiglu_backward`."""
        return kernels.swiglu_backward(self.xp, gate, up, grad, wanted)

    def layer_norm(
        self, x: Array, gain: Array | None, bias: Array | None, eps: float
    ) -> tuple[Array, Array, Array]:
        """See `kernels.layer_norm`."""
        return kernels.layer_norm(self.xp, x, gain, bias, eps)

    def layer_norm_backward(
        self,
        x: Array,
        mean: Array,
        rstd: Array,
        gain: Array | None,
        grad: Array,
        wanted: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Array | None, Array | None, Array | None]:
        """See `kernels.layer_norm_backward`."""
        return kernels.layer_norm_backward(self.xp, x, mean, rstd, gain, grad, wanted)

    def softmax(self, x: Array, axis: int = -1) -> Array:
        """See `kernels.softmax`."""
        return kernels.softmax(self.xp, x, axis)

    def softmax_backward(self, y: Array, grad: Array, axis: int = -1) -> Array:
        """See `kernels.softmax_backward`."""
        return kernels.softmax_backward(self.xp, y, grad, axis)

    # Attention

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        band: Band = (None, None),
        bias: Array | None = None,
    ) -> tuple[Array, Softmax]:
        """See `attention.attention`."""
        return attention_kernels.attention(self.xp, q, k, v, scale, band, bias)

    def attention_backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        saved: Softmax,
        y: Array,
        grad: Array,
        scale: float,
        band: Band = (None, None),
        bias: Array | None = None,
        wanted: tuple[bool, bool, bool, bool] = (True, True, True, False),
    ) -> tuple[Array | None, Array | None, Array | None, Array | None]:
        """See `attention.attention_backward`."""
        return attention_kernels.attention_backward(
            self.xp, q, k, v, saved, y, grad, scale, band, bias, wanted
        )

    # Vocabulary

    def embedding(self, table: Array, ids: Array, first: int = 0) -> Array:
        """See `kernels.embedding`."""
        return kernels.embedding(self.xp, table, ids, first)

    def embedding_backward(
        self, grad: Array, ids: Array, first: int, rows: int
    ) -> Array:
        """See `kernels.embedding_backward`."""
        return kernels.embedding_backward(self.xp, grad, ids, first, rows)

    def xent_local_max(self, logits: Array) -> Array:
        """See `kernels.xent_local_max`."""
        return kernels.xent_local_max(self.xp, logits)

    def xent_local_stats(
        self, logits: Array, targets: Array, first: int, maximum: Array
    ) -> tuple[Array, Array]:
        """See `kernels.xent_local_stats`."""
        return kernels.xent_local_stats(self.xp, logits, targets, first, maximum)

    def xent_backward(
        self,
        logits: Array,
        targets: Array,
        first: int,
        logsumexp: Array,
        grad: Array,
        hit: float = 1.0,
        spread: float = 0.0,
    ) -> Array:
        """See `kernels.xent_backward`."""
        return kernels.xent_backward(
            self.xp, logits, targets, first, logsumexp, grad, hit, spread
        )

    # Updates in place, and whole-array facts

    def adamw(
        self,
        param: Array,
        grad: Array,
        m: Array,
        v: Array,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        scale: float = 1.0,
    ) -> None:
        """See `kernels.adamw`."""
        kernels.adamw(
            self.xp,
            param,
            grad,
            m,
            v,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            scale=scale,
        )

    def sgd(
        self,
        param: Array,
        grad: Array,
        momentum_buffer: Array | None,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        scale: float = 1.0,
    ) -> None:
        """See `kernels.sgd`."""
        kernels.sgd(
            self.xp,
            param,
            grad,
            momentum_buffer,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            scale=scale,
        )

    def add_into(self, target: Array, value: Array) -> None:
        """Add ``value`` to ``target`` in place."""
        target += value

    def sum_of_squares(self, x: Array) -> float:
        """See `kernels.sum_of_squares`."""
        return kernels.sum_of_squares(self.xp, x)

    def all_finite(self, x: Array) -> bool:
        """See `kernels.all_finite`."""
        return kernels.all_finite(self.xp, x)

    # Random numbers

    @abstractmethod
    def random_words(self, key: Key, first: int, count: int) -> Array:
        """Return words ``first .. first+count-1`` of the Philox stream of ``key``.

        They are the words of ``numpy.random.Philox(key=key, counter=0).random_raw``, as
        uint64 (count,), on every kind of device.
        """

    def random_block(
        self,
        key: Key,
        shape: Sequence[int],
        start: Sequence[int],
        extent: Sequence[int],
    ) -> Array:
        """See `random.block`."""
        return random.block(self, key, shape, start, extent)

    def random_uniform(
        self,
        key: Key,
        shape: Sequence[int],
        start: Sequence[int],
        extent: Sequence[int],
        dtype: Any,
    ) -> Array:
        """See `random.uniform`."""
        return random.uniform(self, key, shape, start, extent, dtype)

    def random_normal(
        self,
        key: Key,
        shape: Sequence[int],
        start: Sequence[int],
        extent: Sequence[int],
        dtype: Any,
    ) -> Array:
        """See `random.normal`."""
        return random.normal(self, key, shape, start, extent, dtype)

    def random_keep(
        self,
        key: Key,
        shape: Sequence[int],
        start: Sequence[int],
        extent: Sequence[int],
        p: float,
    ) -> Array:
        """See `random.keep`."""
        return random.keep(self, key, shape, start, extent, p)

    @abstractmethod
    def _normal_quantile(self, probability: Array) -> Array:
        """Return the standard normal's quantiles (float64)."""
