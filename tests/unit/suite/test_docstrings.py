"""Public methods have docstrings, their own or those of what they override."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.pages import ROOT

Class = tuple[list[str], dict[str, ast.FunctionDef | ast.AsyncFunctionDef]]


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in (ROOT / "src/rallypoint").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield path.relative_to(ROOT).as_posix(), node


def test_public_methods_have_docstrings() -> None:
    found = list(classes())
    by_name: dict[str, list[Class]] = defaultdict(list)
    for _, node in found:
        methods = {
            each.name: each
            for each in node.body
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
            and not any(ast.unparse(one).endswith(".setter") for one in each.decorator_list)
        }
        bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
        by_name[node.name].append((bases, methods))

    def inherits(bases: list[str], method: str) -> bool:
        return any(
            (method in methods and ast.get_docstring(methods[method]) is not None)
            or inherits(above, method)
            for base in bases
            for above, methods in by_name[base]
        )

    missing = [
        f"{path}: {node.name}.{method}"
        for path, node in found
        if not node.name.startswith("_")
        for bases, methods in by_name[node.name]
        for method, each in methods.items()
        if not method.startswith("_")
        and ast.get_docstring(each) is None
        and not inherits(bases, method)
    ]
    assert len(found) > 500
    assert not missing, "\n".join(sorted(set(missing)))
