"""Arrays on one NVIDIA GPU, with CuPy. The only module that imports it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import DeviceError
from .base import Backend
from .numpy_backend import NumpyBackend
from .random import Key

# Element i of the output is word first + i. Each thread computes a whole Philox block
# for its one word: four times the arithmetic, but any first word and count will do.
PHILOX_SOURCE = """
const unsigned long long word = first + (unsigned long long)i;
unsigned long long c0 = word / 4 + 1, c1 = 0, c2 = 0, c3 = 0;
unsigned long long k0 = key0, k1 = key1;
for (int round = 0; round < 10; ++round) {
    const unsigned long long high0 = __umul64hi(0xD2E7470EE14C6C93ULL, c0);
    const unsigned long long low0 = 0xD2E7470EE14C6C93ULL * c0;
    const unsigned long long high1 = __umul64hi(0xCA5A826395121157ULL, c2);
    const unsigned long long low1 = 0xCA5A826395121157ULL * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B97F4A7C15ULL;
    k1 += 0xBB67AE8584CAA73BULL;
}
const unsigned int lane = (unsigned int)(word % 4);
out = lane == 0 ? c0 : lane == 1 ? c1 : lane == 2 ? c2 : c3;
"""


class CupyBackend(Backend):
    """CuPy arrays on the current GPU. See `Backend`.

    Raises
    ------
    DeviceError
        If CuPy is not installed.
    """

    kind = "cuda"
    supported_dtypes = NumpyBackend.supported_dtypes

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise DeviceError(
                "a cuda device needs CuPy; in a checkout of tparmpi, pip install "
                "'.[gpu]' brings it"
            ) from error
        self.xp = cupy

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.xp.empty(tuple(shape), dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.xp.zeros(tuple(shape), dtype)

    def from_host(self, array: Any) -> Any:
        return self.xp.array(np.asarray(array), order="C")

    def to_host(self, array: Any, out: np.ndarray | None = None) -> np.ndarray:
        return self.xp.asnumpy(array, order="C", out=out)

    def contiguous(self, array: Any) -> Any:
        return array if array.flags.c_contiguous else array.copy(order="C")

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def random_words(self, key: Key, first: int, count: int) -> Any:
        out = self.xp.empty((count,), np.uint64)
        if count:
            self._philox(np.uint64(key[0]), np.uint64(key[1]), np.uint64(first), out)
        return out

    @cached_property
    def _philox(self) -> Any:
        return self.xp.ElementwiseKernel(
            "uint64 key0, uint64 key1, uint64 first",
            "uint64 out",
            PHILOX_SOURCE,
            "tparmpi_philox",
        )

    def erf(self, x: Any) -> Any:
        from cupyx.scipy.special import erf

        return erf(x)

    def erfc(self, x: Any) -> Any:
        from cupyx.scipy.special import erfc

        return erfc(x)

    def _normal_quantile(self, probability: Any) -> Any:
        from cupyx.scipy.special import ndtri

        return ndtri(probability)
