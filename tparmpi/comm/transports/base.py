"""The interface of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tparmpi.comm.control import Control, Pending
    from tparmpi.comm.transports.streams import Turn

Array = Any


class Transport(ABC):
    """Moves flat arrays between the members of one group.

    The algorithms of the collectives work on *working arrays*: C-contiguous, of the
    array module `xp`, at a place that messages can be sent from and sums be made at.

    Attributes
    ----------
    name : str
        As in the table that `init` gathers.
    rank, size : int
        This rank's place among the members, and their number.
    control : Control
        Says which ranks have ended.
    xp : module
        The array module of working arrays.
    withdraws : bool
        Whether receives that were started can be given up; see `Pending.withdraw`.
    """

    name: str
    rank: int
    size: int
    control: Control
    xp: Any
    withdraws = False

    def turn(self) -> Turn | None:
        """Return the order of a call's work among the caller's streams. Local.

        None where there are no streams. The other methods are called within it, but
        for those of messages, which are looked at from anywhere.
        """
        return None

    @abstractmethod
    def take_in(self, array: Array) -> Array:
        """Return the values of a rank's array as a working array. Local.

        It may be the array itself; it is not written to.
        """

    @abstractmethod
    def give_out(self, array: Array, place: Any) -> Array:
        """Return a fresh working array as an array of `place`'s kind. Local."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised working array for the call's own use. Local.

        `Turn.empty` makes those that the caller gets.
        """

    @abstractmethod
    def borrow(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised working array to `give_back`. Local."""

    @abstractmethod
    def give_back(self, array: Array) -> None:
        """Take back a borrowed array, of which no message is under way. Local."""

    @abstractmethod
    def pending(self) -> Pending:
        """Return an empty set of messages under way. Local.

        Its `Pending.done` completes them: what is to follow a message, such as a copy
        to where the array is, is done there.
        """

    @abstractmethod
    def start_send(self, pending: Pending, flat: Array, member: int, tag: int) -> None:
        """Start to send a one-dim working array, which must stay as it is. Local.

        What work given to streams before still writes there is sent as well. An array
        without elements sends nothing. One in host memory can be sent by any transport.
        """

    @abstractmethod
    def start_receive(
        self, pending: Pending, flat: Array, member: int, tag: int
    ) -> None:
        """Start to receive into a one-dim working array. Local.

        What work given to streams before still reads there is not yet overwritten.
        """
