"""Prints all that users' programs and scripts may depend on, a name in each line, sorted by kind.

    scripts/public_surface.py > tests/public_surface.txt

A line that changes or goes is a change for users: it belongs into CHANGELOG.md. Signatures are read
from the installed package; variables, fields of events and of `--json` from the source.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import tomllib
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import get_origin

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/rallypoint"
PACKAGES = ("rallypoint", "rallypoint.elastic", "rallypoint.launch", "rallypoint.rendezvous")
WITH_TORCH = ("rallypoint.pytorch", "rallypoint.pytorch.elastic")  # only names: torch may be absent
# Objects of these packages are pickled, or their paths written by programs.
KEPT_PATHS = ("rallypoint.launch", "rallypoint.base.errors", "rallypoint.engine.communicator")
# Classes that are no part of it: what they define counts as their subclasses' own.
SHARED_CODE = ("LocalStore", "EphemeralStore")
# What writes fields for programs: dictionaries in functions, and records.
FIELDS = {
    "explain --json": "diagnosis/explanation.py Explanation.to_json",
    "ps --json": "cli/ps.py _row",
    "ps --all --json": "cli/ps.py _ended_row",
    "stacks --json": "cli/stacks.py _print_stacks",
    "top --json": "diagnosis/job_view.py JobView RankView NodeView",
    "top --json, an event": "base/job_so_far.py JobEvent",
    "doctor --json": "doctor/checks/__init__.py DoctorReport ReportedFinding ReportedCheck",
    "event network": "cluster/interface_choice.py NetworkChoice.event",
    "event went_on": "launch/agent/in_place_recovery.py Recovery",
    "event summary": "launch/agent/in_place_recovery.py Recoveries.summary",
    "event operations": "launch/output/flight_report.py FlightRecords.events",
    "event hang": "launch/agent/complaints.py Hang.event",
}


def names_of_packages() -> Iterator[str]:
    """Each public name, with its signature and that of its methods."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            yield from described(f"{package}.{name}", getattr(module, name))
    for package in WITH_TORCH:
        for name in names_in(SOURCE.joinpath(*package.split(".")[1:], "__init__.py")):
            yield f"{package}.{name}"


def names_of_pages() -> Iterator[str]:
    """What the reference pages show of other modules."""
    for page in (ROOT / "docs/reference").glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, name = path.rpartition(".")
            if module not in (*PACKAGES, *WITH_TORCH) and "torch" not in module:
                yield from described(path, getattr(importlib.import_module(module), name))


def described(path: str, value: object) -> Iterator[str]:
    """A function, class or constant."""
    if isinstance(value, type):
        own = getattr(value, "__module__", "")
        shared = [base for base in value.__bases__ if base.__name__ in SHARED_CODE]
        above = [base for each in (value, *shared) for base in each.__bases__]
        bases = ", ".join(b.__name__ for b in above if b is not object and b not in shared)
        yield f"{path}: class({bases})"
        if own.startswith(KEPT_PATHS):
            yield f"{path}: pickled as {own}.{value.__qualname__}"
        if issubclass(value, Enum):
            yield from (f"{path}.{each.name} = {each.value!r}" for each in value)
            return
        constructor = getattr(value, "__init__", None)
        if inspect.isfunction(constructor):
            yield f"{path}.__init__{signature(constructor)}"
        members = {name: each for kind in (*shared, value) for name, each in vars(kind).items()}
        for name, member in members.items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                yield f"{path}.{name}: property"
            elif isinstance(member, (staticmethod, classmethod)) or inspect.isroutine(member):
                yield f"{path}.{name}{signature(getattr(value, name))}"
    elif get_origin(value) is not None:
        yield f"{path}: an alias of types"
    elif callable(value):
        yield f"{path}{signature(value)}"
    else:
        yield f"{path}: {type(value).__name__}"


def signature(function: Callable[..., object]) -> str:
    """Names and defaults of arguments, without types; empty if it has none to read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(bare)))


def names_in(path: Path) -> list[str]:
    """A module's `__all__`, without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def entry_points() -> Iterator[str]:
    """Programs, entry points, and modules that are run by `python -m` or named in files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, target in project["scripts"].items():
        yield f"program {name} = {target}"
    for group, points in project["entry-points"].items():
        yield from (f"entry point {group} {name} = {target}" for name, target in points.items())
    for path in SOURCE.rglob("__main__.py"):
        yield f"python -m {'.'.join(path.relative_to(SOURCE.parent).parts[:-1])}"
    for path in (ROOT / "native").glob("*.pth"):
        yield f"{path.name}: {path.read_text(encoding='utf-8').strip()}"


def variables() -> Iterator[str]:
    """Environment variables of ours that the source names."""
    pattern = re.compile(r"\b(?:RALLYPOINT|TORCHELASTIC|TORCH_ELASTIC)_[A-Z0-9_]*[A-Z0-9]\b")
    found: set[str] = set()
    for folder, ends in ((SOURCE, (".py",)), (ROOT / "native", (".cc", ".h", ".pth"))):
        for path in folder.rglob("*"):
            if path.suffix in ends and "tests" not in path.parts:
                found.update(pattern.findall(path.read_text(encoding="utf-8")))
    yield from (f"variable {name}" for name in found if "_TEST_" not in name)


def flags() -> Iterator[str]:
    """Each flag of each command, as its help shows it; those of `run` are variables, too."""
    from rallypoint.cli import _COMMANDS, command_of
    from rallypoint.cli.flags import RunOptions

    for command in _COMMANDS:
        subjects = ("slurm", "jobset") if command == "script" else ("",)
        for subject in subjects:
            words = [*filter(None, [subject]), "--help-all" if command == "run" else "--help"]
            with contextlib.redirect_stdout(io.StringIO()) as text:
                status = command_of(command)(words)
            called = " ".join(filter(None, ["rallypoint", command, subject]))
            yield f"{called} --help: exits with {status}"
            for match in re.finditer(
                r"^ +(?:(-\w), )?(--[a-z][\w-]*)(?: (\S+))?", text.getvalue(), re.MULTILINE
            ):
                yield f"{called} {' '.join(filter(None, match.groups()))}"
    for flag in RunOptions.flags.values():
        yield f"variable {flag.variable}"
        yield from (f"rallypoint run: {other} means {flag.name}" for other in flag.elsewhere)


def fields() -> Iterator[str]:
    """Fields of events and of `--json`, and the words in them."""
    from rallypoint.diagnosis import explanation

    for what, place in FIELDS.items():
        path, *names = place.split()
        for name in names:
            keys = keys_in(definition_in(SOURCE / path, name))
            yield from (f"{what}: {key}" for key in keys)
    progress = ast.parse((SOURCE / "launch/output/progress.py").read_text(encoding="utf-8"))
    for node in ast.walk(progress):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_record":
            event = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""
            keys = [each.arg for each in node.keywords if each.arg]
            yield from (f"event {event}: {key}" for key in keys if event)
    for key in ("verdict", "strength", "cause"):
        words: type[Enum] = getattr(explanation, key.capitalize())
        yield from (f"explain --json: {key} {each.value!r}" for each in words)


def metrics() -> Iterator[str]:
    """Metrics of `rallypoint metrics`."""
    from rallypoint.diagnosis.metrics import FAMILIES

    for each in FAMILIES:
        yield f"metric {each.sample_name}: {each.kind.value}{' of ranks' * each.is_of_rank}"


def definition_in(path: Path, name: str) -> ast.AST:
    """The definition of a function, a class or a method."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(
            each
            for each in ast.iter_child_nodes(node)
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == part
        )
    return node


def keys_in(node: ast.AST) -> Iterator[str]:
    """The keys of the dictionaries that it writes, or the fields of a record."""
    for each in ast.iter_child_nodes(node) if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
    for each in ast.walk(node):
        for key in each.keys if isinstance(each, ast.Dict) else ():
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def layouts() -> Iterator[str]:
    """What processes of other versions read and write."""
    from rallypoint.base import flight_record, recorded_steps

    for name, value in vars(flight_record).items():
        if hasattr(value, "format") and hasattr(value, "size") and not isinstance(value, str):
            yield f"flight record {name}: {value.format}"
    yield f"flight record versions: {flight_record._VERSIONS}"
    for name, value in vars(recorded_steps).items():
        if name.isupper() and not name.startswith("_"):
            yield f"flight record steps {name}: {value}"
    hook: ModuleType = importlib.import_module("rallypoint.base.worker_hook")
    yield f"worker hook: {hook.__name__}"


def statuses() -> Iterator[str]:
    """How `rallypoint run` exits."""
    page = (ROOT / "docs/exit-statuses.md").read_text(encoding="utf-8")
    for each in re.findall(r"^\| (\d[^|]*?) \|", page, re.MULTILINE):
        yield f"exit status {each}"


def surface() -> Iterator[str]:
    """All lines, by kind."""
    for section in (
        *(names_of_packages, names_of_pages, entry_points, flags, variables),
        *(fields, metrics, layouts, statuses),
    ):
        yield f"# {(section.__doc__ or '').splitlines()[0]}"
        yield from sorted(set(section()))
        yield ""


if __name__ == "__main__":
    print(*surface(), sep="\n", end="")
