"""Raising one rank's error on all of them."""

from __future__ import annotations

from tparmpi.comm.collectives import Collectives
from tparmpi.errors import CommunicationError, TparmpiError


def agree(error: Exception | None, group: Collectives | None = None) -> None:
    """Raise the error of the lowest member that has one, on every member.

    Collective over `group`.

    Parameters
    ----------
    error
        This rank's error, None if all went well.
    group
        All ranks if None.

    Raises
    ------
    TparmpiError
        Of the type and text of the lowest member's error. An error of another type is
        raised as a `CommunicationError` that names the rank.
    """
    from tparmpi.comm.runtime import world

    members = world() if group is None else group
    said = None
    if isinstance(error, TparmpiError):
        said = (type(error), str(error))
    elif error is not None:
        rank = members.devices[members.rank].rank
        said = (CommunicationError, f"rank {rank}: {type(error).__name__}: {error}")
    for member, answer in enumerate(members.all_gather_object(said)):
        if answer is not None:
            kind, text = answer
            if member != members.rank:
                raise kind(text)
            raise error if isinstance(error, TparmpiError) else kind(text) from error
