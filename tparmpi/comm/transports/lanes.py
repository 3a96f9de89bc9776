"""Messages of a GPU's arrays: what each waits for, and their order.

MPI matches messages between two ranks with one tag in the order in which they are
handed to it. A message that has to wait for a stream before that must therefore hold up
those behind it, and no others: each pair of member and tag, and direction, has a *lane*
of its own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from mpi4py import MPI

from tparmpi.comm.control import Control, Pending, unfit

Array = Any


class Envelope(NamedTuple):
    """Where a message goes to or comes from.

    Parameters
    ----------
    member, tag : int
    rank : int
        The member's world rank.
    """

    member: int
    tag: int
    rank: int


class Message(ABC):
    """One message of a lane, moved on by `Lane.advance` through these steps.

    Parameters
    ----------
    envelope : Envelope

    Attributes
    ----------
    is_done : bool
        Whether the library's work stream may go on with its array, or MPI refused it.
    error : mpi4py.MPI.Exception or None
        Why MPI refused it.
    """

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope
        self.is_done = False
        self.error: MPI.Exception | None = None
        self.request: MPI.Request | None = None

    def begin(self) -> None:
        """Let streams prepare the message. Local."""
        return

    @abstractmethod
    def is_ready(self) -> bool:
        """Say whether it can be handed to MPI. Local."""

    @abstractmethod
    def hand_over(self) -> MPI.Request:
        """Hand it to MPI. Local."""

    def land(self) -> None:
        """Do what follows a complete message. Local."""
        return

    def is_gone(self) -> bool:
        """Say whether nothing uses its memory any more. Local."""
        return True


class Lane:
    """Messages to or from one member with one tag, in order.

    Parameters
    ----------
    window : int or None
        How many may be under way at a time; None for no limit.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._waiting: deque[Message] = deque()
        self._begun: deque[Message] = deque()
        self._flying: list[Message] = []
        self._landed: list[Message] = []

    def add(self, message: Message) -> None:
        """Put a message behind all others. Local."""
        self._waiting.append(message)

    def advance(self) -> bool:
        """Move the messages on as far as they go; return whether any is left. Local."""
        self._landed = [message for message in self._landed if not message.is_gone()]
        while self._waiting and self._has_room():
            message = self._waiting.popleft()
            message.begin()
            self._begun.append(message)
        while self._begun and self._begun[0].is_ready():
            message = self._begun.popleft()
            message.request = message.hand_over()
            self._flying.append(message)
        flying = self._flying
        self._flying = []
        for message in flying:
            if not self._complete(message):
                self._flying.append(message)
        return bool(self._waiting or self._begun or self._flying or self._landed)

    def _has_room(self) -> bool:
        if self._window is None:
            return True
        under_way = len(self._begun) + len(self._flying) + len(self._landed)
        return under_way < self._window

    def _complete(self, message: Message) -> bool:
        assert message.request is not None
        try:
            if not message.request.Test():
                return False
            message.request = None
            message.land()
            self._landed.append(message)
        except MPI.Exception as error:
            # For whoever waits for the message, not for whoever looks.
            message.error = error
        message.is_done = True
        return True


class Lanes:
    """All lanes of one transport; every look at one message moves all on.

    Parameters
    ----------
    window : int or None
        As in `Lane`.
    device : context manager
        Makes the GPU current, in whichever thread looks.
    """

    def __init__(
        self, window: int | None, device: AbstractContextManager[object]
    ) -> None:
        self._window = window
        self._device = device
        self._lanes: dict[Hashable, Lane] = {}
        self._lock = threading.RLock()

    def add(self, name: Hashable, message: Message) -> None:
        """Put a message at the end of a lane. Local."""
        with self._lock, self._device:
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = Lane(self._window)
            lane.add(message)
            if not lane.advance():
                del self._lanes[name]

    def advance(self) -> None:
        """Move all messages on as far as they go. Local."""
        with self._lock, self._device:
            for name, lane in tuple(self._lanes.items()):
                if not lane.advance():
                    del self._lanes[name]


class LanePending(Pending):
    """Messages of lanes; see `Pending`.

    Parameters
    ----------
    lanes : Lanes
    """

    __slots__ = ("_lanes", "_messages")

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self._lanes = lanes
        self._messages: list[Message] = []

    def put(self, name: Hashable, message: Message) -> None:
        """Wait for `message` too, which goes down the lane `name`. Local."""
        self._messages.append(message)
        self._lanes.add(name, message)

    def done(self, doing: str) -> bool:
        self._lanes.advance()
        messages = self._messages
        while messages and messages[-1].is_done:
            error = messages.pop().error
            if error is not None:
                raise unfit(error, doing) from error
        return not messages

    def wait(self, control: Control, doing: str) -> None:
        if not self.done(doing):
            self._poll(control, doing)

    def awaited(self) -> list[int]:
        return [m.envelope.rank for m in self._messages if not m.is_done]
