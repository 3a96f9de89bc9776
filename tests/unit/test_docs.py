"""What the documentation states is what the code has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import tparmpi
from tests import operators_page
from tparmpi.tensors import Operator
from tparmpi.train.config import CONTENT, FREE, KEYS, SAME, SECTIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
AT_RESUME = {SAME: "the same", FREE: "free", CONTENT: "same text"}


def documented_keys() -> list[tuple[str, str, str, str]]:
    """Return the rows of the configuration page: name, default, meaning, resume."""
    rows = []
    section = ""
    for line in (ROOT / "docs" / "configuration.md").read_text().splitlines():
        heading = re.fullmatch(r"### `\[(\w+)\]`", line)
        section = heading[1] if heading else section
        row = re.fullmatch(r"\| `(\w+)` \| (.*) \| (.*) \| (.*) \|", line)
        if row:
            rows.append((f"{section}.{row[1]}", row[2], row[3], row[4]))
    return rows


def test_configuration_page_lists_every_key() -> None:
    expected = [
        (
            key.name,
            "" if key.default is None else f"`{json.dumps(key.default)}`",
            key.about,
            AT_RESUME[key.resume],
        )
        for key in KEYS.values()
    ]
    assert documented_keys() == expected
    assert {name.split(".")[0] for name, *_ in documented_keys()} == set(SECTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [name for name in targets if not (page.parent / name).exists()] == []


def test_ci_runs_the_readme_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r'grep -E "(.+)" README\.md', script)
    assert pattern
    found = subprocess.run(
        ["grep", "-E", pattern[1], ROOT / "README.md"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.splitlines()
    assert len(found) == 1
    assert found[0].startswith("python3 -m venv .venv && ")


def test_reference_page_names_every_record() -> None:
    # Records are no functions, so the page must name them.
    page = (ROOT / "docs" / "api.md").read_text()
    records = {
        name for name in tparmpi.__all__ if isinstance(getattr(tparmpi, name), Operator)
    }
    named = re.findall(r"autofunction:: tparmpi\.(\w+)\(", page)
    assert set(named) == records


def test_operators_page_is_up_to_date() -> None:
    written = operators_page.PAGE.read_text()
    assert written == operators_page.text(), "run python -m tests.operators_page"
