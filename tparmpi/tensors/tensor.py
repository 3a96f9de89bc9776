"""The sharded tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tparmpi.backend import MetaArray
from tparmpi.comm import Place
from tparmpi.errors import (
    AutodiffError,
    DeviceError,
    ShapeError,
    ShardingError,
    UsageError,
)
from tparmpi.sharding import Layout, Placement, replicated
from tparmpi.tensors import tape
from tparmpi.tensors.protocol import Protocol
from tparmpi.tensors.redistribute import follow, route_to
from tparmpi.tensors.regather import Regather
from tparmpi.tensors.registry import methods
from tparmpi.tensors.request import refuse_empty, requested_layout
from tparmpi.tensors.spec import Spec, describe_layout, spec_of


class Tensor(Protocol):
    """An array of global shape, laid out over the ranks of a device, group or mesh.

    Made by `tpm.tensor`, `tpm.from_local` and operators. Immutable but for
    `write_local`. On ranks that are no members of its place it is a *shell*: shape,
    dtype and layout, no data.

    Attributes
    ----------
    device
        The place it was made on (an autodiff one if gradients may be recorded).
    spec
        Its plain place, global shape, dtype and layout.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_host",
        "cell",
        "device",
        "node",
        "regather",
        "slot",
        "spec",
    )
    is_parameter = False
    name = ""
    """What messages call it; only parameters have one."""

    def __init__(
        self,
        spec: Spec,
        array: Any,
        device: Place,
        node: tape.Node | tape.Leaf | None = None,
        slot: int = 0,
        cell: list[int] | None = None,
    ) -> None:
        self.spec = spec
        self._array = array
        self._host: np.ndarray[Any, Any] | None = None
        self.device = device
        self.node = node
        self.slot = slot
        self.cell = cell
        self.regather: Regather | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.spec.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor."""
        return int(np.prod(self.spec.shape, dtype=np.int64))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return self.spec.dtype

    @property
    def T(self) -> Tensor:
        """The transpose of a matrix. Local.

        Raises
        ------
        ShapeError
            If there are not two dims; `transpose` takes any number.
        """
        if self.ndim != 2:
            raise ShapeError(
                f"T: a tensor of shape {self.shape} is no matrix; say the order of the "
                "dims with transpose(dims)"
            )
        result: Tensor = methods["transpose"](self)
        return result

    @property
    def layout(self) -> Layout:
        """One placement for each axis of the place."""
        return self.spec.layout

    @property
    def sharding(self) -> Placement | Layout:
        """The placement on a device or group; on a mesh a tuple in axis order."""
        layout = self.spec.layout
        return layout[0] if len(layout) == 1 else layout

    @property
    def is_shell(self) -> bool:
        """Whether this rank holds no data of the tensor."""
        return not self.spec.place.is_member

    @property
    def array(self) -> Any:
        """This rank's block, writable, for the library's own use."""
        if self._array is None:
            place = self.spec.place
            on_host = place.kind == "cpu"
            self._array = self._host if on_host else place.backend.from_host(self._host)
            self._host = None
        return self._array

    @property
    def local(self) -> Any:
        """This rank's block, a plain NumPy or CuPy array (read-only on NumPy). Local.

        Raises
        ------
        ShardingError
            On a shell.
        """
        self._refuse_shell("local")
        array = self.array
        if isinstance(array, np.ndarray):
            array = array.view()
            array.flags.writeable = False
        return array

    @property
    def requires_grad(self) -> bool:
        """Whether operators on this tensor are recorded."""
        return self.node is not None

    @property
    def version(self) -> int:
        """How often `write_local` has written to this tensor."""
        return 0 if self.cell is None else self.cell[0]

    @property
    def grad(self) -> Tensor | None:
        """The gradient gathered so far by `backward`, or None. Local.

        It may be a pending sum (`Partial`) over axes on which this tensor is
        replicated; `numpy()` or `with_sharding` reduces it. What is made from it has no
        gradient of its own; ``grad.detach()`` is a constant.
        """
        if not isinstance(self.node, tape.Leaf):
            return None
        found = self.node.gradient
        if found is None:
            return None
        array, layout = found
        spec = self.spec.with_layout(layout)
        end = tape.GradientEnd(((self.node, 0),), (spec,))
        return Tensor(spec, array, self.spec.place, end)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if not isinstance(self.node, tape.Leaf):
            raise AutodiffError(
                "grad: only a tensor on which require_grad() was called has a gradient"
            )
        slot = self.node.slots[0]
        if value is not None:
            if not isinstance(value, Tensor):
                raise UsageError(
                    f"grad: a {type(value).__name__} is no tensor; make it one with "
                    "tpm.tensor(array, group)"
                )
            if value.shape != self.shape or value.spec.place is not self.spec.place:
                raise ShapeError(
                    f"grad: the gradient must have the shape {self.shape} and the "
                    f"place of its tensor; its shape is {value.shape}"
                )
        slot.sums.clear()
        if value is not None:
            slot.add(value.array.copy(), value.layout, owned=True)

    def take_grad(self, array: Any, layout: Layout) -> None:
        """Make `array`, this rank's block under `layout`, the gradient, and own it."""
        assert isinstance(self.node, tape.Leaf)
        slot = self.node.slots[0]
        slot.sums.clear()
        slot.add(array, layout, owned=True)

    def add_grad(self, array: Any, layout: Layout) -> None:
        """Add `array`, this rank's block under `layout`, to the gradient. Local."""
        assert isinstance(self.node, tape.Leaf)
        self.node.slots[0].add(array, layout)

    def swap_grad(self, sums: tape.Sums) -> tape.Sums:
        """Put `sums` in place of the gradient; return what was there. Local."""
        if not isinstance(self.node, tape.Leaf):
            return {}
        slot = self.node.slots[0]
        before, slot.sums = slot.sums, sums
        return before

    def zero_grad(self) -> None:
        """Forget the gradient. Local."""
        if isinstance(self.node, tape.Leaf):
            self.node.slots[0].sums.clear()

    def require_grad(self) -> Tensor:
        """Ask for this tensor's gradient; return the tensor. Local.

        Raises
        ------
        AutodiffError
            If the device is not an autodiff one, the dtype is not floating, or the
            tensor is an operator's result.
        """
        if not self.device.is_autodiff:
            raise AutodiffError(
                f"require_grad: {self.device} does not record operators; make the "
                "tensor on device.autodiff()"
            )
        if not np.issubdtype(self.dtype, np.inexact) and self.dtype.kind != "V":
            raise AutodiffError(
                f"require_grad: a tensor of {self.dtype} has no gradient; "
                "use a floating dtype"
            )
        if isinstance(self.node, tape.Node):
            raise AutodiffError(
                "require_grad: this tensor is an operator's result and is recorded "
                "already; call require_grad() on the tensors it was made from"
            )
        if self.node is None:
            self.node = tape.Leaf(self.spec, self.is_parameter)
            if self.cell is None:
                self.cell = [0]
        return self

    def astype(self, dtype: Any) -> Tensor:
        """Return the tensor converted to `dtype`; see `cast`."""
        result: Tensor = methods["cast"](self, dtype)
        return result

    def detach(self) -> Tensor:
        """Return the same values without their history. Local."""
        tensor = Tensor(self.spec, self._array, self.device, cell=self.cell)
        tensor._host = self._host
        return tensor

    def with_sharding(
        self,
        sharding: Placement | Layout | None = None,
        /,
        *,
        allow_empty: bool = False,
        regather: bool = False,
        **by_axis: Placement,
    ) -> Tensor:
        """Return the same value in another layout.

        Collective over the axes that change (slicing a replicated tensor is local).

        Parameters
        ----------
        sharding
            A placement on a device or group; on a mesh a tuple in axis order.
        allow_empty
            Permit that some members hold nothing.
        regather
            Let the tape keep the shard and gather once more in the backward pass (once
            for all operators that read the result), instead of the gathered array.
        **by_axis
            Placements of single axes of a mesh; the others stay.

        Raises
        ------
        ShardingError
            If an axis or dim does not exist, a member would be left empty, or a pending
            sum is asked for. The tensor is left as it was.
        """
        if sharding is None and not by_axis:
            raise ShardingError(
                "with_sharding: say how, for example with_sharding(Shard(0)) on a "
                "group or with_sharding(tp=Shard(0)) on a mesh"
            )
        name = f"with_sharding of '{self.name}'" if self.name else "with_sharding"
        layout = requested_layout(
            name, self.spec.place, self.ndim, self.layout, sharding, by_axis
        )
        if not allow_empty:
            refuse_empty(self.spec, layout, name)
        return self.to_layout(layout, regather=regather)

    def to_layout(self, layout: Layout, *, regather: bool = False) -> Tensor:
        """Return the same value in `layout`, which may leave members empty."""
        if layout == self.layout:
            return self
        spec = self.spec
        route = route_to(spec, layout)
        target = spec.with_layout(layout)
        node = self.node if tape.mode.recording else None
        tensor = Tensor(target, None, self.device, node, self.slot, self.cell)
        if self.is_shell:
            tensor._array = MetaArray(target.local_shape, target.dtype)
        elif self._host is not None and all(s.kind == "slice" for s in route.steps):
            tensor._host = np.ascontiguousarray(follow(self._host, spec, route))
        else:
            tensor._array = follow(self.array, spec, route)
            if regather and tape.mode.regathering:
                tensor.regather = Regather(self.array, spec, layout, spec.dtype)
        return tensor

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the whole value as a new NumPy array. Collective over the place."""
        self._refuse_shell("numpy()")
        if self.spec.place.kind == "meta":
            raise DeviceError(
                f"numpy(): the tensor, of shape {self.shape}, lives on a simulated "
                "mesh and has no values; run the program on real devices to see them"
            )
        whole = self.to_layout(replicated(len(self.layout)))
        host = whole._host
        if host is None:
            host = self.spec.place.backend.to_host(whole.array)
        return np.array(host)

    def item(self) -> Any:
        """Return the value of a tensor of one element. Collective over the place."""
        if self.size != 1:
            raise ShapeError(
                f"item: the tensor has {self.size} elements, not one; use numpy()"
            )
        return self.numpy().reshape(()).item()

    def constant(self, value: np.ndarray[Any, Any]) -> Tensor:
        """Return an array without dims as a tensor on the place of this one. Local."""
        place, axes = self.spec.place, len(self.spec.layout)
        spec = spec_of(place, (), value.dtype, replicated(axes))
        if not place.is_member:
            return Tensor(spec, MetaArray((), value.dtype), place)
        tensor = Tensor(spec, None, place)
        tensor._host = value
        return tensor

    def write_local(self, array: Any) -> None:
        """Overwrite this rank's block in place. Local.

        For the library's writes: optimizers, loading, drawing initial values. A tape
        that recorded the tensor before refuses to run its backward after.
        """
        self._refuse_shell("write_local()")
        if tuple(array.shape) != self.spec.local_shape:
            raise ShapeError(
                "write_local: this rank's block has the shape "
                f"{self.spec.local_shape}, the array {tuple(array.shape)}"
            )
        target = self.room()
        if isinstance(array, np.ndarray) and not isinstance(target, np.ndarray):
            array = self.spec.place.backend.from_host(array)
        target[...] = array
        self.mark_written()

    def room(self) -> Any:
        """This rank's block, which the library is to overwrite whole. Local.

        Who does so calls :meth:`mark_written` after it.
        """
        return self.array

    def mark_written(self) -> None:
        """Tell the tape that `array` was written to in place. Local."""
        if self.cell is None:
            self.cell = [0]
        self.cell[0] += 1

    def __repr__(self) -> str:
        extra = ", shell" if self.is_shell else ""
        return (
            f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, "
            f"{describe_layout(self.spec)}, device={self.device}{extra})"
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = methods.get(name)
        if function is None:
            raise AttributeError(f"'Tensor' has no attribute or operator '{name}'")
        return _Bound(function, self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *methods})

    def _refuse_shell(self, what: str) -> None:
        if self.is_shell:
            raise ShardingError(
                f"{what}: this rank is no member of {self.spec.place} and holds no "
                "data of the tensor; ask on its members only"
            )


class _Bound:
    """An operator bound to its first operand."""

    __slots__ = ("function", "tensor")

    def __init__(self, function: Callable[..., Any], tensor: Tensor) -> None:
        self.function = function
        self.tensor = tensor

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.function(self.tensor, *args, **keywords)
