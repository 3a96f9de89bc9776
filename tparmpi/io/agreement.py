"""Errors that all ranks raise alike while they save or load."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from tparmpi.comm import agree, long_work, world
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.untrusted import HDF5_ERRORS

Result = TypeVar("Result")


def refuse_disagreement(what: str, digests: list[str]) -> None:
    """Raise on all ranks if one has another digest of its tensors. Local."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"{what}: rank {others[0]} has other tensors (names, shapes, dtypes or "
            "layouts) than rank 0; every rank must build the whole model, as shells "
            "where it is no member"
        )


def on_all_ranks(what: str, work: Callable[[], Result]) -> Result:
    """Do local work on every rank; one that refuses makes all refuse.

    One that has no memory for it does, too. Collective over all ranks.
    """
    result: Result | None = None
    problem: CheckpointError | None = None
    try:
        result = work()
    except CheckpointError as error:
        problem = error
    except MemoryError as error:
        problem = CheckpointError(rank_sentence(what, error))
        problem.__cause__ = error
    agree(problem)
    return cast(Result, result)


def on_rank_zero(what: str, work: Callable[[], Result]) -> Result:
    """Do work on rank 0; give its result to all ranks, or raise its error on all.

    Also that it has no memory for it. Collective over all ranks.
    """
    everyone = world()
    result: Result | None = None
    problem: tuple[type[CheckpointError], str] | None = None
    cause: Exception | None = None
    if everyone.rank == 0:
        try:
            with long_work(what):
                result = work()
        except (CheckpointError, MemoryError, *HDF5_ERRORS) as error:
            told = error if isinstance(error, CheckpointError) else CheckpointError()
            problem, cause = (type(told), sentence(what, error)), error
    result, problem = everyone.broadcast_object((result, problem))
    if problem is not None:
        kind, text = problem
        raise kind(text) from cause
    return result


def sentence(what: str, error: BaseException) -> str:
    """What went wrong while `what` was done. Local."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"cannot {what}: {fmt.reason(error) or type(error).__name__}"


def rank_sentence(what: str, error: BaseException) -> str:
    """What went wrong, and on which rank: this one. Local."""
    return f"rank {world().rank}: {sentence(what, error)}"
