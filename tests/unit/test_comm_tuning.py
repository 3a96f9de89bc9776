"""The tuning table: written once, read by later runs, refused where it is broken."""

from __future__ import annotations

import json

import pytest

from tparmpi.comm import tuning
from tparmpi.comm.tuning import Way
from tparmpi.config import Environment, environment
from tparmpi.errors import UsageError

PAIR = Way(2, 1, 65536, 2**20)
FOUR = Way(4, 1, 4096, 2**19)


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "tables" / "tuning.json"
    use(monkeypatch, str(path))
    return path


def use(monkeypatch, value):
    monkeypatch.setattr(tuning, "environment", lambda: Environment(tuning=value))


def test_what_is_written_is_read_for_that_library_only(table):
    assert tuning.read("MPICH 5.0.2") == ()
    assert tuning.write("MPICH 5.0.2", [PAIR, FOUR]) == table
    assert tuning.write("Open MPI 5.0.8", [FOUR]) == table
    newer = Way(2, 1, 1, 2)
    tuning.write("MPICH 5.0.2", [newer])
    assert tuning.read("MPICH 5.0.2") == (newer, FOUR)
    assert tuning.read("Open MPI 5.0.8") == (FOUR,)
    assert tuning.read("another") == ()
    assert [path.name for path in table.parent.iterdir()] == [table.name]


def test_the_nearest_size_is_chosen():
    ways = (PAIR, FOUR)
    assert tuning.choose(ways, 2, 1) is PAIR
    assert tuning.choose(ways, 3, 1) is PAIR
    assert tuning.choose(ways, 64, 1) is FOUR
    assert tuning.choose(ways, 2, 2) is None
    assert tuning.choose((), 2, 1) is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"L": [{"members": 2}]}',
        '{"L": [{"members": 2, "nodes": 1, "whole_bytes": 1.5, "piece_bytes": 1}]}',
        '{"L": [{"members": 2, "nodes": 1, "whole_bytes": 0, "piece_bytes": 0}]}',
        '{"L": 3}',
    ],
)
def test_a_broken_table_is_not_used(table, text):
    table.parent.mkdir()
    table.write_text(text)
    with pytest.warns(UserWarning, match="is not used"):
        assert tuning.read("L") == ()


def test_no_table(monkeypatch):
    use(monkeypatch, "0")
    assert tuning.path() is None
    assert tuning.read("L") == ()
    with pytest.raises(UsageError, match="TPARMPI_TUNING"):
        tuning.write("L", [PAIR])


def test_the_users_cache_is_the_default(monkeypatch, tmp_path):
    use(monkeypatch, None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tuning.write("L", [PAIR])
    assert file == tmp_path / "tparmpi" / "tuning.json"
    assert json.loads(file.read_text())["L"][0]["piece_bytes"] == 2**20
    assert Environment.read({"TPARMPI_TUNING": "x"}).tuning == "x"
    assert environment().tuning != "x"
