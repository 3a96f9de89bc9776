"""Small Python objects as messages: a frame of fixed size, and a body for the rest.

Arrays whose shape and dtype the receiver does not know are led by such a frame, which
holds the values too if they are few.
"""

from __future__ import annotations

import pickle
import struct
from functools import lru_cache
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Long enough for a shape, a dtype or a sentence, so that most objects need one message.
FRAME_BYTES = 256
# Bytes of the object, and of the values that follow it.
_LENGTHS = struct.Struct("<qq")
_ROOM = FRAME_BYTES - _LENGTHS.size
_HEADS = 1024
_NO_VALUES = -1
_NOTHING: Bytes = np.empty(0, np.uint8)


def pack(value: Any) -> tuple[Bytes, Bytes]:
    """Return (frame, body) of an object; the body is empty if it fits the frame."""
    return _framed(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), _NO_VALUES, b"")


def pack_array(data: Any) -> tuple[Bytes, Bytes, bool]:
    """Return (frame, body) of a C-contiguous array, and whether they hold its values.

    They always hold its shape and dtype, for `unpack_array`.
    """
    head = _head(data.shape, data.dtype)
    nbytes = data.nbytes
    if type(data) is np.ndarray and len(head) + nbytes <= _ROOM:
        return *_framed(head, nbytes, data.tobytes()), True
    return *_framed(head, _NO_VALUES, b""), False


def frame_for() -> Bytes:
    """Return an uninitialised frame, to receive into."""
    return np.empty(FRAME_BYTES, np.uint8)


def body_for(frame: Bytes) -> Bytes:
    """Return an uninitialised body of the size that `frame` announces."""
    length: int = _LENGTHS.unpack(frame[: _LENGTHS.size].tobytes())[0]
    return np.empty(length - _ROOM, np.uint8) if length > _ROOM else _NOTHING


def unpack(frame: Bytes, body: Bytes) -> Any:
    """Return the object of a received frame and body.

    Only ever given what another rank of this very program has packed.
    """
    return pickle.loads(_content(frame, body)[0])


def unpack_array(
    frame: Bytes, body: Bytes
) -> tuple[tuple[int, ...], np.dtype[Any], Any]:
    """Return (shape, dtype, values) of a packed array; its values may be None."""
    head, values = _content(frame, body)
    shape, dtype = _read_head(head)
    if values is None:
        return shape, dtype, None
    return shape, dtype, np.frombuffer(values, np.uint8).view(dtype).reshape(shape)


def _framed(content: bytes, count: int, values: bytes) -> tuple[Bytes, Bytes]:
    packed = _LENGTHS.pack(len(content), count) + content[:_ROOM] + values
    frame = np.frombuffer(packed.ljust(FRAME_BYTES, b"\0"), np.uint8)
    if len(content) <= _ROOM:
        return frame, _NOTHING
    return frame, np.frombuffer(content, np.uint8)[_ROOM:]


def _content(frame: Bytes, body: Bytes) -> tuple[bytes, bytes | None]:
    data = frame.tobytes()
    length, count = _LENGTHS.unpack_from(data)
    start = _LENGTHS.size
    if length > _ROOM:
        return data[start:] + body.tobytes(), None
    stop = start + length
    values = None if count == _NO_VALUES else data[stop : stop + count]
    return data[start:stop], values


@lru_cache(_HEADS)
def _head(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    return pickle.dumps((shape, dtype), pickle.HIGHEST_PROTOCOL)


@lru_cache(_HEADS)
def _read_head(head: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    shape, dtype = pickle.loads(head)
    return shape, dtype
