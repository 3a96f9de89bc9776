"""Loading a checkpoint or other programs' weights into a model of any layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from tparmpi.comm import long_work, world
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io import pending, staging
from tparmpi.io.agreement import (
    on_all_ranks,
    on_rank_zero,
    rank_sentence,
    refuse_disagreement,
)
from tparmpi.io.planner import Box, TensorDescription, digest_of
from tparmpi.io.report import LoadReport, Wanted, compare, refuse_mismatch
from tparmpi.io.sources import (
    SourceReader,
    open_source,
    read_source,
    views_of,
)
from tparmpi.io.state import HasState, HasSteps, path_of, state_of
from tparmpi.io.transforms import Renames, Transform, Views
from tparmpi.io.views import Cast, Stored, View, parts
from tparmpi.tensors import Tensor

_POLICIES = ("exact", "cast")


def load(
    path: str | Path,
    model: HasState,
    optimizer: HasSteps | None = None,
    *,
    strict: bool = True,
    only: str | None = None,
    dtype: Literal["exact", "cast"] = "exact",
    transforms: Sequence[Transform] = (),
    remap: Renames = (),
) -> LoadReport:
    """Read a checkpoint or safetensors files into a model, whatever layout either has.

    Collective over all ranks. Each rank reads its own blocks only, twice: once for
    their checksums, and when every rank has found all that it needs whole, once more,
    straight into the model and the optimizer. No rank holds a second copy of its
    blocks; what cannot go straight takes at most ``TPARMPI_STAGING_MIB`` of memory.

    Names in `only`, `transforms` and `remap` are those of parameters, with dots:
    ``blocks.0.attn.q.weight``, and ``blocks.0.attn.q.weight.m`` for an optimizer's.

    Parameters
    ----------
    path : str or Path
        The checkpoint's folder; or a ``.safetensors`` file, a
        ``.safetensors.index.json``, or a folder that holds one of these.
    model : object with state_dict()
    optimizer : object with state_dict() and steps, optional
        Without it, the checkpoint's optimizer state is skipped.
    strict : bool, default True
        Whether tensors that one side lacks, or that differ in shape or dtype, are an
        error; else they are left as they are and the report names them.
    only : str, optional
        A regular expression: tensors whose names, as the model has them, do not match
        it whole are left as they are.
    dtype : {"exact", "cast"}
        Whether a tensor of another dtype is an error, or converted: floating types into
        each other, complex ones too, integers into those that hold all their values. A
        number beyond the range of the model's dtype is an error.
    transforms : sequence of Split, Merge, Transpose, Unflatten, Interleave or Drop
        Applied to the stored tensors in this order, before `remap`.
    remap : sequence of (str, str or callable)
        Regular expressions and what replaces them in stored names, one after the other,
        as in :func:`re.sub`.

    Returns
    -------
    LoadReport

    Raises
    ------
    CheckpointError
        On every rank; the model and the optimizer are as they were. (Unless a file
        changes between the two times; the error says so then.)
    """

    def prepare() -> tuple[Path, dict[str, Tensor], Wanted, Callable[[str], bool]]:
        named = state_of(model, optimizer)
        wanted = {
            name: (tensor.shape, fmt.supported_dtype(name, tensor.dtype))
            for name, tensor in named.items()
        }
        if dtype not in _POLICIES:
            raise CheckpointError(f"dtype must be 'exact' or 'cast', not {dtype!r}")
        return path_of(path), named, wanted, _chooser(only)

    pending.finish()
    path, named, wanted, chosen = on_all_ranks(f"load {path}", prepare)
    refuse_disagreement("load", world().all_gather_object(_digest(wanted)))
    source = on_rank_zero(f"load {path}", lambda: read_source(path))

    def match() -> tuple[Views, LoadReport]:
        views = views_of(source, transforms, remap)
        report = compare(
            path,
            source.header,
            views,
            wanted,
            with_optimizer=optimizer is not None,
            chosen=chosen,
            cast=dtype == "cast",
        )
        if strict:
            refuse_mismatch(report, views, wanted)
        return views, report

    views, report = on_all_ranks(f"load {path}", match)
    for name in report.applied:
        if views[name].dtype != wanted[name][1]:
            views[name] = Cast(views[name], wanted[name][1], name)
    with open_source(path, source) as reader:
        blocks = [(views[name], named[name]) for name in report.applied]
        read_blocks(path, reader, blocks)
    steps = source.header.optimizer_steps
    if optimizer is not None and steps is not None:
        optimizer.steps = steps
    return report


def _chooser(only: str | None) -> Callable[[str], bool]:
    if only is None:
        return lambda path: True
    try:
        pattern = re.compile(only)
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"only={only!r} is no regular expression: {error}"
        ) from error

    def chosen(path: str) -> bool:
        name = path.partition("/")[2].replace("/", ".")
        return pattern.fullmatch(name) is not None

    return chosen


def _digest(wanted: Wanted) -> str:
    descriptions = (
        TensorDescription(name, shape, dtype, fmt.itemsize(dtype), ())
        for name, (shape, dtype) in wanted.items()
    )
    return digest_of(descriptions)


def read_blocks(
    path: Path, reader: SourceReader, blocks: Sequence[tuple[View, Tensor]]
) -> None:
    """Read each tensor's block on this rank, when every rank has found its own whole.

    Collective over all ranks.

    Raises
    ------
    CheckpointError
        On every rank.
    """
    what = f"load {path}"
    own = [(view, tensor) for view, tensor in blocks if not tensor.is_shell]

    def check() -> None:
        with long_work(f"check {path}"):
            for view, tensor in own:
                _check(reader, view, tensor)

    def fill() -> None:
        with long_work(what):
            for view, tensor in own:
                try:
                    _fill(reader, view, tensor)
                except (CheckpointError, MemoryError) as error:
                    told = isinstance(error, CheckpointError)
                    raise CheckpointError(
                        f"{error if told else rank_sentence(what, error)}. It was "
                        "whole when the load began, and the model is overwritten in "
                        "part; load into it again"
                    ) from error

    on_all_ranks(what, check)
    on_all_ranks(what, fill)


def _check(reader: SourceReader, view: View, tensor: Tensor) -> None:
    """Find what is wrong with what this rank's block is read from."""
    box = own_box(tensor)
    if isinstance(view, Stored):
        reader.check(view.name, box)
        return
    for part in parts(view, box, _limit(view, tensor)):
        view.read(reader, part)


def _fill(reader: SourceReader, view: View, tensor: Tensor) -> None:
    """Read this rank's block into it."""
    box, target = own_box(tensor), tensor.room()
    on_host = isinstance(target, np.ndarray)
    if on_host and isinstance(view, Stored):
        reader.read_into(view.name, box, target)
    else:
        for part in parts(view, box, _limit(view, tensor)):
            values = view.read(reader, part)
            if not on_host:
                values = tensor.spec.place.backend.from_host(values)
            part.of(target, box.offset)[...] = values
    tensor.mark_written()


def own_box(tensor: Tensor) -> Box:
    """Where this rank's block of a tensor lies in it. Local."""
    spec = tensor.spec
    return Box(tuple(spec.local_offset), tuple(spec.local_shape))


def _limit(view: View, tensor: Tensor) -> int:
    """Elements to stage at a time: transforms hold up to four copies of them."""
    widest = max(fmt.itemsize(view.dtype), tensor.dtype.itemsize)
    return max(1, staging.limit() // 4 // widest)
