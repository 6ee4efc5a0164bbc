"""One name for one thing: public classes and files of two rooms are not called alike, and modules
do not import each other in circles."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.pages import ROOT

SOURCE = ROOT / "src"

# File names that two rooms have, and why.
SHARED_FILES = {
    "call": "launch/api/call.py is run by its name in workers of every version",
    "store": "a command, a public class, and PyTorch's",
}


@functools.cache
def modules() -> dict[str, Path]:
    """The files, by the names of their modules."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (SOURCE / "rallypoint").rglob("*.py")
    }


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_public_classes_have_names_of_their_own() -> None:
    homes = defaultdict(list)
    for name, path in modules().items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert len(homes) > 500
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_files_have_names_of_their_own() -> None:
    rooms = defaultdict(set)
    for path in modules().values():
        if path.stem not in ("__init__", "__main__"):
            rooms[path.stem].add(path.parent.relative_to(SOURCE).as_posix())
    shared = {name for name, where in rooms.items() if len(where) > 1}
    assert shared == SHARED_FILES.keys()


def imports(path: Path) -> set[str]:
    """The modules that it imports anywhere, also only for types."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules().keys()


def test_modules_import_in_no_circles() -> None:
    graph = {name: imports(path) - {name} for name, path in modules().items()}
    # A package that loads its public names on first use is imported by what it loads.
    graph = {name: needed - packages() for name, needed in graph.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def packages() -> set[str]:
    return {name for name, path in modules().items() if path.name == "__init__.py"}
