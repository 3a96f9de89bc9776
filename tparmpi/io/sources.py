"""What tensors can be loaded from: a checkpoint or safetensors files. Local."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tparmpi.io import weights
from tparmpi.io.index import Index, read_index
from tparmpi.io.reader import BlockReader
from tparmpi.io.transforms import Renames, Transform, Views, arrange
from tparmpi.io.views import Stored

Source = Index | weights.Weights
SourceReader = BlockReader | weights.WeightsReader


def read_source(path: Path) -> Source:
    """Read and check what a path holds, without its elements.

    Raises
    ------
    CheckpointError
        It is neither a checkpoint nor safetensors files, or damaged.
    """
    if weights.is_weights(path):
        return weights.read_weights(path)
    return read_index(path)


def open_source(path: Path, source: Source) -> SourceReader:
    """A reader of the elements, a context manager."""
    if isinstance(source, Index):
        return BlockReader(path, source)
    return source.open(path)


def views_of(
    source: Source, transforms: Sequence[Transform] = (), remap: Renames = ()
) -> Views:
    """The tensors of a source by their paths, transformed and renamed. Pure.

    Raises
    ------
    CheckpointError
        As :func:`arrange`.
    """
    views: Views = {
        name: Stored(name, tensor.shape, tensor.dtype)
        for name, tensor in source.tensors.items()
    }
    if not transforms and not remap:
        return views
    return arrange(views, transforms, remap)
