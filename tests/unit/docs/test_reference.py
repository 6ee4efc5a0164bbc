"""The reference is complete: variables, errors and public names are those of the source."""

from __future__ import annotations

import ast
import re
from types import ModuleType

import pytest
from tests.pages import ROOT

import rallypoint
import rallypoint.elastic
import rallypoint.launch
import rallypoint.pytorch
import rallypoint.rendezvous
from rallypoint.base import errors
from rallypoint.base.errors import RallypointError
from rallypoint.cli.flags import RunOptions
from rallypoint.launch import ChildFailedError
from rallypoint.schedule.program import ProgramError

REFERENCE = ROOT / "docs" / "reference"
SOURCES = [
    *(ROOT / "src").rglob("*.py"),
    *(ROOT / "native").rglob("*.cc"),
    *(ROOT / "native").rglob("*.h"),
]
# As in environ["X"], environ.get("X", ...), getenv("X"); and a constant that is used so.
READ = re.compile(
    r"""(?:environ(?:ment)?(?:\.get\(|\.pop\(|\.setdefault\(|\[)|getenv\()["']([A-Z]\w+)["']"""
    r"""|^_?[A-Z_]+ = "([A-Z][A-Z0-9]+_[A-Z0-9_]+)"(?:$|  #)""",
    re.MULTILINE,
)
PREFIXED = re.compile(
    r"""["'](RALLYPOINT_[A-Z_]+|TORCH_[A-Z_]+|TORCHELASTIC_[A-Z_]+|\w+_SOCKET_IFNAME)\b"""
)
SYSTEM = {"PATH"}  # what every program reads


def variables_of_source() -> set[str]:
    found = set()
    for path in SOURCES:
        if "testing" in path.parts or "tests" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        found |= {name for pair in READ.findall(text) for name in pair if name}
        found |= set(PREFIXED.findall(text))
    return found - SYSTEM


def documented_variables() -> set[str]:
    text = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    return set(re.findall(r"`([A-Z]+(?:_[A-Z0-9]+)*_?\*?)(?:=[^`]*)?`", text))


def test_every_variable_of_the_source_is_documented() -> None:
    said = documented_variables()
    prefixes = tuple(name.rstrip("*") for name in said if name.endswith("*"))
    read = variables_of_source()
    assert len(read) > 40
    assert {name for name in read if name not in said and not name.startswith(prefixes)} == set()


def test_every_documented_variable_is_in_the_source() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    for name in documented_variables() - {"OFF", "INFO", "DETAIL", "MIN", "MAX"}:
        if name == "PET_NPROC_PER_NODE" or not name.startswith("PET_"):
            assert name.rstrip("*") in text, name


def test_every_flag_has_a_variable() -> None:
    assert RunOptions.flags["--max-restarts"].variable == "PET_MAX_RESTARTS"
    assert all(flag.variable.startswith("PET_") for flag in RunOptions.flags.values())


def error_classes() -> list[type[RallypointError]]:
    found = [each for each in vars(errors).values() if isinstance(each, type)]
    return [
        *(each for each in found if issubclass(each, RallypointError)),
        ProgramError,
        ChildFailedError,
    ]


def test_the_tree_of_errors() -> None:
    text = (REFERENCE / "exceptions.md").read_text(encoding="utf-8")
    tree = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert tree is not None
    shown: dict[str, str] = {}  # class -> what it stands below
    path: list[str] = []
    for line in tree[1].splitlines():
        found = re.match(r"([ │├└─]*)(\w+)( \*)?", line)
        assert found is not None
        path[len(found[1]) // 4 :] = [found[2]]
        shown[found[2]] = path[-2] if len(path) > 1 else "Exception"
        assert bool(found[3]) == (found[2] in rallypoint.__all__), line
    assert shown == {each.__name__: each.__mro__[1].__name__ for each in error_classes()}


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_has_a_row(error: type[RallypointError]) -> None:
    if error is RallypointError:
        return
    text = (REFERENCE / "exceptions.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{error.__name__}` \|([^|]*)\|[^|]+\|[^|]+\|$", text, re.MULTILINE)
    assert row is not None
    named = set(re.findall(r"`(\w+)`", row[1]))
    assert named == {each.__name__ for each in error.__bases__ if each.__module__ == "builtins"}


def public_names(module: ModuleType | str) -> list[str]:
    """`__all__` of a module; of one that cannot be imported without PyTorch, from its source."""
    if isinstance(module, ModuleType):
        return list(module.__all__)
    path = ROOT / "src" / module.replace(".", "/") / "__init__.py"
    listed = re.search(r"^__all__ = (\[.*?\])$", path.read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    return list(ast.literal_eval(listed[1]))


@pytest.mark.parametrize(
    ("module", "page"),
    [
        (rallypoint, "process-groups stores exceptions programs"),
        (rallypoint.launch, "launcher"),
        (rallypoint.rendezvous, "rendezvous exceptions"),
        (rallypoint.elastic, "in-place-recovery exceptions"),
        (rallypoint.pytorch, "pytorch"),
        ("rallypoint.pytorch.elastic", "pytorch"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_public_name_is_described(module: ModuleType | str, page: str) -> None:
    text = "".join((REFERENCE / f"{each}.md").read_text(encoding="utf-8") for each in page.split())
    described = set(re.findall(r"^::: [\w.]+\.(\w+)$|^\| `(\w+)` \|", text, re.MULTILINE))
    names = {name for pair in described for name in pair}
    public = {name for name in public_names(module) if not name.startswith("__")}
    assert public - names - {"RallypointError"} == set()
