"""Small Python objects as messages: a frame of fixed size, and a body for the rest."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

# Long enough for a shape, a dtype or a sentence, so that most objects need one message.
FRAME_BYTES = 256
_LENGTH_BYTES = 8
_ROOM = FRAME_BYTES - _LENGTH_BYTES


def pack(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (frame, body) of an object; the body is empty if it fits the frame."""
    data = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
    frame = np.zeros(FRAME_BYTES, np.uint8)
    frame[:_LENGTH_BYTES].view(np.int64)[0] = data.size
    head = data[:_ROOM]
    frame[_LENGTH_BYTES : _LENGTH_BYTES + head.size] = head
    return frame, data[_ROOM:]


def body_for(frame: np.ndarray) -> np.ndarray:
    """Return an uninitialised body of the size that `frame` announces."""
    length = int(frame[:_LENGTH_BYTES].view(np.int64)[0])
    return np.empty(max(0, length - _ROOM), np.uint8)


def unpack(frame: np.ndarray, body: np.ndarray) -> Any:
    """Return the object of a received frame and body.

    Only ever given what another rank of this very program has packed.
    """
    length = int(frame[:_LENGTH_BYTES].view(np.int64)[0])
    head = frame[_LENGTH_BYTES : _LENGTH_BYTES + min(length, _ROOM)]
    return pickle.loads(head.tobytes() + body.tobytes())
