"""Arrays of which there are a shape and a dtype, and no data.

They go through NumPy's functions by NumPy's own protocols. Dtypes of results come from
calling the function on arrays of one element. Shapes follow from the few rules below;
where none is needed often, the function is called on arrays of zeros that repeat one
element, which costs the time and memory of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..errors import DeviceError

Shape = tuple[int, ...]


class MetaArray(NDArrayOperatorsMixin):
    """An array's shape and dtype, without its data.

    It has NumPy's operators, methods and functions, which return arrays of its kind.
    What needs values raises DeviceError.
    """

    __slots__ = ("__weakref__", "dtype", "shape")
    __hash__ = object.__hash__

    flags = SimpleNamespace(c_contiguous=True, f_contiguous=False, writeable=True)

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.shape: Shape = tuple(shape)
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes that an element would take."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that the data would take."""
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each dim, in C order."""
        return tuple(
            prod(self.shape[dim + 1 :]) * self.itemsize for dim in range(self.ndim)
        )

    @property
    def T(self) -> MetaArray:
        """The array with its dims in reverse order."""
        return self.transpose()

    @property
    def real(self) -> MetaArray:
        """The real part."""
        return MetaArray(self.shape, _dtypes(np.real, self))

    @property
    def imag(self) -> MetaArray:
        """The imaginary part."""
        return MetaArray(self.shape, _dtypes(np.imag, self))

    def __repr__(self) -> str:
        return f"MetaArray({self.shape}, {self.dtype})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __iter__(self) -> Iterator[MetaArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> MetaArray:
        index = tuple(map(_index, key)) if isinstance(key, tuple) else _index(key)
        return MetaArray(repeated(self.shape, np.int8)[index].shape, self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, MetaArray) and key.dtype == np.bool_:
            np.broadcast_to(repeated(key.shape, np.int8), self.shape[: key.ndim])
            return
        np.broadcast_to(repeated(np.shape(value), np.int8), self[key].shape)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise no_values("numpy.asarray")

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        out = options.pop("out", None)
        options.pop("where", None)
        made = _UFUNC_METHODS[method](ufunc, inputs, options)
        if out is None or made is None:
            return made
        return out if isinstance(made, tuple) else out[0]

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, options: Any
    ) -> Any:
        out = options.pop("out", None)
        rule = RULES.get(function)
        if rule is not None:
            made = rule(function, *args, **options)
        else:
            made = _called(function, args, options)
        return made if out is None else out

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"'MetaArray' has no attribute '{name}'")
        function = getattr(np, name)
        return lambda *args, **options: function(self, *args, **options)

    def reshape(self, *shape: Any, **options: Any) -> MetaArray:
        """See `numpy.reshape`."""
        wanted = shape[0] if len(shape) == 1 else shape
        return _viewed(np.reshape, self, wanted)

    def transpose(self, *dims: Any) -> MetaArray:
        """See `numpy.transpose`."""
        order = dims[0] if len(dims) == 1 else dims or None
        return _viewed(np.transpose, self, order)

    def astype(self, dtype: Any, *_: Any, **__: Any) -> MetaArray:
        """Return the array with another dtype."""
        return MetaArray(self.shape, np.dtype(dtype))

    def copy(self, *_: Any, **__: Any) -> MetaArray:
        """Return the array."""
        return MetaArray(self.shape, self.dtype)

    def ravel(self, *_: Any) -> MetaArray:
        """Return the array with one dim."""
        return MetaArray((self.size,), self.dtype)

    flatten = ravel

    def view(self, dtype: Any = None) -> MetaArray:
        """Return the array, or the elements' bytes as another dtype."""
        if dtype is None:
            return self.copy()
        other = np.dtype(dtype)
        last = self.shape[-1:] and (self.shape[-1] * self.itemsize // other.itemsize,)
        return MetaArray((*self.shape[:-1], *last), other)

    def fill(self, value: Any) -> None:
        """Do nothing."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise no_values("the array")

    __int__ = __float__ = __bool__ = __index__ = __complex__ = _refuse
    item = tolist = tobytes = nonzero = _refuse


_METHODS = frozenset(
    {"all", "any", "argmax", "argmin", "argsort", "clip", "conj", "cumprod", "cumsum"}
    | {"diagonal", "max", "mean", "min", "prod", "repeat", "round", "squeeze", "std"}
    | {"sum", "swapaxes", "take", "trace", "var"}
)


def no_values(what: str) -> DeviceError:
    """Return the error about values that do not exist."""
    return DeviceError(
        f"{what}: arrays on a meta device have shapes and no values; read them on a "
        "rank that holds them, or run the program on real devices"
    )


def has_values(array: Any) -> bool:
    """Say whether an array can be looked into: to check ids, and the like. Local."""
    return not isinstance(array, MetaArray)


def repeated(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """Return zeros of `shape` that take the memory of one."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def meta_of(array: Any) -> MetaArray:
    """Return the shape and dtype of an array or number."""
    if isinstance(array, MetaArray):
        return array
    array = np.asarray(array)
    return MetaArray(array.shape, array.dtype)


def _is_array(value: Any) -> bool:
    return isinstance(value, MetaArray | np.ndarray)


def _index(key: Any) -> Any:
    if not isinstance(key, MetaArray):
        return key
    if key.dtype == np.bool_:
        raise no_values("an index that is a mask")
    return repeated(key.shape, np.intp)


def _tiny(value: Any) -> Any:
    """An array of one element in place of an array; others as they are."""
    if _is_array(value):
        return np.ones((1,) * value.ndim, value.dtype)
    if type(value) in (tuple, list):
        return type(value)(map(_tiny, value))
    return value


def _dtypes(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with np.errstate(all="ignore"):
        made = function(*map(_tiny, args), **options)
    if isinstance(made, tuple):
        return tuple(np.asarray(item).dtype for item in made)
    return np.asarray(made).dtype


def _call_ufunc(ufunc: np.ufunc, inputs: Any, options: dict[str, Any]) -> Any:
    dtypes = _dtypes(ufunc, *inputs, **options)
    shapes = [np.shape(x) for x in inputs]
    if ufunc is np.matmul:
        shape = _product_shape(*shapes)
    elif ufunc.signature is not None:
        return _called(ufunc, inputs, options)
    else:
        shape = np.broadcast_shapes(*shapes)
    if isinstance(dtypes, tuple):
        return tuple(MetaArray(shape, dtype) for dtype in dtypes)
    return MetaArray(shape, dtypes)


def _product_shape(a: Shape, b: Shape) -> Shape:
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner:
        raise ValueError(f"matmul: shapes {a} and {b} do not fit")
    return (*np.broadcast_shapes(a[:-2], b[:-2]), *rows, *columns)


def _reduced(
    function: Callable[..., Any],
    x: Any,
    axis: Any = None,
    *args: Any,
    keepdims: Any = False,
    **options: Any,
) -> MetaArray:
    options = {k: v for k, v in options.items() if k not in ("where", "initial")}
    dtype = _dtypes(function, x, axis, *args, **options)
    dims = range(x.ndim) if axis is None else np.atleast_1d(axis) % max(x.ndim, 1)
    gone = {int(dim) for dim in dims}
    keepdims = keepdims is True
    shape = [
        1 if dim in gone else length
        for dim, length in enumerate(x.shape)
        if keepdims or dim not in gone
    ]
    return MetaArray(shape, dtype)


def _reduce_ufunc(ufunc: np.ufunc, inputs: Any, options: dict[str, Any]) -> MetaArray:
    options = {"axis": 0, **options}
    return _reduced(lambda x, axis, **o: ufunc.reduce(x, axis), inputs[0], **options)


def _accumulate(ufunc: np.ufunc, inputs: Any, options: dict[str, Any]) -> MetaArray:
    dtype = np.asarray(ufunc.accumulate(_tiny(inputs[0]), 0)).dtype
    return MetaArray(inputs[0].shape, options.get("dtype") or dtype)


def _reduce_at(ufunc: np.ufunc, inputs: Any, options: dict[str, Any]) -> MetaArray:
    x, indices = inputs[:2]
    axis = options.get("axis", inputs[2] if len(inputs) > 2 else 0)
    shape = list(x.shape)
    shape[axis] = len(indices)
    return MetaArray(shape, _dtypes(lambda x: ufunc.reduce(x, axis), x))


def _outer(ufunc: np.ufunc, inputs: Any, options: dict[str, Any]) -> MetaArray:
    shape = (*np.shape(inputs[0]), *np.shape(inputs[1]))
    return MetaArray(shape, _dtypes(ufunc, *inputs))


_UFUNC_METHODS: dict[str, Callable[..., Any]] = {
    "__call__": _call_ufunc,
    "reduce": _reduce_ufunc,
    "accumulate": _accumulate,
    "reduceat": _reduce_at,
    "outer": _outer,
    "at": lambda ufunc, inputs, options: None,
}


def _alike(function: Callable[..., Any], x: Any, *args: Any, **options: Any) -> Any:
    return MetaArray(x.shape, _dtypes(function, x, *args, **options))


def _summed_along(
    function: Callable[..., Any], x: Any, axis: Any = None, dtype: Any = None
) -> MetaArray:
    made = _dtypes(function, x, axis, dtype)
    return MetaArray((x.size,) if axis is None else x.shape, made)


def _viewed(function: Callable[..., Any], x: Any, *args: Any, **options: Any) -> Any:
    made = function(repeated(x.shape, np.int8), *args, **options)
    if isinstance(made, tuple | list):
        return type(made)(MetaArray(item.shape, x.dtype) for item in made)
    return MetaArray(made.shape, x.dtype)


def _filled(
    function: Callable[..., Any], x: Any, *_: Any, dtype: Any = None, **options: Any
) -> MetaArray:
    shape = options.get("shape")
    return MetaArray(x.shape if shape is None else shape, np.dtype(dtype or x.dtype))


def _common(arrays: Sequence[Any]) -> np.dtype[Any]:
    return np.result_type(*[a.dtype if _is_array(a) else a for a in arrays])


def _joined(
    function: Callable[..., Any], arrays: Any, axis: Any = 0, **options: Any
) -> MetaArray:
    shapes = [np.shape(array) for array in arrays]
    axis %= len(shapes[0])
    length = sum(shape[axis] for shape in shapes)
    shape = (*shapes[0][:axis], length, *shapes[0][axis + 1 :])
    if any((*s[:axis], length, *s[axis + 1 :]) != shape for s in shapes):
        raise ValueError(f"concatenate: shapes {shapes} do not fit along dim {axis}")
    return MetaArray(shape, options.get("dtype") or _common(arrays))


def _stacked(
    function: Callable[..., Any], arrays: Any, axis: Any = 0, **options: Any
) -> MetaArray:
    shapes = [np.shape(array) for array in arrays]
    if len(set(shapes)) != 1:
        raise ValueError(f"stack: shapes {shapes} differ")
    axis %= len(shapes[0]) + 1
    shape = (*shapes[0][:axis], len(shapes), *shapes[0][axis:])
    return MetaArray(shape, options.get("dtype") or _common(arrays))


def _chosen(function: Callable[..., Any], condition: Any, *values: Any) -> MetaArray:
    if not values:
        raise no_values("numpy.where")
    shape = np.broadcast_shapes(*map(np.shape, (condition, *values)))
    return MetaArray(shape, _dtypes(function, condition, *values))


def _taken(
    function: Callable[..., Any], x: Any, indices: Any, axis: Any = None, **_: Any
) -> MetaArray:
    if axis is None:
        return MetaArray(np.shape(indices), x.dtype)
    axis %= x.ndim
    shape = (*x.shape[:axis], *np.shape(indices), *x.shape[axis + 1 :])
    return MetaArray(shape, x.dtype)


def _taken_along(
    function: Callable[..., Any], x: Any, indices: Any, axis: Any = -1
) -> MetaArray:
    if axis is None:
        return MetaArray(indices.shape, x.dtype)
    axis %= x.ndim
    around = np.broadcast_shapes(
        *((*s[:axis], 1, *s[axis + 1 :]) for s in (x.shape, indices.shape))
    )
    shape = (*around[:axis], indices.shape[axis], *around[axis + 1 :])
    return MetaArray(shape, x.dtype)


def _einsum(
    function: Callable[..., Any], rule: str, *arrays: Any, **options: Any
) -> MetaArray:
    operands, arrow, out = rule.replace(" ", "").partition("->")
    if not arrow or "." in rule:
        return _called(function, (rule, *arrays), options)
    sizes = {
        letter: length
        for letters, array in zip(operands.split(","), arrays, strict=True)
        for letter, length in zip(letters, array.shape, strict=True)
    }
    return MetaArray([sizes[letter] for letter in out], _common(arrays))


def _nothing(function: Callable[..., Any], *_: Any, **__: Any) -> None:
    return None


def _refused(function: Callable[..., Any], *_: Any, **__: Any) -> NoReturn:
    raise no_values(f"numpy.{function.__name__}")


def _apart(function: Callable[..., Any], *_: Any, **__: Any) -> bool:
    return False


def _result_type(function: Callable[..., Any], *arrays: Any) -> np.dtype[Any]:
    return _common(arrays)


def _named(rule: Callable[..., Any], names: str) -> dict[Any, Callable[..., Any]]:
    return {getattr(np, name): rule for name in names.split()}


RULES: dict[Any, Callable[..., Any]] = {
    **_named(_reduced, "all amax amin any argmax argmin count_nonzero max mean min"),
    **_named(_reduced, "prod std sum var"),
    **_named(_summed_along, "cumprod cumsum"),
    **_named(_alike, "argsort clip copy flip imag isinf nan_to_num real roll round"),
    **_named(_alike, "sort tril triu"),
    **_named(_viewed, "array_split broadcast_to diagonal expand_dims hsplit moveaxis"),
    **_named(_viewed, "ravel reshape rollaxis split squeeze swapaxes transpose"),
    **_named(_filled, "empty_like full_like ones_like zeros_like"),
    **_named(_joined, "concatenate"),
    **_named(_stacked, "stack"),
    **_named(_chosen, "where"),
    **_named(_taken, "take"),
    **_named(_taken_along, "take_along_axis"),
    **_named(_einsum, "einsum"),
    **_named(_nothing, "copyto fill_diagonal put put_along_axis"),
    **_named(_apart, "may_share_memory shares_memory"),
    **_named(_result_type, "result_type"),
    **_named(_refused, "allclose argwhere array_equal bincount compress extract"),
    **_named(_refused, "flatnonzero isclose nonzero searchsorted select unique"),
}
"""What is returned by functions that are used often, or that need values."""


def _called(function: Callable[..., Any], args: Any, options: Any) -> Any:
    """Call the function on zeros and return the shapes and dtypes of its results."""
    made = function(*_zeros(args), **_zeros(options))
    return _metas(made)


def _zeros(value: Any) -> Any:
    if isinstance(value, MetaArray):
        return repeated(value.shape, value.dtype)
    if type(value) in (tuple, list):
        return type(value)(map(_zeros, value))
    if type(value) is dict:
        return {key: _zeros(item) for key, item in value.items()}
    return value


def _metas(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return MetaArray(value.shape, value.dtype)
    if type(value) in (tuple, list):
        return type(value)(map(_metas, value))
    return value
