"""A GPU that is none: CuPy's interface over host memory, for tests of device code.

What hides mistakes on a real GPU is that work is mostly done by the time somebody
looks. Here it is *late*: a stream's work is done when somebody waits for the stream or
an event of it (or asks, one operation each time), and until then the results are NaN.
Memory that was just allocated holds NaN too, from the moment its stream gets there, and
again when it is freed: so does whatever another stream reads out of turn.

Arrays expose the CUDA array interface, by which mpi4py takes them for device memory,
and refuse to be read by the host without a copy.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tparmpi.testing.simulated_memory import (
    LATE,
    Block,
    Event,
    Host,
    Stream,
    Streams,
    Work,
    address,
)


class _Memory:
    """Owns a block that a stream allocated: gone, the memory is anybody's."""

    def __init__(self, device: SimulatedDevice, nbytes: int) -> None:
        self.block = Block(nbytes)
        stream = device.streams.current
        _spoil(stream, self.block)
        weakref.finalize(self, _spoil, stream, self.block).atexit = False


def _spoil(stream: Stream, block: Block) -> None:
    whole = block.seen
    stream.queue(Work(lambda: whole.fill(LATE), (), [(block, whole)]))


# Names that `_Cuda`'s methods leave for types.
_Stream: TypeAlias = Stream
_Event: TypeAlias = Event


def _pinned_memory(block: Block) -> Any:
    """Memory of a block for `numpy.frombuffer`; arrays of it keep it alive."""
    # Not an array itself: NumPy's arrays refer to the memory below another array.
    kind: Any = type(
        "PinnedMemory",
        (ctypes.Array,),
        {"_type_": ctypes.c_ubyte, "_length_": block.seen.size},
    )
    return kind.from_buffer(block.seen)


class Array(NDArrayOperatorsMixin):
    """An array in the simulated device's memory; see `cupy.ndarray`.

    Made by the functions of `SimulatedDevice` only.
    """

    def __init__(
        self, device: SimulatedDevice, memory: _Memory, host: Host, base: Array | None
    ) -> None:
        self._device = device
        self._memory = memory
        self._host = host
        self.base = base

    # What it is

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides"):
            return getattr(self._host, name)
        if name == "flags":
            return self._host.flags
        if name in ("swapaxes", "squeeze"):
            return lambda *args: self._alias(getattr(self._host, name)(*args))
        if name in ("max", "min", "sum", "mean", "any", "all", "astype"):
            return lambda *args, **kw: self._device.call(
                getattr(np.ndarray, name), self, *args, **kw
            )
        raise AttributeError(f"the simulated device's arrays have no {name!r}")

    def __repr__(self) -> str:
        return f"<simulated device array {self.shape} {self.dtype}>"

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[Array]:
        return (self[number] for number in range(len(self)))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        host = self._host
        return {
            "shape": host.shape,
            "typestr": host.dtype.str,
            "strides": None if host.flags.c_contiguous else host.strides,
            "data": (address(host) if host.size else 0, False),
            "version": 3,
        }

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the host cannot read a device's array; copy it with .get()")

    # The same memory

    def _alias(self, host: Host) -> Array:
        base = self if self.base is None else self.base
        return Array(self._device, self._memory, host, base)

    def __getitem__(self, index: Any) -> Array:
        host = self._part(index)
        if host.size and not np.may_share_memory(host, self._host):
            raise TypeError("the simulated device has no indexing by arrays")
        return self._alias(host)

    def _part(self, index: Any) -> Host:
        index = index if isinstance(index, tuple) else (index,)
        # With an ellipsis NumPy gives an array, where it has no dims too.
        return self._host[index if Ellipsis in index else (*index, ...)]

    def view(self, dtype: Any = None) -> Array:
        """Return the same bytes as another dtype."""
        return self._alias(self._host if dtype is None else self._host.view(dtype))

    def reshape(self, *shape: Any) -> Array:
        """Return the same values in another shape, as a view where possible."""
        host = self._host.reshape(*shape)
        if np.shares_memory(host, self._host) or not host.size:
            return self._alias(host)
        return self.copy().reshape(*shape)

    def ravel(self) -> Array:
        """Return the values in one dim."""
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> Array:
        """Return a view with permuted dims."""
        return self._alias(self._host.transpose(*axes))

    @property
    def T(self) -> Array:
        return self.transpose()

    # Work

    def copy(self, order: str = "C") -> Array:
        """Return a copy, made by the current stream."""
        return self._device.call(lambda host: host.copy(order), self)

    def fill(self, value: Any) -> None:
        """Set every element."""
        self[...] = value

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self._part(index)
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("a host array is copied to the device with .set()")
        self._device.launch(np.copyto, [value], target, self._memory.block, "unsafe")

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **kw: Any
    ) -> Any:
        (out,) = kw.pop("out", (None,))
        if method != "__call__" or any(
            isinstance(operand, np.ndarray) for operand in (*inputs, out)
        ):
            return NotImplemented
        if out is not None:
            kw["out"] = out
        return self._device.call(ufunc, *inputs, **kw)

    # To and from the host

    def get(
        self,
        stream: Stream | None = None,
        order: str = "C",
        out: Host | None = None,
        blocking: bool = True,
    ) -> Host:
        """Return a copy in host memory.

        One into pinned memory is late work too unless `blocking`.
        """
        stream = stream or self._device.streams.current
        source, block = self._host, self._memory.block
        if out is None:
            out, blocking = np.empty(self.shape, self.dtype), True
        assert out.shape == source.shape and out.dtype == source.dtype
        pinned = self._device.pinned(out)
        if pinned is None:
            stream.synchronize()
            with self._device.streams.whole():
                block.uncover()
                out[...] = source
                block.cover()
            return out
        target, target_block = pinned
        run = _copier(target, source)
        stream.queue(Work(run, [(block, source)], [(target_block, target)]))
        if blocking:
            stream.synchronize()
        return out

    def set(self, arr: Host, stream: Stream | None = None) -> None:
        """Copy a host array of the same shape and dtype here, as late work."""
        stream = stream or self._device.streams.current
        target = (self._memory.block, self._host)
        assert arr.shape == self.shape and arr.dtype == self.dtype
        pinned = self._device.pinned(arr)
        if pinned is None:
            kept = arr.copy()
            stream.queue(Work(_copier(self._host, kept), [], [target]))
            return
        source, block = pinned
        run = _copier(self._host, source)
        stream.queue(Work(run, [(block, source)], [target]))

    def item(self) -> Any:
        """Return the only element, once the current stream has come to it."""
        return self.get().item()

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())


def _copier(target: Host, source: Host) -> Callable[[], None]:
    return lambda: np.copyto(target, source)


class _Cuda:
    """The part of `cupy.cuda` that is needed here."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def Device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def Stream(self, null: bool = False, non_blocking: bool = False) -> _Stream:
        return self._device.streams.null if null else Stream(self._device.streams)

    def Event(self, block: bool = False, disable_timing: bool = False) -> _Event:
        return Event(self._device.streams)

    def get_current_stream(self) -> _Stream:
        return self._device.streams.current

    def alloc_pinned_memory(self, size: int) -> Any:
        block = Block(size)
        memory = _pinned_memory(block)
        self._device.pin(memory, block)
        return memory


class SimulatedDevice:
    """Stands in for the module `cupy`.

    Functions that it does not define are NumPy's, done late on the current stream; of
    those, none whose result's shape depends on values.

    Attributes
    ----------
    streams : Streams
        Its streams; the calling thread's current one is ``streams.current``.
    cuda
        Stands in for `cupy.cuda`.
    """

    ndarray = Array
    __name__ = "simulated_device"

    def __init__(self) -> None:
        self.streams = Streams()
        self._pinned: list[tuple[int, int, Block]] = []
        self.cuda = _Cuda(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(np, name)
        if isinstance(function, type) or not callable(function):
            return function
        return lambda *args, **kw: self.call(function, *args, **kw)

    @property
    def complaints(self) -> list[str]:
        """Of work done while a message used the same memory."""
        return self.streams.complaints

    # Memory

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> Array:
        """Return an array that the current stream allocates."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = _Memory(self, nbytes)
        host = np.ndarray(shape, dtype, memory.block.seen.data, order=_order(order))
        return Array(self, memory, host, None)

    def zeros(self, shape: Any, dtype: Any = float) -> Array:
        """Return zeros."""
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def empty_like(self, array: Array) -> Array:
        """Return an array of the same shape and dtype."""
        return self.empty(array.shape, array.dtype)

    def array(self, value: Any, dtype: Any = None, order: str = "C") -> Array:
        """Return a copy of a host's or the device's array."""
        if isinstance(value, Array):
            return value.copy() if dtype is None else value.astype(dtype)
        host = np.array(value, dtype, order="C")
        made = self.empty(host.shape, host.dtype)
        made.set(host)
        return made

    def asarray(self, value: Any, dtype: Any = None) -> Array:
        """Return `value` if it is an array of the device, else a copy there."""
        if isinstance(value, Array) and dtype in (None, value.dtype):
            return value
        return self.array(value, dtype)

    def asnumpy(self, value: Any, order: str = "C", out: Host | None = None) -> Host:
        """Return a copy in host memory."""
        if isinstance(value, Array):
            return value.get(order=order, out=out)
        return np.array(value)

    def pin(self, memory: Any, block: Block) -> None:
        """Know a block as pinned for as long as `memory` lives."""
        start = address(block.seen)
        entry = (start, start + block.seen.nbytes, block)
        with self.streams.lock:
            self._pinned.append(entry)
        weakref.finalize(memory, self._unpin, entry).atexit = False

    def _unpin(self, entry: tuple[int, int, Block]) -> None:
        # Freed memory is anybody's at once: no stream has a say in it.
        block = entry[2]
        with self.streams.lock:
            self._pinned.remove(entry)
            block.uncover()
            block.seen.fill(LATE)
            block.cover()

    def pinned(self, array: Host) -> tuple[Host, Block] | None:
        """Return `array` as a view of the pinned block it is of, None if it is not."""
        start = address(array)
        with self.streams.lock:
            pinned = tuple(self._pinned)
        for low, high, block in pinned:
            if low <= start < high:
                # A view of the block's own, which does not keep the memory pinned.
                offset = start - low
                place = (array.shape, array.dtype, block.seen.data, offset)
                return np.ndarray(*place, array.strides), block
        return None

    def lend(self, array: Any, request: Any, *, writes: bool) -> None:
        """Complain of work on memory that a message uses, until `request` is false.

        Parameters
        ----------
        array : Array or numpy.ndarray
            A device's array or one of pinned memory; other memory is ignored.
        request
            The message, as mpi4py returns it.
        writes
            Whether the message is received: then nothing may read it either.
        """
        with self.streams.lock:
            if isinstance(array, Array):
                array._memory.block.lend(array._host, request, writes=writes)
            elif (pinned := self.pinned(array)) is not None:
                pinned[1].lend(pinned[0], request, writes=writes)

    # Work

    def call(self, function: Callable[..., Any], /, *args: Any, **kw: Any) -> Any:
        """Let the current stream do what a NumPy function does, into new arrays."""
        out = kw.pop("out", None)
        if out is not None:
            # As the function would be given it, so that a cast is refused at once.
            self._shape_of(function, args, {**kw, "out": out})
            self._enqueue(function, args, {**kw, "out": out}, [])
            return out
        outputs = self._shape_of(function, args, kw)
        many = isinstance(outputs, (tuple, list))
        made = [
            self.empty(np.shape(output), np.asarray(output).dtype)
            for output in (outputs if many else [outputs])
        ]
        self._enqueue(function, args, kw, made)
        return tuple(made) if many else made[0]

    def launch(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        target: Host,
        block: Block,
        casting: str,
    ) -> None:
        """Let the current stream call ``function(target, *args, casting=casting)``."""
        reads = [(a._memory.block, a._host) for a in _arrays(args)]
        plain = _plain(args)
        self.streams.current.queue(
            Work(
                lambda: function(target, *plain, casting=casting),
                reads,
                [(block, target)],
            )
        )

    def _enqueue(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kw: dict[str, Any],
        made: Sequence[Array],
    ) -> None:
        out = kw.get("out")
        written = list(made) if out is None else _arrays([out])
        plain_args, plain_kw = _plain(args), _plain(kw)
        hosts = [array._host for array in made]

        def run() -> None:
            results = function(*plain_args, **plain_kw)
            if hosts:
                many = results if isinstance(results, (tuple, list)) else [results]
                for host, result in zip(hosts, many, strict=True):
                    host[...] = result

        # An output is read as well: a ufunc may leave parts of it alone.
        reads = [(a._memory.block, a._host) for a in _arrays([args, kw])]
        writes = [(a._memory.block, a._host) for a in written]
        self.streams.current.queue(Work(run, reads, writes))

    def _shape_of(
        self, function: Callable[..., Any], args: Sequence[Any], kw: dict[str, Any]
    ) -> Any:
        """Try a function on ones, for the shape, dtype and refusals of its result."""
        with np.errstate(all="ignore"):
            return function(*_ones(args), **_ones(kw))


def _order(order: str) -> Any:
    return "F" if order == "F" else "C"


def _map(value: Any, change: Callable[[Array], Any]) -> Any:
    if isinstance(value, Array):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    return _map(value, lambda array: array._host)


def _ones(value: Any) -> Any:
    return _map(value, lambda array: np.ones(array.shape, array.dtype))


def _arrays(value: Any) -> list[Array]:
    found: list[Array] = []
    _map(value, found.append)
    return found
