"""Signals: what a stage sends to the next, and the gradients that come back.

Every message of an edge is led by a header of fixed size: the microbatch, the kind, and
a digest of the signal's form. The form (the nest, and of each tensor shape, dtype and
layout) follows only when the other side has not seen it.

The header comes apart from the tensors, which the receiver takes up as soon as it knows
where to: gradients, whose form is the signal's, at once; signals on the chance that
their form is that of the signal before.
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
from tparmpi.comm.blocks import Bytes, Kind
from tparmpi.comm.handle import Handle
from tparmpi.errors import CommunicationError, UsageError
from tparmpi.sharding import Layout
from tparmpi.sharding.transfers import layout_on
from tparmpi.tensors import Spec, Tensor, nests, redistribute, spec_of
from tparmpi.tensors.bridge import Bridge, Incoming, Route, settled

MOST_FORMS = 1024
"""So many forms are remembered: numbers in signals may make each one a new one."""

_DIGEST_BYTES = 16
# Microbatch, kind, bytes of the form that follows (0 where it has been seen), whether
# it is that of the signal before, and the digest.
_HEADER_NUMBERS = 4 + _DIGEST_BYTES // 8
_SIGNAL, _GRADIENTS = 0, 1
_KINDS = ("signal", "gradients")


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
    """How signals of one form go over an edge.

    Attributes
    ----------
    form, digest
        The form, and what stands for it.
    arriving
        How its tensors lie on the target.
    differentiable
        Numbers of the parts whose gradients come back.
    forward, back
        The ways of the tensors, and of the gradients.
    """

    __slots__ = ("arriving", "back", "differentiable", "digest", "form", "forward")

    def __init__(self, edge: Edge, form: Form, digest: bytes) -> None:
        self.form = form
        self.digest = digest
        parts = form.parts
        source, target = edge.source, edge.target
        leaving = [spec_of(source, p.shape, p.dtype, p.layout) for p in parts]
        self.arriving = [
            spec_of(
                target, p.shape, p.dtype, layout_on(p.layout, source.axes, target.axes)
            )
            for p in parts
        ]
        self.differentiable = [n for n, p in enumerate(parts) if p.is_differentiable]
        self.forward = edge.forward.route(leaving, self.arriving)
        self.back = edge.back.route(
            _chosen(self.arriving, self.differentiable),
            _chosen(leaving, self.differentiable),
        )

    def header(self, microbatch: int, kind: int, *more: int) -> Bytes:
        """Return the header of a message, for `_Headed.check`. Local."""
        numbers = [microbatch, kind, *(more or (0, 0))]
        packed = np.array(numbers, np.int64).tobytes() + self.digest
        return np.frombuffer(packed, np.uint8)


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
        self.forward = Bridge(self.source, self.target)
        self.back = Bridge(self.target, self.source)
        self._arrives_on = target
        self._sent = _Seen()
        self._last: Passage | None = None
        self._incoming = _Queue()
        self._gradients: deque[_Gradients] = deque()
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
        passage, tensors, news = self._passage_of(signal)
        blocks = [
            tensor.array
            if tensor.spec is spec
            else redistribute(tensor.array, tensor.spec, spec.layout)
            for tensor, spec in zip(tensors, passage.forward.specs, strict=True)
        ]
        is_same = passage is self._last
        self._last = passage
        header = passage.header(microbatch, _SIGNAL, len(news), is_same)
        heads = [header, np.frombuffer(news, np.uint8)] if news else [header]
        going = self.forward.send(blocks, passage.forward, heads, are_foreseen=is_same)
        # After the start of this one: the receiver goes on with it at once.
        _wait(self._signals_sent)
        self._signals_sent = going
        return passage

    def _passage_of(self, signal: Any) -> tuple[Passage, list[Tensor], bytes]:
        """How a signal goes, its tensors, and the form if it is to be told."""
        # Most signals are a tensor: its spec says all.
        key = None
        if type(signal) is Tensor:
            key = signal.spec, signal.requires_grad
            passage = self._sent.short.get(key)
            if passage is not None:
                return passage, [signal], b""
        form, tensors = form_of(signal)
        self._check(tensors)
        packed = self._packed(form)
        digest = blake2b(packed, digest_size=_DIGEST_BYTES).digest()
        passage = self._sent.passages.get(digest)
        is_new = passage is None
        if passage is None:
            passage = Passage(self, form, digest)
            self._sent.note(passage)
        if key is not None:
            self._sent.short[key] = passage
        return passage, tensors, packed if is_new else b""

    def expect(self) -> None:
        """Start receiving the next signal. Local."""
        self._incoming.start(self.forward)

    def receive(self, microbatch: int) -> Received:
        """Wait for the signal that was expected first. Collective over the target.

        Raises
        ------
        CommunicationError
            If it belongs to another microbatch.
        """
        incoming = self._incoming.pop()
        news = incoming.wait_for_news()
        if news is not None:
            form, digest = pickle.loads(news.tobytes()), incoming.digest
            self._incoming.seen.note(Passage(self, form, digest))
        blocks = incoming.wait()
        incoming.check(self.name, microbatch)
        passage = incoming.passage
        assert passage is not None
        tensors = []
        for part, spec, block in zip(
            passage.form.parts, passage.arriving, blocks, strict=True
        ):
            tensor = Tensor(spec, block, self._arrives_on)
            if part.is_differentiable:
                tensor.require_grad()
            tensors.append(tensor)
        nest = passage.form.nest
        if type(nest) is _Number:
            return Received(tensors[0], passage, tensors)
        signal = nests.replace(nest, lambda at: tensors[at.number], _Number)
        return Received(signal, passage, tensors)

    # Gradients, from target to source

    def send_gradients(self, received: Received, microbatch: int) -> None:
        """Start sending the gradients of a received signal's tensors back.

        Collective over the target. Waits until those before have gone.
        """
        passage = received.passage
        numbers = passage.differentiable
        if not numbers:
            return
        blocks = [_gradient_of(received.tensors[number]) for number in numbers]
        header = passage.header(microbatch, _GRADIENTS)
        going = self.back.send(blocks, passage.back, [header])
        _wait(self._gradients_sent)
        self._gradients_sent = going

    def expect_gradients(self, passage: Passage) -> None:
        """Start receiving the gradients of a signal that was sent. Local."""
        if passage.differentiable:
            incoming = _Gradients(self.back, passage)
            incoming.start()
            self._gradients.append(incoming)

    def receive_gradients(self, passage: Passage, microbatch: int) -> list[Tensor]:
        """Wait for the gradients that were expected first.

        Collective over the source.

        Returns
        -------
        list of Tensor
            One for each differentiable part, in order.

        Raises
        ------
        CommunicationError
            If they belong to another microbatch.
        """
        if not passage.differentiable:
            return []
        incoming = self._gradients.popleft()
        blocks = incoming.wait()
        incoming.check(f"the stage before {self.name}", microbatch)
        return [
            Tensor(spec, block, self.source)
            for spec, block in zip(passage.back.targets, blocks, strict=True)
        ]

    def finish(self) -> None:
        """Wait until everything sent has gone. Local."""
        _wait(self._signals_sent)
        _wait(self._gradients_sent)

    def close(self) -> None:
        """Close the edge. Collective over the members of both places."""
        self.forward.close()
        self.back.close()

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


class _Seen:
    """The forms that went over an edge; both sides forget the same ones.

    Attributes
    ----------
    passages
        By digest.
    short
        By spec, and whether it needs a gradient, of signals that are one tensor.
    """

    def __init__(self) -> None:
        self.passages: dict[bytes, Passage] = {}
        self.short: dict[tuple[Spec, bool], Passage] = {}

    def note(self, passage: Passage) -> None:
        """Remember a form; all others are forgotten after so many. Local."""
        if len(self.passages) >= MOST_FORMS:
            self.passages.clear()
            self.short.clear()
        self.passages[passage.digest] = passage


class _Headed(Incoming):
    """A message of an edge on its way here."""

    kind: int

    def __init__(self, bridge: Bridge, route: Route | None) -> None:
        self._header = np.zeros(_HEADER_NUMBERS, np.int64)
        super().__init__(bridge, route, self._header.view(np.uint8))

    @property
    def digest(self) -> bytes:
        """Of its form, when the header is there."""
        return self._header[4:].tobytes()

    def check(self, name: str, microbatch: int) -> None:
        """Refuse what is not of this microbatch. Local."""
        found, kind = self._header[:2].tolist()
        if (found, kind) != (microbatch, self.kind):
            raise CommunicationError(
                f"{name}: the {_KINDS[self.kind]} of microbatch {microbatch} "
                f"{'was' if self.kind == _SIGNAL else 'were'} to come, what has come "
                f"is of microbatch {found}; the stages run different schedules"
            )


class _Gradients(_Headed):
    """Gradients on their way."""

    kind = _GRADIENTS

    def __init__(self, bridge: Bridge, passage: Passage) -> None:
        super().__init__(bridge, passage.back)


class _Signal(_Headed):
    """A signal on its way.

    Attributes
    ----------
    passage
        How it goes; None while that is not known.
    """

    kind = _SIGNAL

    def __init__(self, bridge: Bridge, queue: _Queue) -> None:
        super().__init__(bridge, None)
        self.passage: Passage | None = None
        self._queue = queue
        self._number = queue.started
        self._news: Bytes | None = None

    def wait_for_news(self) -> Bytes | None:
        """Return the form that comes with it, if one does, or wait for all. Local."""
        self.settle(self._has_news)
        return self._news

    def _has_news(self) -> bool:
        return self._news is not None

    def is_next(self) -> bool:
        return self._queue.read == self._number

    def foreseen(self) -> Sequence[Kind] | None:
        last = self._queue.last
        return None if last is None else self.of_leader(last.forward)

    def read(self) -> tuple[int, bool]:
        _, _, news_bytes, is_same = self._header[:4].tolist()
        queue = self._queue
        queue.read += 1
        self._take(queue.last if is_same else None)
        return news_bytes, bool(is_same)

    def learn(self, news: Bytes) -> None:
        self._news = news

    def kinds(self) -> Sequence[Kind] | None:
        if self.passage is None:
            self._take(self._queue.seen.passages.get(self.digest))
        return None if self.route is None else self.of_leader(self.route)

    def _take(self, passage: Passage | None) -> None:
        queue = self._queue
        if queue.read == self._number + 1:
            queue.last = passage
        if passage is not None:
            self.passage = passage
            self.route = passage.forward


class _Queue:
    """The signals on their way here, in order.

    Attributes
    ----------
    seen
        The forms of those that have come.
    started, read
        How many are received, and how many headers have been read.
    last
        How the last one goes whose header has been read; None if not known.
    """

    def __init__(self) -> None:
        self.seen = _Seen()
        self.started = 0
        self.read = 0
        self.last: Passage | None = None
        self._under_way: deque[_Signal] = deque()

    def start(self, bridge: Bridge) -> None:
        """Start receiving the next one. Local."""
        signal = _Signal(bridge, self)
        self.started += 1
        signal.start()
        self._under_way.append(signal)

    def pop(self) -> _Signal:
        """Return the first one. Local."""
        return self._under_way.popleft()


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
