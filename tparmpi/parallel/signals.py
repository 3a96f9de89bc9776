"""Signals: what a stage sends to the next, and the gradients that come back.

Every signal is led by a header of fixed size: the microbatch, and a digest of the
signal's form. The form (the nest, and of each tensor shape, dtype and layout) follows
only when the other side has not seen it.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from tparmpi.comm import Place
from tparmpi.comm.handle import Handle
from tparmpi.errors import CommunicationError
from tparmpi.sharding import Layout
from tparmpi.sharding.transfers import layout_on
from tparmpi.tensors import Spec, Tensor, nests, redistribute, spec_of
from tparmpi.tensors.bridge import Bridge, Incoming, settled


@dataclass(frozen=True)
class Part:
    """A tensor of a signal without its values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout
    is_differentiable: bool

    def on(self, source: Place) -> Spec:
        """Return how it lies on the place that sends it. Local."""
        return spec_of(source, self.shape, self.dtype, self.layout)

    def arriving(self, source: Place, target: Place) -> Spec:
        """Return how it lies on the place that receives it. Local."""
        layout = layout_on(self.layout, source.axes, target.axes)
        return spec_of(target, self.shape, self.dtype, layout)


class Form(NamedTuple):
    """A signal without values: the nest with a number for each tensor, and the parts.

    A tensor that stands in it twice is sent once.
    """

    nest: Any
    parts: tuple[Part, ...]

    @property
    def differentiable(self) -> list[int]:
        """Numbers of the parts whose gradients come back."""
        return [i for i, part in enumerate(self.parts) if part.is_differentiable]


@dataclass(frozen=True)
class _Number:
    """The place of a tensor in a form's nest."""

    number: int


class Received(NamedTuple):
    """A signal that has come, and the tensors in it whose gradients go back."""

    signal: Any
    form: Form
    tensors: list[Tensor]


class Edge:
    """The way of signals from a stage to the next, and of gradients back.

    Parameters
    ----------
    source, target
        The stages' places, of which one may be the other. Tensors arrive on `target`
        as it is given, as an autodiff view if gradients are to come back. Making an
        edge is collective over the members of both.
    name
        For errors.
    """

    def __init__(self, source: Place, target: Place, name: str) -> None:
        self.name = name
        self.source = source.inner()
        self.target = target.inner()
        self._arrives_on = target
        self._forward = self._back = None
        if self.source is not self.target:
            self._forward = Bridge(self.source, self.target)
            self._back = Bridge(self.target, self.source)
        self._sent_forms: set[bytes] = set()
        self._known_forms: dict[bytes, Form] = {}
        self._signals: deque[Any] = deque()
        self._gradients: deque[Any] = deque()
        self._signals_sent: list[Handle[None]] = []
        self._gradients_sent: list[Handle[None]] = []

    # Signals, from source to target

    def send(self, signal: Any, microbatch: int) -> Form:
        """Start sending a signal; return its form. Collective over the source.

        Waits until the signal before has gone.
        """
        form, tensors = form_of(signal)
        blocks = [
            redistribute(tensor.array, tensor.spec, settled(tensor.spec).layout)
            for tensor in tensors
        ]
        if self._forward is None:
            self._signals.append((microbatch, form, blocks))
            return form
        packed = pickle.dumps(form, pickle.HIGHEST_PROTOCOL)
        digest = blake2b(packed, digest_size=16).digest()
        is_new = digest not in self._sent_forms
        self._sent_forms.add(digest)
        header = np.array([microbatch, is_new, 0, 0], np.int64)
        header[2:] = np.frombuffer(digest, np.int64)
        head = [header, np.frombuffer(packed, np.uint8)] if is_new else [header]
        _wait(self._signals_sent)
        self._signals_sent = self._forward.send(
            blocks, self._leaving(form), self._arriving(form), head
        )
        return form

    def expect(self) -> None:
        """Start receiving the next signal. Local."""
        if self._forward is not None:
            self._signals.append(self._forward.expect())

    def receive(self, microbatch: int) -> Received:
        """Wait for the signal that was expected first. Collective over the target.

        Raises
        ------
        CommunicationError
            If it belongs to another microbatch.
        """
        if self._forward is None:
            found, form, blocks = self._signals.popleft()
            specs = self._leaving(form)
        else:
            incoming: Incoming = self._signals.popleft()
            found, form = self._read_head(incoming)
            specs = self._arriving(form)
            blocks = incoming.blocks(self._leaving(form), specs)
        if found != microbatch:
            raise CommunicationError(
                f"{self.name}: microbatch {microbatch} was to come, microbatch {found} "
                "has; the stages run different schedules"
            )
        tensors = []
        for part, spec, block in zip(form.parts, specs, blocks, strict=True):
            tensor = Tensor(spec, block, self._arrives_on)
            if part.is_differentiable and self._arrives_on.is_autodiff:
                tensor.require_grad()
            tensors.append(tensor)
        signal = nests.replace(form.nest, lambda at: tensors[at.number], _Number)
        return Received(signal, form, tensors)

    def _read_head(self, incoming: Incoming) -> tuple[int, Form]:
        (header,) = map(self._to_host, incoming.head(1))
        digest = header[2:].tobytes()
        if header[1]:
            (packed,) = map(self._to_host, incoming.head(1))
            self._known_forms[digest] = pickle.loads(packed.tobytes())
        return int(header[0]), self._known_forms[digest]

    def _to_host(self, array: Any) -> Any:
        backend = self.target.backend
        return array if isinstance(array, np.ndarray) else backend.to_host(array)

    # Gradients, from target to source

    def send_gradients(self, received: Received) -> None:
        """Start sending the gradients of a received signal's tensors back.

        Collective over the target. Waits until those before have gone.
        """
        form = received.form
        numbers = form.differentiable
        if not numbers:
            return
        blocks = [_gradient_of(received.tensors[number]) for number in numbers]
        if self._back is None:
            self._gradients.append(blocks)
            return
        _wait(self._gradients_sent)
        self._gradients_sent = self._back.send(
            blocks,
            _chosen(self._arriving(form), numbers),
            _chosen(self._leaving(form), numbers),
        )

    def expect_gradients(self, form: Form) -> None:
        """Start receiving the gradients of the signal of `form`. Local."""
        if self._back is not None and form.differentiable:
            self._gradients.append(self._back.expect())

    def receive_gradients(self, form: Form) -> list[Tensor]:
        """Wait for the gradients that were expected first.

        Collective over the source.

        Returns
        -------
        list of Tensor
            One for each differentiable part, in order.
        """
        numbers = form.differentiable
        if not numbers:
            return []
        specs = _chosen(self._leaving(form), numbers)
        found: Any = self._gradients.popleft()
        if self._back is not None:
            found = found.blocks(_chosen(self._arriving(form), numbers), specs)
        return [
            Tensor(spec, block, self.source)
            for spec, block in zip(specs, found, strict=True)
        ]

    def finish(self) -> None:
        """Wait until everything sent has gone. Local."""
        _wait(self._signals_sent)
        _wait(self._gradients_sent)

    def close(self) -> None:
        """Close the edge. Collective over the members of both places."""
        for bridge in (self._forward, self._back):
            if bridge is not None:
                bridge.close()

    def _leaving(self, form: Form) -> list[Spec]:
        return [part.on(self.source) for part in form.parts]

    def _arriving(self, form: Form) -> list[Spec]:
        return [part.arriving(self.source, self.target) for part in form.parts]


def form_of(signal: Any) -> tuple[Form, list[Tensor]]:
    """Return the form of a signal and its tensors, each once. Local."""
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def note(tensor: Tensor) -> _Number:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return _Number(numbers[id(tensor)])

    nest = nests.replace(signal, note)
    parts = tuple(
        Part(t.shape, t.dtype, settled(t.spec).layout, t.requires_grad) for t in tensors
    )
    return Form(nest, parts), tensors


def _gradient_of(tensor: Tensor) -> Any:
    """This rank's block of the gradient, brought to the tensor's own layout."""
    gradient = tensor.grad
    spec = tensor.spec
    if gradient is None:
        return spec.place.backend.zeros(spec.local_shape, spec.dtype)
    return redistribute(gradient.array, gradient.spec, spec.layout)


def _chosen(specs: Sequence[Spec], numbers: Sequence[int]) -> list[Spec]:
    return [specs[number] for number in numbers]


def _wait(handles: list[Handle[None]]) -> None:
    for handle in handles:
        handle.wait()
    handles.clear()
