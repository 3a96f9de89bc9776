from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tparmpi.errors import DataError
from tparmpi.io.text import (
    HELD_OUT_PERIOD,
    TextData,
    Windows,
    hold_out,
    permuted,
)
from tparmpi.io.text_files import read_text, text_files


def unique(count):
    """Bytes among which every window of 4 is different (up to 2**24 of them)."""
    return np.arange(count, dtype=">u4").view(np.uint8)[: 4 * count]


@given(st.integers(1, 3000), st.integers(0, 1 << 63))
def test_the_order_of_an_epoch_is_a_permutation(count, key):
    keys = np.array([key, key + 1, 7, 11, 13, 17], np.uint64)
    order = permuted(np.arange(count, dtype=np.uint64), count, keys)
    assert sorted(order.tolist()) == list(range(count))


def test_every_epoch_covers_almost_all_text_once_in_its_own_order():
    windows = Windows(unique(1000), 16)
    count = len(windows)
    assert count == (4000 - 16) // 16
    starts = [windows._starts(5, epoch, 0, count) for epoch in range(3)]
    for order in starts:
        assert len(set(order.tolist())) == count
        assert len(set((order % 16).tolist())) == 1
        assert order.max() + 17 <= 4000
    assert not np.array_equal(starts[0] // 16, starts[1] // 16)
    assert (np.diff(starts[0]) != 16).mean() > 0.9


def test_a_sample_depends_on_seed_and_number_alone():
    windows = Windows(unique(500), 8)
    first = windows.batch(3, 0, 3 * len(windows))
    assert first.shape == (3 * len(windows), 9)
    assert first.dtype == np.uint8
    for number in (0, 1, len(windows) - 1, len(windows), 2 * len(windows) + 5):
        assert np.array_equal(windows.batch(3, number, 1)[0], first[number])
    assert not np.array_equal(windows.batch(4, 0, 50), first[:50])
    assert windows.batch(3, 7, 0).shape == (0, 9)
    with pytest.raises(DataError, match="negative"):
        windows.batch(3, -1, 1)


def test_the_order_is_the_same_for_ever():
    # A changed order would silently make resumed runs repeat and miss text.
    starts = Windows(unique(500), 8)._starts(1234, 2, 10, 4)
    assert starts.tolist() == [722, 1946, 1362, 1890]


@pytest.mark.parametrize("length", [9, 10, 15, 16, 17, 18, 24, 25, 26])
def test_windows_of_a_short_text_stay_inside_it(length):
    windows = Windows(np.arange(length, dtype=np.uint8), 8)
    samples = windows.batch(0, 0, 40)
    assert samples.shape == (40, 9)
    assert (np.diff(samples.astype(int), axis=1) == 1).all()
    assert windows.take(np.arange(len(windows))).shape == (len(windows), 9)


def test_a_text_shorter_than_a_sample_is_refused():
    with pytest.raises(DataError, match=r"8 bytes, one sample needs 9 .*smaller"):
        Windows(np.zeros(8, np.uint8), 8)
    with pytest.raises(DataError, match="has 1 byte, one sample needs 2"):
        Windows(np.zeros(1, np.uint8), 1)


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.01])
@pytest.mark.parametrize("length", [1000, HELD_OUT_PERIOD * 3 + 17])
def test_the_held_out_part_is_spread_and_nothing_is_lost(length, fraction):
    text = np.arange(length, dtype=np.uint32)
    train, held = hold_out(text, fraction)
    assert np.array_equal(np.sort(np.concatenate([train, held])), text)
    assert abs(len(held) - fraction * length) <= 4
    periods = max(1, length // HELD_OUT_PERIOD)
    assert (np.diff(held.astype(int)) != 1).sum() == periods - 1


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 7])
def test_a_held_out_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(DataError, match="between 0 and 1"):
        hold_out(np.zeros(100, np.uint8), fraction)


def test_a_folder_gives_its_text_files_in_a_fixed_order(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", ".git/config", "a/.hidden", "a.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\0\0")
    names = [str(p.relative_to(tmp_path)) for p in text_files(tmp_path)]
    assert names == ["a/b/c.txt", "a/z.txt", "a.txt", "b.txt"]
    text = bytes(read_text(tmp_path))
    assert text == b"a/b/c.txt\na/z.txt\na.txt\nb.txt\n"


def test_a_glob_and_a_file_with_glob_characters(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "[x].txt"):
        (tmp_path / name).write_text(name)
    names = [p.name for p in text_files(str(tmp_path / "*.txt"))]
    assert names == ["[x].txt", "a.txt", "b.txt"]
    assert [p.name for p in text_files(tmp_path / "[x].txt")] == ["[x].txt"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nothing.txt", "there is no file or folder /.*/nothing.txt; give"),
        ("*.nothing", r"no file matches /.*/\*.nothing; .* current directory"),
        (".", "the folder /.* holds no text file"),
        ("empty.txt", "^/.*/empty.txt is empty; give a text"),
        ("*.txt", r"^/.*/\*.txt is empty, all 2 files of it"),
    ],
)
def test_missing_text_is_named(tmp_path, monkeypatch, source, words):
    monkeypatch.chdir(tmp_path)
    if source.endswith(".txt"):
        (tmp_path / "empty.txt").touch()
        (tmp_path / "void.txt").touch()
    with pytest.raises(DataError, match=words):
        read_text(source)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")
    monkeypatch.setattr(
        "pathlib.Path.read_bytes",
        lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
    )
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
        read_text(path)


def test_a_text_that_memory_does_not_hold_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")
    monkeypatch.setattr(
        "pathlib.Path.read_bytes", lambda self: (_ for _ in ()).throw(MemoryError)
    )
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: out of memory"):
        read_text(path)


def test_stdlib_is_python_source_without_tests():
    files = text_files("stdlib")
    assert len(files) > 100
    assert all(path.suffix == ".py" for path in files)
    folders = {part for path in files for part in path.parts}
    assert not folders & {"site-packages", "dist-packages", "test", "__pycache__"}
    assert files == sorted(files, key=lambda path: path.parts)


def test_text_data_holds_out_a_part_by_default(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(unique(2500).tobytes())
    data = TextData(path, 16)
    assert len(data.train.tokens) == 9501
    assert len(data.validation.tokens) == 500
    assert data.batch(1, 3, 5).shape == (5, 17)
    assert data.digest == TextData(str(path), 16, 0.05).digest
    assert data.digest != TextData(path, 16, 0.1).digest


def test_validation_batches_cover_each_window_once(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(unique(2500).tobytes())
    (tmp_path / "other").write_bytes(unique(50).tobytes())
    data = TextData(path, 16, tmp_path / "other")
    assert len(data.train.tokens) == 10001
    count = len(data.validation)
    assert count == (201 - 16) // 16
    batches = list(data.validation_batches(4))
    assert [len(batch) for batch in batches] == [4, 4, 3]
    joined = np.concatenate(batches)
    assert np.array_equal(joined[:, :-1].reshape(-1), data.validation.tokens[: 16 * 11])
    few = list(data.validation_batches(2, max_batches=2))
    assert [len(batch) for batch in few] == [2, 2]
    assert np.array_equal(np.concatenate(few), joined[[0, 2, 5, 8]])


def test_text_data_names_what_is_too_short(tmp_path):
    path = tmp_path / "short"
    path.write_text("x" * 200)
    held = r"/short held out .*\(5 % of 200 bytes\) has 10 bytes, one sample needs 65"
    with pytest.raises(DataError, match=held):
        TextData(path, 64)
    with pytest.raises(DataError, match=r"what is left of .*/short .* has 20 bytes"):
        TextData(path, 64, 0.9)
    with pytest.raises(DataError, match="/short has 200 bytes, one sample needs 257"):
        TextData(path, 256)
    (tmp_path / "one").write_text("x")
    with pytest.raises(DataError, match=r"the validation text .*/one has 1 byte, one"):
        TextData(path, 64, tmp_path / "one")
    with pytest.raises(DataError, match="at least 1 token"):
        TextData(path, 0)


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if name.endswith("/.keep") else path.write_text(name)


STARTED = {
    "killed before its configuration": ("lock", "checkpoints/.keep"),
    "killed before its metrics": ("config.toml", "lock", "checkpoints/.keep"),
    "running": ("config.toml", "metrics.jsonl", "lock", "checkpoints/step-1/index.h5"),
    "ended": (
        "config.toml",
        "metrics.jsonl",
        "checkpoints/step-1/index.h5",
        "plot.svg",
    ),
    "without checkpoints": ("config.toml", "metrics.jsonl"),
}


@pytest.mark.parametrize("state", STARTED)
@pytest.mark.parametrize("run", ["runs/default", "run", "."])
def test_a_run_inside_its_data_folder_does_not_change_the_text(
    tmp_path, monkeypatch, state, run
):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "a.txt", "runs/notes.txt", "x/config.toml", "x/lock", "z/b.txt")
    (tmp_path / "z/checkpoints").mkdir()
    sources = (".", tmp_path, "**/*", f"{tmp_path}/**/*", "[arxz]*/**/*.t*")
    before = [text_files(source) for source in sources]
    assert [len(files) for files in before] == [5, 5, 5, 5, 3]
    names = [name for name in STARTED[state] if run != "." or name != "plot.svg"]
    make(tmp_path / run, *names)
    assert [text_files(source) for source in sources] == before
    if run != ".":
        inner = text_files(tmp_path / run / names[0])
        assert inner == [tmp_path / run / names[0]]
        with pytest.raises(DataError, match="files in run folders do not count"):
            text_files("r*/config*")


def test_a_folder_of_runs_alone_holds_no_text(tmp_path):
    make(tmp_path / "a", "config.toml", "metrics.jsonl", "checkpoints/.keep")
    with pytest.raises(DataError, match="hidden and binary ones and run folders"):
        text_files(tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "the path of the text is empty; give"),
        ("~nosuchuser/x", "cannot find the home folder that ~nosuchuser/x begins with"),
        ("a\udcff", r"^the path a\\udcff has bytes that are no UTF-8.* another name"),
        ("a\0b", "there is no file or folder|embedded null"),
        ("*\0b", "no file matches|embedded null"),
        ("x" * 300, r"cannot look for text in /.*: File name too long"),
        (b"a", "must be a text or a Path, it is b'a'"),
        (None, "must be a text or a Path, it is None"),
        (5, "must be a text or a Path, it is 5"),
    ],
)
def test_what_cannot_be_a_path_of_text_is_refused_in_a_sentence(source, words):
    with pytest.raises(DataError, match=words) as caught:
        TextData(source, 16)
    str(caught.value).encode()


def test_a_file_of_an_undecodable_name_is_text_and_is_named_readably(
    tmp_path, monkeypatch
):
    (tmp_path / os.fsdecode(b"a\xff.txt")).write_text("text")
    assert bytes(read_text(tmp_path)) == b"text\n"
    monkeypatch.setattr(
        "pathlib.Path.read_bytes",
        lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
    )
    with pytest.raises(DataError, match=r"cannot read /.*/a\\udcff\.txt: Permission"):
        read_text(tmp_path)


def test_a_folder_that_may_not_be_seen_is_told(tmp_path, monkeypatch):
    def refused(self, *args, **keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_file", refused)
    with pytest.raises(DataError, match=r"cannot look for text in .*: Permission"):
        text_files(tmp_path / "a")
