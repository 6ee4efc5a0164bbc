"""`--preload`: the modules that one process on each node imports for all its workers.

`auto` reads them from the script, without running it. Nothing is imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from rallypoint.cli.options import UsageError
from rallypoint.launch.job import LOCAL_RANK_MACRO

AUTO = "auto"
# Which are known to start no thread and touch no device when they are imported.
KNOWN = ("torch", "numpy", "torchvision", "transformers", "accelerate", "rallypoint")
_OF_OPTIMIZERS = "torch._dynamo"  # which PyTorch imports when the first optimizer is made
# They begin in Python's own start, before anything can be forked.
_COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE")
_CHANGES = {"os": ("environ", "environb", "putenv", "unsetenv"), "sys": ("path",)}


def read_preload(
    text: str, command: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], str]:
    """The modules that `text` asks for, and a note if there are none although it does.

    Args:
        command: a worker's.
    """
    names = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    for name in names:
        if not all(part.isidentifier() and part.isascii() for part in name.split(".")):
            raise UsageError(
                f"--preload: {name!r} is not a module's name; separate several with commas, as in"
                " --preload torch,torchvision."
            )
    if not names:
        return (), ""
    obstacle = _obstacle(command, environ)
    if obstacle:
        return (), f"--preload has no effect {obstacle}"
    return _found_in(command) if names == (AUTO,) else (names, "")


def _obstacle(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Why workers that run this cannot be forked, as the end of a sentence."""
    python = (sys.executable, "-u")
    if environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return "with PYTHON_EXEC: the workers' Python is another one"
    if tuple(command[:2]) != python or len(command) < 3 or command[2] in ("-", "-c"):
        return "on what is not a Python script or module"
    if command[2] != "-m" and (LOCAL_RANK_MACRO in command[2] or not os.path.isfile(command[2])):
        return "on what is not one Python script"
    found = [name for name in _COVERAGE if environ.get(name)]
    return f"with {found[0]}, which measures each worker from its start" if found else ""


def _found_in(command: Sequence[str]) -> tuple[tuple[str, ...], str]:
    path = _file_of(command[3]) if command[2] == "-m" else command[2]
    try:
        with open(path, "rb") as file:
            names, obstacle = imports_of(file.read())
    except (OSError, SyntaxError, ValueError):  # Python will tell, in each worker
        return (), f"--preload auto cannot read {path or command[3]}"
    if not obstacle and not names:
        obstacle = f"imports none of {', '.join(KNOWN)}"
    return (() if obstacle else names), f"--preload auto: {path} {obstacle}" if obstacle else ""


def _file_of(module: str) -> str:
    for directory in (os.getcwd(), *sys.path):
        path = os.path.join(directory, *module.split("."))
        for file in (f"{path}.py", f"{path}/__main__.py"):
            if os.path.isfile(file):
                return file
    return ""


def imports_of(source: bytes) -> tuple[tuple[str, ...], str]:
    """The known modules that a script imports at its top level, and what speaks against that.

    What a script changes in os.environ or sys.path before an import may be meant for it.
    """
    import ast

    names: dict[str, None] = {}
    last_line, changes, has_optimizer = 0, [], False
    for statement in ast.parse(source).body:
        for name in _imported(statement):
            if name.partition(".")[0] in KNOWN:
                names[name] = None
                last_line = statement.lineno
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                has_optimizer |= node.attr == "optim"
                owner = node.value.id
                if node.attr in _CHANGES.get(owner, ()):
                    changes.append((node.lineno, f"{owner}.{node.attr}"))
            elif isinstance(node, ast.ImportFrom) and node.module in _CHANGES:
                found = [each.name for each in node.names if each.name in _CHANGES[node.module]]
                changes += [(node.lineno, f"{node.module}.{name}") for name in found]
    has_optimizer |= any(name.startswith("torch.optim") for name in names)
    if has_optimizer and any(name.partition(".")[0] == "torch" for name in names):
        names[_OF_OPTIMIZERS] = None
    early = [what for line, what in changes if line < last_line]
    obstacle = f"uses {early[0]} before its imports; name the modules instead" if early else ""
    return tuple(names), obstacle


def _imported(statement: object) -> Iterator[str]:
    import ast

    if isinstance(statement, ast.Import):
        yield from (each.name for each in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module
