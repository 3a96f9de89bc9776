"""Imports go down only: the order of the packages, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the top down; those in one set are siblings and never import each other.
LAYERS: tuple[set[str], ...] = (
    {"cli", "testing"},
    {"train"},
    {"models"},
    {"io", "optim", "parallel"},
    {"nn"},
    {"ops"},
    {"tensors"},
    {"comm"},
    {"sharding", "backend"},
    # A bad value in the environment is refused with one of the errors.
    {"config"},
    {"errors"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# Which rooms may import a library that does more than compute.
OWNERS = {
    "mpi4py": {"comm", "cli"},
    "cupy": {"backend"},
    "cupyx": {"backend"},
    "h5py": {"io"},
}


def sources() -> list[Path]:
    """Return the package's modules."""
    return sorted((ROOT / "tparmpi").rglob("*.py"))


def module_name(path: Path) -> list[str]:
    """Return the dotted name of a module's file, in parts."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def room_of(parts: list[str]) -> str:
    """Return the package directly below tparmpi; "" for tparmpi itself."""
    return parts[1] if len(parts) > 1 else ""


def is_typing_only(test: ast.expr) -> bool:
    """Say whether an `if` has TYPE_CHECKING as its condition."""
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk all nodes but those below `if TYPE_CHECKING:`, which never run."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If) and is_typing_only(node.test):
            for other in node.orelse:
                yield other
                yield from running_nodes(other)
        else:
            yield from running_nodes(node)


def imports(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Find all that a module imports, inside functions too: (line, dotted parts)."""
    package = module_name(path)
    if path.name != "__init__.py":
        package = package[:-1]
    for node in running_nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = above + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, [*base, alias.name]


def complaints(path: Path, text: str) -> list[str]:
    """Name the imports of one module that the layers forbid."""
    room = room_of(module_name(path))
    found = []
    for line, parts in imports(path, text):
        where = f"{path.relative_to(ROOT)}:{line}"
        name = ".".join(parts)
        if parts[0] in OWNERS and room not in OWNERS[parts[0]]:
            found.append(f"{where}: only {sorted(OWNERS[parts[0]])} import {name}")
        if name.startswith("cupyx.distributed"):
            found.append(f"{where}: {name} starts MPI")
        if parts[0] != "tparmpi" or room not in LEVEL:
            continue
        target = room_of(parts)
        if target in LEVEL:
            if target != room and LEVEL[target] <= LEVEL[room]:
                found.append(f"{where}: {room} imports {name}, which is not below it")
        # The package's own names are for users: whatever is under them is above most.
        elif LEVEL[room] > LEVEL["train"] and target != "__version__":
            found.append(f"{where}: {room} imports {name} from the package itself")
    return found


@pytest.mark.parametrize(
    "path", sources(), ids=lambda path: str(path.relative_to(ROOT / "tparmpi"))
)
def test_imports_go_down(path: Path) -> None:
    assert complaints(path, path.read_text(encoding="utf-8")) == []


def test_every_room_has_a_layer() -> None:
    rooms = {room_of(module_name(path)) for path in sources()}
    assert rooms - {"", "__main__"} <= set(LEVEL)


@pytest.mark.parametrize(
    ("room", "text", "count"),
    [
        ("nn", "from tparmpi.models import GPT", 1),
        ("nn", "import tparmpi.models.gpt", 1),
        ("nn", "def f():\n    from tparmpi import train", 1),
        ("nn", "from ..models import gpt", 1),
        ("nn", "from .. import models", 1),
        ("nn", "from . import init", 0),
        ("nn", "from tparmpi.tensors import Tensor", 0),
        ("nn", "import tparmpi as tpm", 1),
        ("nn", "from tparmpi import Shard", 1),
        ("train", "import tparmpi as tpm", 0),
        ("io", "from tparmpi.optim import AdamW", 1),
        ("sharding", "import tparmpi.backend", 1),
        ("errors", "from tparmpi import config", 1),
        ("nn", "from mpi4py import MPI", 1),
        ("comm", "from mpi4py import MPI", 0),
        ("comm", "import cupy", 1),
        ("backend", "import cupyx.distributed", 1),
        ("train", "import h5py", 1),
        (
            "comm",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from tparmpi.nn import Module",
            0,
        ),
    ],
)
def test_the_walk_sees_what_it_should(room: str, text: str, count: int) -> None:
    path = ROOT / "tparmpi" / room / "module.py"
    assert len(complaints(path, text)) == count
