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
from tparmpi.errors import CommunicationError, UsageError
from tparmpi.sharding import Layout
from tparmpi.sharding.transfers import layout_on
from tparmpi.tensors import Spec, Tensor, nests, redistribute, spec_of
from tparmpi.tensors.bridge import Bridge, Incoming, settled

MOST_FORMS = 1024
"""So many forms are remembered: numbers in signals may make each one a new one."""


@dataclass(frozen=True)
class Part:
    """A tensor of a signal without its values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout
    is_differentiable: bool


class Form(NamedTuple):
    """A signal without values: the nest with a number for each tensor, and the parts.

    A tensor that stands in it twice is sent once.
    """

    nest: Any
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Number:
    """The place of a tensor in a form's nest."""

    number: int


class Passage:
    """How signals of one form go from a place to another.

    Attributes
    ----------
    form
        The form.
    leaving, arriving
        How its tensors lie on the two places.
    differentiable
        Numbers of the parts whose gradients come back.
    """

    __slots__ = ("arriving", "differentiable", "form", "leaving")

    def __init__(self, form: Form, source: Place, target: Place) -> None:
        self.form = form
        parts = form.parts
        self.leaving = [spec_of(source, p.shape, p.dtype, p.layout) for p in parts]
        self.arriving = [
            spec_of(
                target, p.shape, p.dtype, layout_on(p.layout, source.axes, target.axes)
            )
            for p in parts
        ]
        self.differentiable = [n for n, p in enumerate(parts) if p.is_differentiable]


class Received(NamedTuple):
    """A signal that has come, and the tensors in it whose gradients go back."""

    signal: Any
    passage: Passage
    tensors: list[Tensor]


class Edge:
    """The way of signals from a stage to the next, and of gradients back.

    Parameters
    ----------
    source, target
        The stages' places, without ranks in common. Tensors arrive on `target` as it is
        given: an autodiff view if gradients are to come back. Making an edge is
        collective over the members of both.
    name
        For errors.
    """

    def __init__(self, source: Place, target: Place, name: str) -> None:
        self.name = name
        self.source = source.inner()
        self.target = target.inner()
        self._arrives_on = target
        self._forward = Bridge(self.source, self.target)
        self._back = Bridge(self.target, self.source)
        self._sent: dict[bytes, Passage] = {}
        self._known: dict[bytes, Passage] = {}
        self._signals: deque[Incoming] = deque()
        self._gradients: deque[Incoming] = deque()
        self._signals_sent: list[Handle[None]] = []
        self._gradients_sent: list[Handle[None]] = []

    # Signals, from source to target

    def send(self, signal: Any, microbatch: int) -> Passage:
        """Start sending a signal; return how it goes. Collective over the source.

        Waits until the signal before has gone.

        Raises
        ------
        UsageError
            If a part of it cannot be sent.
        """
        form, tensors = form_of(signal)
        self._check(tensors)
        blocks = [
            redistribute(tensor.array, tensor.spec, part.layout)
            for tensor, part in zip(tensors, form.parts, strict=True)
        ]
        packed = self._packed(form)
        digest = blake2b(packed, digest_size=16).digest()
        is_new = digest not in self._sent
        if is_new:
            self._note(self._sent, digest, form)
        passage = self._sent[digest]
        header = np.array([microbatch, is_new, 0, 0], np.int64)
        header[2:] = np.frombuffer(digest, np.int64)
        head = [header, np.frombuffer(packed, np.uint8)] if is_new else [header]
        going = self._forward.send(blocks, passage.leaving, passage.arriving, head)
        # After the start of this one: the receiver goes on with it at once.
        _wait(self._signals_sent)
        self._signals_sent = going
        return passage

    def expect(self) -> None:
        """Start receiving the next signal. Local."""
        self._signals.append(self._forward.expect())

    def receive(self, microbatch: int) -> Received:
        """Wait for the signal that was expected first. Collective over the target.

        Raises
        ------
        CommunicationError
            If it belongs to another microbatch.
        """
        incoming = self._signals.popleft()
        found, passage = self._read_head(incoming)
        specs, form = passage.arriving, passage.form
        blocks = incoming.blocks(passage.leaving, specs)
        if found != microbatch:
            raise CommunicationError(
                f"{self.name}: microbatch {microbatch} was to come, microbatch {found} "
                "has; the stages run different schedules"
            )
        tensors = []
        for part, spec, block in zip(form.parts, specs, blocks, strict=True):
            tensor = Tensor(spec, block, self._arrives_on)
            if part.is_differentiable:
                tensor.require_grad()
            tensors.append(tensor)
        signal = nests.replace(form.nest, lambda at: tensors[at.number], _Number)
        return Received(signal, passage, tensors)

    def _read_head(self, incoming: Incoming) -> tuple[int, Passage]:
        (header,) = map(self._to_host, incoming.head(1))
        digest = header[2:].tobytes()
        if header[1]:
            (packed,) = map(self._to_host, incoming.head(1))
            self._note(self._known, digest, pickle.loads(packed.tobytes()))
        return int(header[0]), self._known[digest]

    def _to_host(self, array: Any) -> Any:
        backend = self.target.backend
        return array if isinstance(array, np.ndarray) else backend.to_host(array)

    # Gradients, from target to source

    def send_gradients(self, received: Received) -> None:
        """Start sending the gradients of a received signal's tensors back.

        Collective over the target. Waits until those before have gone.
        """
        passage = received.passage
        numbers = passage.differentiable
        if not numbers:
            return
        blocks = [_gradient_of(received.tensors[number]) for number in numbers]
        going = self._back.send(
            blocks,
            _chosen(passage.arriving, numbers),
            _chosen(passage.leaving, numbers),
        )
        _wait(self._gradients_sent)
        self._gradients_sent = going

    def expect_gradients(self, passage: Passage) -> None:
        """Start receiving the gradients of a signal that was sent. Local."""
        if passage.differentiable:
            self._gradients.append(self._back.expect())

    def receive_gradients(self, passage: Passage) -> list[Tensor]:
        """Wait for the gradients that were expected first.

        Collective over the source.

        Returns
        -------
        list of Tensor
            One for each differentiable part, in order.
        """
        numbers = passage.differentiable
        if not numbers:
            return []
        specs = _chosen(passage.leaving, numbers)
        incoming = self._gradients.popleft()
        blocks = incoming.blocks(_chosen(passage.arriving, numbers), specs)
        return [
            Tensor(spec, block, self.source)
            for spec, block in zip(specs, blocks, strict=True)
        ]

    def finish(self) -> None:
        """Wait until everything sent has gone. Local."""
        _wait(self._signals_sent)
        _wait(self._gradients_sent)

    def close(self) -> None:
        """Close the edge. Collective over the members of both places."""
        self._forward.close()
        self._back.close()

    def _check(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.spec.place is not self.source:
                raise UsageError(
                    f"the signal to {self.name} has a tensor on {tensor.spec.place!r}; "
                    f"all must be on {self.source!r}, where the layers before live"
                )

    def _packed(self, form: Form) -> bytes:
        try:
            return pickle.dumps(form, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise UsageError(
                f"the signal to {self.name} has a part that cannot be pickled; give "
                "tensors, numbers, text, or classes defined at the top of a module: "
                f"{error}"
            ) from error

    def _note(self, passages: dict[bytes, Passage], digest: bytes, form: Form) -> None:
        """Remember a form; both sides begin anew with the same one after so many."""
        if len(passages) >= MOST_FORMS:
            passages.clear()
        passages[digest] = Passage(form, self.source, self.target)


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
