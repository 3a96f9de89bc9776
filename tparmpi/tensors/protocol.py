"""What Python's and NumPy's syntax does with tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tparmpi.errors import ShapeError, ShardingError
from tparmpi.sharding import Replicate
from tparmpi.tensors.numbers import NUMBERS
from tparmpi.tensors.registry import methods, registry

if TYPE_CHECKING:
    from tparmpi.tensors.tensor import Tensor


class Protocol:
    """The special methods of `Tensor`: operators, conversions, and what is refused.

    An operator takes a tensor of the same place or a number on either side, and returns
    a new tensor; ``x += 1`` makes `x` the name of another one. Comparisons are
    elementwise, but a tensor is its own key in sets and dicts.
    """

    __slots__ = ()
    __array_ufunc__ = None

    def __add__(self, other: Any) -> Tensor:
        return _binary("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _binary("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return _binary("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _binary("sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        if isinstance(other, NUMBERS):
            return _method("scale", self, other)
        return _binary("mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        if isinstance(other, NUMBERS):
            return _method("divide", self, other)
        return _binary("div", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _binary("div", other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return _binary("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return _binary("floor_divide", other, self)

    def __pow__(self, other: Any) -> Tensor:
        return _method("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return _method("pow", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return _method("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return _method("matmul", other, self)

    def __neg__(self) -> Tensor:
        return _call("neg", self)

    def __pos__(self: Any) -> Tensor:
        tensor: Tensor = self
        return tensor

    def __abs__(self) -> Tensor:
        return _call("abs", self)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _binary("eq", self, other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _binary("ne", self, other)

    def __lt__(self, other: Any) -> Tensor:
        return _binary("lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return _binary("le", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _binary("gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _binary("ge", self, other)

    __hash__ = object.__hash__

    def __and__(self, other: Any) -> Tensor:
        return _binary("bitwise_and", self, other)

    def __rand__(self, other: Any) -> Tensor:
        return _binary("bitwise_and", other, self)

    def __or__(self, other: Any) -> Tensor:
        return _binary("bitwise_or", self, other)

    def __ror__(self, other: Any) -> Tensor:
        return _binary("bitwise_or", other, self)

    def __xor__(self, other: Any) -> Tensor:
        return _binary("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return _binary("bitwise_xor", other, self)

    def __invert__(self) -> Tensor:
        return _call("bitwise_not", self)

    def __getitem__(self, key: Any) -> Tensor:
        return _method("getitem", self, key)

    def __len__(self: Any) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dims")
        return int(self.shape[0])

    def __iter__(self: Any) -> NoReturn:
        raise TypeError(
            "a tensor cannot be iterated over: its rows may lie on different ranks; "
            "take pieces with x.split(n, dim), or the whole value with x.numpy(), "
            "which is collective"
        )

    def __contains__(self, value: Any) -> NoReturn:
        raise TypeError(
            "'in' does not look into a tensor: compare with x == value, and ask the "
            "result on every rank"
        )

    def __float__(self: Any) -> float:
        return float(self.item())

    def __int__(self: Any) -> int:
        return int(self.item())

    def __complex__(self: Any) -> complex:
        return complex(self.item())

    def __bool__(self: Any) -> bool:
        if self.size != 1:
            raise ShapeError(
                f"bool: a tensor of {self.size} elements is neither true nor false; "
                "say which you mean with x.any() or x.all()"
            )
        return bool(self.item())

    def __index__(self: Any) -> int:
        if self.shape or self.dtype.kind not in "iu":
            raise TypeError(
                "only an integer tensor without dims can be an index, this one is "
                f"{self.dtype} of shape {self.shape}"
            )
        return int(self.item())

    def __array__(
        self: Any, dtype: Any = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """Return the whole value as a new NumPy array. Collective over the place.

        With ``copy=False`` this rank's own memory, read-only: local, and only where
        that is the whole value.
        """
        if copy is not False:
            return np.asarray(self.numpy(), dtype)
        block = self.local if _is_whole(self) and not self.is_shell else None
        if not isinstance(block, np.ndarray) or dtype not in (None, block.dtype):
            raise ValueError(
                "a tensor that is not whole in this rank's host memory, or not of the "
                "dtype asked for, must be copied; leave out copy=False"
            )
        return block

    def __array_function__(
        self, function: Any, types: Any, args: Any, kwargs: Any
    ) -> NoReturn:
        name = function.__name__
        instead = f"call tpm.{name}, or " if name in methods else ""
        raise TypeError(
            f"numpy.{name} takes no tensors: {instead}give it the whole values, "
            "x.numpy(), which is collective"
        )

    def __dlpack__(
        self: Any,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Lend this rank's array to another library. Local.

        Only where it is the whole value. The consumer must not write to it; one that
        cannot be told so gets a copy of an array in host memory.

        Raises
        ------
        ShardingError
            If the tensor is not replicated on every axis, or this rank is no member.
        """
        array = _whole_block(self, "__dlpack__")
        if isinstance(array, np.ndarray):
            knows_read_only = max_version is not None and max_version >= (1, 0)
            if copy is None and not knows_read_only:
                array = array.copy()
        return array.__dlpack__(
            stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = _whole_block(
            self, "__dlpack_device__"
        ).__dlpack_device__()
        return device

    def __copy__(self: Any) -> Tensor:
        tensor: Tensor = self.copy()
        return tensor

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            "copy.deepcopy: a tensor's history and place cannot be doubled; "
            "x.detach().copy() makes a tensor with memory of its own, and a model is "
            "doubled by building it again and loading the parameters"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "pickle: a tensor is one array of all ranks and lives on their devices; "
            "pickle x.numpy() (collective) or x.local (this rank's block), or save it "
            "with tpm.checkpoint.save"
        )


def _call(name: str, *operands: Any) -> Tensor:
    result: Tensor = registry[name](*operands)
    return result


def _binary(name: str, left: Any, right: Any) -> Tensor:
    """Apply an operator to two operands, one of which is perhaps a number."""
    operator = registry[name]
    if not hasattr(right, "spec"):
        right = left.constant(operator.numbers(name, right, left.dtype))
    elif not hasattr(left, "spec"):
        left = right.constant(operator.numbers(name, left, right.dtype))
    result: Tensor = operator(left, right)
    return result


def _method(name: str, *operands: Any) -> Tensor:
    result: Tensor = methods[name](*operands)
    return result


def _is_whole(tensor: Any) -> bool:
    return all(isinstance(placement, Replicate) for placement in tensor.layout)


def _whole_block(tensor: Any, what: str) -> Any:
    """Return the array of a tensor that is whole on this rank. Local."""
    if not _is_whole(tensor):
        raise ShardingError(
            f"{what}: this rank does not hold the whole tensor; lend its block, "
            "x.local, or gather first with x.with_sharding(Replicate()), collective"
        )
    return tensor.local
