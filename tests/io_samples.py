"""Checkpoints written without ranks, for tests of the files themselves."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tparmpi.io import format as fmt
from tparmpi.io.planner import Block, Box, TensorDescription, make_plan
from tparmpi.io.writer import Header, Shard, write_data_file, write_index

SAVE_ID = "0123456789abcdef"


def unique(shape, dtype, start=0):
    """An array in which each element differs from its neighbours in every dim."""
    count = int(np.prod(shape))
    values = (np.arange(count, dtype=np.int64) * 7 + start) % 251
    return values.astype(dtype).reshape(shape)


def samples() -> dict[str, np.ndarray]:
    """One array of each dtype, and the shapes that are easily got wrong."""
    arrays = {
        f"model/kinds/{name}": unique((5, 3), fmt.dtypes.dtype(name))
        for name in sorted(fmt.DTYPES)
    }
    arrays["model/scalar"] = np.array(2.5, np.float32)
    arrays["model/bf16_scalar"] = np.array(1.5, ml_dtypes.bfloat16)
    arrays["model/empty"] = np.empty((0, 3), np.float64)
    arrays["model/one"] = unique((1,), np.float32)
    arrays["model/deep"] = unique((3, 1, 4, 2), np.float32)
    payload = np.array([0x7FC00001, 0xFFC0BEEF, 0x80000000, 0x7F800000], np.uint32)
    arrays["optimizer/nan/m"] = payload.view(np.float32)
    return arrays


@st.composite
def parts(draw, shape) -> Box:
    """A part, not empty, of a tensor of this shape."""
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = (draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return Box(offset, tuple(extent))


def halves(name: str, array: np.ndarray) -> TensorDescription:
    """Describe an array as split in two along its first dim, writers 0 and 1."""
    shape, dtype = array.shape, array.dtype.name
    if not array.ndim or shape[0] < 2:
        whole = Box((0,) * array.ndim, shape)
        blocks = [Block(whole, (0, 1))] if array.size else []
    else:
        cut, rest = shape[0] // 2, (0,) * (array.ndim - 1)
        first = Box((0, *rest), (cut, *shape[1:]))
        second = Box((cut, *rest), (shape[0] - cut, *shape[1:]))
        blocks = [Block(first, (0,)), Block(second, (1,))]
    return TensorDescription(name, shape, dtype, array.itemsize, tuple(blocks))


def write(
    folder: Path,
    arrays: dict[str, np.ndarray],
    save_id: str = SAVE_ID,
    *,
    level: int = 0,
    **header,
) -> Path:
    """Write arrays as a checkpoint of two data files, compressed by `level`."""
    folder.mkdir()
    tensors = {name: halves(name, array) for name, array in arrays.items()}
    plan = make_plan(tensors.values())
    checksums: dict[str, dict[int, np.ndarray]] = {name: {} for name in arrays}
    for writer in (0, 1):
        shards = [
            Shard(
                name,
                arrays[name].dtype.name,
                piece.box.shape,
                lambda a=arrays[name], b=piece.box: a[(*b.slices(), ...)],
                level=level,
            )
            for name, pieces in plan.items()
            for piece in pieces
            if piece.writer == writer
        ]
        path = folder / fmt.data_name(save_id, writer)
        for name, found in write_data_file(path, save_id, shards).items():
            checksums[name][writer] = found
    header = Header(save_id, **{"step": 7, **header})
    write_index(folder / fmt.INDEX_NAME, header, tensors, plan, checksums)
    return folder
