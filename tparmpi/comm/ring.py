"""A record of the latest calls of each rank, in a file that outlives the process.

The file is mapped into memory, so that an entry costs no system call, and is there for
others to read whatever becomes of the rank: the kernel keeps it when the process is
killed. It lies on the rank's own node, in memory where there is such a place, and is
removed by a clean exit.

Layout, in the machine's byte order: a header (see `_HEADER`), the latest `CALLS` calls
(see `_CALL`), and the texts that they refer to by number, one a line.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

from tparmpi.comm.ledger import call_site, current
from tparmpi.comm.recorded import CALLS, Recorded, RecordedCall, start_of

SUFFIX = ".ring"

_MAGIC = b"tparmpi ring 1\n\0"
# Magic, rank, number of ranks, process id, when that process started, and what to add
# to the monotonic clock to get the time of day.
_HEADER = struct.Struct("<16sqqqqd")
# Each word is written by one side only: rank or reader.
_WAITING, _ASKED, _ANSWERED, _BUSY = 64, 72, 80, 88
_REASON, _REASON_BYTES = 96, 160
_HEADER_BYTES = 256
# Entered and left in monotonic seconds, number in the ring, sequence number in its
# group, and the numbers of the texts for call, group, operator and source line.
_CALL = struct.Struct("<ddqqiiii")
_TEXTS = _HEADER_BYTES + CALLS * _CALL.size
_TEXT_BYTES = 48 * 1024
FILE_BYTES = _TEXTS + _TEXT_BYTES

_OPEN, _BROKEN = 0.0, -1.0
_LEFT_AT = _HEADER_BYTES + 8
_SITE_OFFSET = 44
_UNKNOWN, _NONE = 0, -1

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
# Frames between a call's method and its entry here. A source line is looked for in that
# and the next one when a call begins, and in all only when it has to wait.
_DEPTH = 4
_MEMORY = Path("/dev/shm")
_STALE_SECONDS = 86_400.0
_KEPT = 512

_enter = _CALL.pack_into
_moment = struct.Struct("<d")
_pack_moment = _moment.pack_into
_number = struct.Struct("<i")
_word = struct.Struct("<q")
_clock = time.monotonic
_frame = sys._getframe


class _Inside(dict[str, bool]):
    """Whether a source file is one of the package's."""

    def __missing__(self, name: str) -> bool:
        found = self[name] = name.startswith(_PACKAGE)
        return found


class _Texts(dict[str, int]):
    """The number of each text of a ring; a new one is written to its file."""

    def __init__(self, room: mmap.mmap) -> None:
        self._room = room
        self._stop = _TEXTS
        self._next = _UNKNOWN
        self["?"] = self._write("?")

    def __missing__(self, text: str) -> int:
        number = self[text] = self._write(text)
        return number

    def _write(self, text: str) -> int:
        line = text.replace("\n", " ").encode(errors="replace") + b"\n"
        start, stop = self._stop, self._stop + len(line)
        # The last byte stays 0: it ends the texts.
        if stop >= FILE_BYTES:
            return _UNKNOWN
        self._room[start:stop] = line
        self._stop = stop
        self._next += 1
        return self._next - 1


_inside = _Inside()


class Ring:
    """The latest calls of this rank.

    Parameters
    ----------
    path : Path or None
        The file; None keeps the record in this process's memory only.
    rank, size : int
        Which rank of how many.

    Attributes
    ----------
    path : Path or None
    waits : bool
        Whether the rank waits for others.
    epoch : int
        Number of its waits that took long enough to be noted.
    """

    def __init__(self, path: Path | None, rank: int = 0, size: int = 1) -> None:
        self.path = path
        self._map = _open(path)
        self.waits = False
        self.epoch = 0
        self._count = 0
        self._far = -1
        self._texts = _Texts(self._map)
        self._sites: dict[tuple[int, int], int] = {}
        # Their ids are keys, so they must live.
        self._codes: list[CodeType] = []
        offset = time.time() - _clock()
        pid = os.getpid()
        started = start_of(pid) or 0
        _HEADER.pack_into(self._map, 0, _MAGIC, rank, size, pid, started, offset)

    def text(self, text: str) -> int:
        """Return the number of a text. Local."""
        return self._texts[text]

    def enter(self, kind: str, place: int, sequence: int, depth: int = _DEPTH) -> int:
        """Record that a call begins; return its entry, for `leave`. Local.

        Called `depth` frames below the caller of the call's method.

        Parameters
        ----------
        kind
            Name of the call.
        place
            Number of the text that describes its group.
        sequence
            Its number in the group.
        depth
            Frames from this one up to that of the caller.
        """
        count = self._count
        self._count = count + 1
        position = _HEADER_BYTES + count % CALLS * 48
        frame = _frame(depth)
        site = self._sites.get((id(frame.f_code), frame.f_lasti))
        if site is None:
            site = self._site(frame, position)
        else:
            self._far = -1
        texts = self._texts
        number = texts[kind]
        operator = current.operator
        by = texts[operator] if operator else _NONE
        _enter(
            self._map,
            position,
            _clock(),
            _OPEN,
            count + 1,
            sequence,
            number,
            place,
            by,
            site,
        )
        return count

    def leave(self, entry: int) -> None:
        """Record that a call has ended. Local."""
        # Of a call that went on for long the entry may be another's by now.
        if self._count - entry <= CALLS:
            at = _LEFT_AT + entry % CALLS * 48
            _pack_moment(self._map, at, _clock())

    def break_off(self, entry: int) -> None:
        """Record that a call ended with an error. Local."""
        if self._count - entry <= CALLS:
            _pack_moment(self._map, _LEFT_AT + entry % CALLS * 48, _BROKEN)

    def wait(self) -> None:
        """Record that the rank waits from now on, and where. Local."""
        self.waits = True
        self.epoch += 1
        _pack_moment(self._map, _WAITING, _clock())
        if self._far >= 0:
            site = self._texts[call_site() or "?"]
            _number.pack_into(self._map, self._far + _SITE_OFFSET, site)
            self._far = -1

    def go_on(self) -> None:
        """Record that the rank waits no longer. Local."""
        if self.waits:
            self.waits = False
            _pack_moment(self._map, _WAITING, 0.0)

    def waiting_since(self) -> float:
        """Return since when the rank waits, in monotonic seconds; 0 if not. Local."""
        since: float = _moment.unpack_from(self._map, _WAITING)[0]
        return since

    def set_busy(self, reason: str | None) -> None:
        """Record that the rank does something long, or no longer. Local."""
        if reason is not None:
            text = reason.encode(errors="replace")[: _REASON_BYTES - 1]
            padded = text.ljust(_REASON_BYTES, b"\0")
            self._map[_REASON : _REASON + _REASON_BYTES] = padded
        _pack_moment(self._map, _BUSY, 0.0 if reason is None else _clock())

    def is_asked(self) -> bool:
        """Say whether somebody wants to know where this rank is. Local."""
        return bool(_word.unpack_from(self._map, _ASKED)[0])

    def answer(self) -> None:
        """Say that this rank has told where it is. Local."""
        _word.pack_into(self._map, _ANSWERED, 1)

    def read(self) -> Recorded:
        """Return the rank's record. Local."""
        return _parse(self._map[:])

    def _site(self, frame: FrameType, position: int) -> int:
        """Return the source line of this frame or the next, of the user's code."""
        if _inside[frame.f_code.co_filename] and frame.f_back is not None:
            frame = frame.f_back
        code = frame.f_code
        if _inside[code.co_filename]:
            self._far = position
            return _UNKNOWN
        self._far = -1
        key = id(code), frame.f_lasti
        site = self._sites.get(key)
        if site is None:
            self._codes.append(code)
            site = self._texts[f"{code.co_filename}:{frame.f_lineno}"]
            self._sites[key] = site
        return site


def read(path: Path) -> Recorded | None:
    """Return what a rank's file says, None if it is none. Local."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    whole = len(data) == FILE_BYTES and data.startswith(_MAGIC)
    return _parse(data) if whole else None


def read_process(path: Path) -> tuple[int, int] | None:
    """Return the process id and start of a file's rank, None if it is none. Local."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError:
        return None
    whole = len(head) == _HEADER.size and head.startswith(_MAGIC)
    return _HEADER.unpack(head)[3:5] if whole else None


def ask(path: Path) -> None:
    """Ask the rank of a file to tell where it is. Local."""
    with path.open("r+b") as file:
        file.seek(_ASKED)
        file.write(_word.pack(1))


def stacks_of(path: Path) -> Path:
    """Return where a rank's stacks are written if its threads cannot run. Local."""
    return path.with_suffix(".stacks")


def folder() -> Path | None:
    """Return the user's folder for such files on this node, None if none. Local.

    Removes old files, and the oldest of many, whose ranks are gone.
    """
    # Loads the modules of compression, which a mere import of the package is spared.
    from tempfile import gettempdir

    for parent in (_MEMORY, Path(gettempdir())):
        path = parent / f"tparmpi-{os.getuid()}"
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
        except OSError:
            continue
        # Somebody else's folder, or a link to one, is not to be written to.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            _remove_stale(path)
            return path
    return None


def create(name: str, rank: int, size: int) -> Ring:
    """Return a new ring with a file of this name where there can be one. Local."""
    if parent := folder():
        try:
            return Ring(parent / name, rank, size)
        except OSError:
            (parent / name).unlink(missing_ok=True)
    return Ring(None, rank, size)


def _open(path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, FILE_BYTES)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        # Writing to a page that a full disk has no room for would kill the process.
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        return mmap.mmap(descriptor, FILE_BYTES)
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    ages: dict[Path, float] = {}
    for path in parent.glob(f"*{SUFFIX}"):
        # Another rank may be quicker.
        with contextlib.suppress(FileNotFoundError):
            ages[path] = time.time() - path.stat().st_mtime
    for number, path in enumerate(sorted(ages, key=ages.__getitem__)):
        if number < _KEPT and ages[path] < _STALE_SECONDS:
            continue
        # A mapped file's time does not tell when it was last written to.
        found = read_process(path)
        if found is None or start_of(found[0]) != found[1]:
            job = path.name.partition("-")[0]
            for left in (path, stacks_of(path), *parent.glob(f"{job}-*.claim")):
                left.unlink(missing_ok=True)


def _text(texts: Sequence[str], number: int) -> str:
    if number == _NONE:
        return ""
    # A number beyond the end belongs to a text that is being written.
    return texts[number] if 0 <= number < len(texts) else "?"


def _parse(data: bytes) -> Recorded:
    _, rank, size, pid, started, offset = _HEADER.unpack_from(data)
    texts = data[_TEXTS:].partition(b"\0")[0].decode(errors="replace").split("\n")
    calls = []
    for slot in range(CALLS):
        entry = _CALL.unpack_from(data, _HEADER_BYTES + slot * _CALL.size)
        entered, left, number, sequence, *numbers = entry
        words = [_text(texts, n) for n in numbers]
        if number:
            failed = left == _BROKEN
            seconds = None if left <= 0 else left - entered
            call = RecordedCall(entered, seconds, failed, number, sequence, *words)
            calls.append(call)
    calls.sort(key=lambda call: call.number)
    reason = data[_REASON : _REASON + _REASON_BYTES].partition(b"\0")[0]
    return Recorded(
        rank,
        size,
        pid,
        started,
        offset,
        _moment.unpack_from(data, _WAITING)[0],
        _moment.unpack_from(data, _BUSY)[0],
        reason.decode(errors="replace"),
        bool(_word.unpack_from(data, _ASKED)[0]),
        bool(_word.unpack_from(data, _ANSWERED)[0]),
        tuple(calls),
    )


recorder = Ring(None)
"""This rank's; `start` gives it a file."""
