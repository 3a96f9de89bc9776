"""Parameters: tensors that a model owns and an optimizer changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tparmpi.backend import MetaArray
from tparmpi.comm import Place
from tparmpi.errors import ShardingError, UsageError
from tparmpi.nn.init import DEFAULT, Initializer
from tparmpi.sharding import (
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Shard,
    replicated,
)
from tparmpi.tensors import Tensor, spec_of
from tparmpi.tensors.request import requested_layout
from tparmpi.tensors.tape import Leaf

KINDS = ("weight", "bias", "norm", "embedding")
"""What a parameter can be; optimizers decay weights and embeddings only."""


class Parameter(Tensor):
    """A tensor with an initial distribution and a kind; never gathered unasked.

    It has no values until `initialize` or a checkpoint gives it some. On an autodiff
    place it requires a gradient. On ranks that are no members of its place it is a
    shell.

    Parameters
    ----------
    shape
        Global shape.
    place
        Device, group or mesh, or its autodiff view.
    sharding, by_axis
        As for `Tensor.with_sharding`; members may be left empty.
    initializer
        See `tparmpi.nn.init`.
    kind : {"weight", "bias", "norm", "embedding"}
        What it is for; decides about weight decay.
    dtype
        The place's default floating dtype if None.
    copy_of
        The parameter, on another place, that owns the values: this one is neither
        optimized nor saved, gets them from it and gives it its gradients, as a
        `DistributedLayeredModel` sees to.

    Attributes
    ----------
    name
        Dotted path in the model; empty until a module assigns it.
    copy_of
        The parameter whose values this one has, or None.
    stored_over
        Number of the axis whose members hold pieces of the values between their uses,
        or None; see `store_over`.

    Raises
    ------
    UsageError
        If the kind is unknown.
    ShardingError
        If the layout names an axis or dim that does not exist, or is `Partial`.
    """

    __slots__ = ("copy_of", "initializer", "kind", "name", "stored_over")
    is_parameter = True

    def __init__(
        self,
        shape: tuple[int, ...],
        place: Place,
        sharding: Placement | Layout | None = None,
        *,
        initializer: Initializer = DEFAULT,
        kind: str = "weight",
        dtype: Any = None,
        copy_of: Parameter | None = None,
        **by_axis: Placement,
    ) -> None:
        if kind not in KINDS:
            raise UsageError(
                f"Parameter: kind must be one of {', '.join(KINDS)}, it is {kind!r}"
            )
        inner = place.inner()
        dtype = np.dtype(inner.settings.float if dtype is None else dtype)
        shape = tuple(shape)
        layout = replicated(len(inner.shape))
        if sharding is not None or by_axis:
            layout = requested_layout(
                "Parameter", inner, len(shape), layout, sharding, by_axis
            )
        if any(isinstance(placement, Partial) for placement in layout):
            raise ShardingError(
                "Parameter: a parameter cannot be Partial; use Replicate() or "
                "Shard(dim)"
            )
        super().__init__(spec_of(inner, shape, dtype, layout), None, place, cell=[0])
        self.initializer = initializer
        self.kind = kind
        self.name = ""
        self.copy_of = copy_of
        self.stored_over: int | None = None
        if self.is_shell:
            self._array = MetaArray(self.spec.local_shape, dtype)
        if place.is_autodiff:
            self.require_grad()

    @property
    def described(self) -> str:
        """How messages call it: by its name, or its shape while it has none."""
        return f"'{self.name}'" if self.name else f"of shape {self.shape}"

    @property
    def array(self) -> Any:
        """This rank's block, writable, for the library's own use.

        Raises
        ------
        UsageError
            If it has no values yet.
        """
        if self._array is None:
            raise UsageError(
                f"parameter {self.described} has no values yet; call "
                "model.initialize(seed) or load a checkpoint"
            )
        return self._array

    def store_over(self, axis: str) -> None:
        """Have the members along `axis` hold pieces of the values, each its own. Local.

        The largest dim that no other axis shards is split, the first of equal ones, in
        any chunks. Layers read the values as `gathered`. Nothing changes where there is
        no such axis or dim.

        Raises
        ------
        UsageError
            If the parameter has values already, or is stored over an axis.
        """
        if self._array is not None and not self.is_shell:
            raise UsageError(
                f"parameter {self.described} has values already; split its storage "
                "before initialize(seed) or loading a checkpoint"
            )
        if self.stored_over is not None:
            raise UsageError(
                f"parameter {self.described} is stored over axis "
                f"'{self.spec.place.axes[self.stored_over]}' already"
            )
        place = self.spec.place
        split = {p.dim for p in self.layout if isinstance(p, Shard)}
        free = [dim for dim in range(self.ndim) if dim not in split]
        if axis not in place.axes or not free:
            return
        number = place.axes.index(axis)
        if isinstance(self.layout[number], Shard):
            return
        dim = max(free, key=lambda dim: self.shape[dim])
        layout = (*self.layout[:number], Shard(dim), *self.layout[number + 1 :])
        self.spec = self.spec.with_layout(layout)
        self.stored_over = number
        if self.is_shell:
            self._array = MetaArray(self.spec.local_shape, self.dtype)
        if self.node is not None:
            self.node = Leaf(self.spec, is_parameter=True)
            self.node.stored_over = number

    def gathered(self) -> Tensor:
        """Return the values as an operator uses them.

        Collective over the axis that they are stored over: an all_gather, which the
        tape does not keep but makes once more in the backward pass, if that needs the
        values. The parameter itself where they are not stored over an axis.
        """
        if self.stored_over is None:
            return self
        before, after = self.layout[: self.stored_over], self.layout[self.stored_over :]
        return self.to_layout((*before, REPLICATE, *after[1:]), regather=True)

    def initialize(self, seed: int, name: str) -> None:
        """Draw the values as a function of (seed, name, global index). Local."""
        self.name = name
        if not self.is_shell:
            self._array = self.initializer(seed, name, self.spec)
            self.mark_written()

    def room(self) -> Any:
        """This rank's block, to be overwritten whole; one without values has it now."""
        if self._array is None:
            backend = self.spec.place.backend
            self._array = backend.empty(self.spec.local_shape, self.dtype)
        return self._array
