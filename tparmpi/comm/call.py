"""One collective call: its tag, its place in the ledger, and its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tparmpi.comm import progress, ring
from tparmpi.comm.abandoned import keep
from tparmpi.comm.algorithms import Link, Steps
from tparmpi.comm.handle import Handle
from tparmpi.comm.ledger import Entry, active
from tparmpi.errors import CollectiveMismatchError, ShapeError, UsageError

if TYPE_CHECKING:
    from tparmpi.comm.channel import Channel
    from tparmpi.comm.control import Pending
    from tparmpi.comm.members import Members
    from tparmpi.comm.transports.streams import Turn

Array = Any
_T = TypeVar("_T")

# Raised before anything is sent.
_REFUSALS = (UsageError, ShapeError, CollectiveMismatchError)


class Call:
    """One call: holds its tag while it is under way, records it when it ends.

    Parameters
    ----------
    place : Members
    channel : Channel
        The open place's.
    kind : str
        Name of the call.
    sequence : int
        Number of the call, the same on all members.
    pair : tuple of int, optional
        The two members of a point-to-point call, source and target, which count theirs.

    Attributes
    ----------
    link : Link or None
        None where there is one member, and nothing to send.
    turn : Turn or None
        Where its work comes among that of the caller's streams, if there are any.
    sent : int
        Payload bytes that this rank sends; the operation sets it.
    """

    __slots__ = (
        "_channel",
        "_entry",
        "_recorded",
        "kind",
        "link",
        "pair",
        "place",
        "sent",
        "sequence",
        "turn",
    )

    def __init__(
        self,
        place: Members,
        channel: Channel,
        kind: str,
        sequence: int,
        pair: tuple[int, int] | None = None,
    ) -> None:
        self.place = place
        self._channel = channel
        self.pair = pair
        self._entry: Entry | None = None
        self.kind = kind
        self.sequence = sequence
        self.link: Link | None = None
        self.turn: Turn | None = None
        self.sent = 0
        transport = channel.transport
        if transport is not None:
            if active:
                self._entry = Entry()
            tag = channel.begin(place.id, sequence, pair)
            self.link = Link(transport, tag, kind, channel.way)
            self.turn = transport.turn()
            self._recorded = ring.recorder.enter(kind, place.recorded_as, sequence)

    def __repr__(self) -> str:
        return f"{self.kind} on {self.place!r}"

    def run(self, operation: Callable[..., Steps[_T]], *arguments: Any) -> _T:
        """Return the result of an operation, waiting wherever it has to. Local.

        Parameters
        ----------
        operation
            Called with this call and the `arguments`.
        """
        try:
            steps = self._steps(operation, arguments)
            while True:
                self._wait(next(steps))
        except StopIteration as stop:
            self.end(None)
            result: _T = stop.value
            return result
        except BaseException as error:
            self.end(error)
            raise

    def start(
        self,
        operation: Callable[..., Steps[_T]],
        *arguments: Any,
        site: str | None = None,
    ) -> Handle[_T]:
        """Begin an operation and return its handle. Local.

        Parameters
        ----------
        operation, arguments
            As for `run`.
        site
            What is said of where it was started; the caller's line if None.

        Raises
        ------
        UsageError, ShapeError
            If the operation refuses its arguments.
        """
        handle = Handle(self, self._steps(operation, arguments), site)
        progress.add(handle)
        handle.check_refusal()
        return handle

    def end(self, error: BaseException | None) -> None:
        """Close the call, which has run or failed. Local."""
        if self.link is None:
            return
        if error is None:
            ring.recorder.leave(self._recorded)
        else:
            ring.recorder.break_off(self._recorded)
            if not isinstance(error, _REFUSALS):
                # Messages may still be under way.
                keep(error)
                self._channel.break_off(self.link.tag, self.pair)
                return
        self._channel.end(self.link.tag, self.pair)
        if self._entry is not None and error is None:
            self._entry.close(self.kind, self.place.label, self.sent)

    @property
    def is_counted(self) -> bool:
        """Whether a ledger wants to know what is sent."""
        return self._entry is not None

    def watch(self, pending: Pending) -> None:
        """Refuse to wait for members that have ended. Local.

        Raises
        ------
        CommunicationError
            If one that `pending` has messages from or to has ended.
        """
        assert self.link is not None
        pending.watch(self.link.transport.control, self.kind)

    def _steps(
        self, operation: Callable[..., Steps[_T]], arguments: Sequence[Any]
    ) -> Steps[_T]:
        checker = self.place.checker
        if checker is None or self.link is None:
            steps = operation(self, *arguments)
        else:
            # It calls MPI, which is not to start with an import.
            from tparmpi.comm.check import checked

            steps = checked(checker, self, operation, arguments)
        return steps if self.turn is None else self.turn.drive(steps, *arguments)

    def _wait(self, pending: Pending) -> None:
        assert self.link is not None
        pending.wait(self.link.transport.control, self.kind)

    @property
    def xp(self) -> Any:
        """The array module of working arrays."""
        return np if self.link is None else self.link.transport.xp

    def take_in(self, array: Array) -> Array:
        """Return a rank's array as a working array; see `Transport`."""
        if self.link is None:
            return array if hasattr(array, "dtype") else np.asarray(array)
        return self.link.transport.take_in(array)

    def check_out(
        self, out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        """Refuse an `out` that cannot hold the result. Local.

        Raises
        ------
        ShapeError
            If its shape differs.
        UsageError
            If its dtype differs, or it cannot be written to.
        """
        if out is None:
            return
        kind: Any = object if self.link is None else self.xp.ndarray
        if not (isinstance(out, kind) and hasattr(out, "dtype")):
            raise UsageError(
                f"{self.kind}: out must be an array of {self.xp.__name__}, as the "
                f"result is, it is a {type(out).__module__}.{type(out).__qualname__}"
            )
        if out.shape != shape:
            raise ShapeError(
                f"{self.kind}: out must have the result's shape {shape}, it has "
                f"{out.shape}"
            )
        if out.dtype != dtype:
            raise UsageError(
                f"{self.kind}: out must have the result's dtype {dtype}, it has "
                f"{out.dtype}"
            )
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise UsageError(f"{self.kind}: out is read-only")

    def is_over(self, out: Array | None, data: Array) -> bool:
        """Say whether `out` is the call's input, of which `data` holds the values."""
        return out is data and type(out) is np.ndarray and self.xp is np

    def target(
        self,
        out: Array | None,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        source: Array | None = None,
    ) -> Array:
        """Return a working array for the result: `out` itself where it can be one.

        It cannot if it shares memory with the `source` of the call.
        """
        if (
            out is not None
            and type(out) is np.ndarray
            and self.xp is np
            and out.shape == tuple(shape)
            and out.dtype == dtype
            and out.flags.c_contiguous
            and out.flags.writeable
            and (source is None or not np.may_share_memory(out, source))
        ):
            return out
        return self.empty(shape, dtype)

    def give_out(self, array: Array, out: Array | None = None) -> Array:
        """Return a fresh working array as an array of the place's kind, or in `out`."""
        assert self.link is not None
        if out is None:
            return self.link.transport.give_out(array, self.place)
        if array is not out:
            self.check_out(out, array.shape, array.dtype)
            out[...] = self.link.transport.give_out(array, self.place)
        return out

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised working array that the caller may get."""
        assert self.link is not None
        if self.turn is not None:
            return self.turn.empty(shape, dtype)
        return self.link.transport.empty(shape, dtype)

    def copy(self, array: Array, out: Array | None = None) -> Array:
        """Return a C-contiguous copy of a rank's own array, or `out` filled with it."""
        if out is not None:
            values = array if hasattr(array, "dtype") else np.asarray(array)
            self.check_out(out, values.shape, values.dtype)
            out[...] = values
            return out
        if self.turn is not None:
            copied = self.turn.empty(array.shape, array.dtype)
            copied[...] = self.take_in(array)
            return copied
        return array.copy(order="C") if hasattr(array, "dtype") else np.array(array)
