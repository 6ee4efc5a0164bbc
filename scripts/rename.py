"""Renames a class or function everywhere: where it is defined, imported, and written in backticks.

    scripts/rename.py rallypoint.cli.doctor.doctor_flags Request DoctorRequest

Names of other modules that are spelled alike stay. A file that has both is refused. What it misses,
in f-strings, ruff finds.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Rename:
    """One name of one module."""

    def __init__(self, module: str, old: str, new: str) -> None:
        self.module, self.old, self.new = module, old, new
        self.parent, _, self.last = module.rpartition(".")

    def everywhere(self) -> int:
        """Rename in all files that git knows; returns in how many."""
        changed = 0
        for name in _files():
            path = ROOT / name
            text = path.read_text(encoding="utf-8")
            after = re.sub(
                rf"\b{re.escape(self.module)}\.{self.old}\b", f"{self.module}.{self.new}", text
            )
            if path.suffix in (".py", ".pyi"):
                after = self._in_source(name, after)
            if after != text:
                path.write_text(after, encoding="utf-8")
                changed += 1
        return changed

    def _in_source(self, name: str, text: str) -> str:
        if self.old not in text:
            return text
        tree = ast.parse(text)
        is_home = _module_of(name) == self.module
        is_bound, modules, is_elsewhere = is_home, set(), False
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == self.old and alias.asname is None:
                        is_bound |= node.module == self.module
                        is_elsewhere |= node.module != self.module
                    if node.module == self.parent and alias.name == self.last:
                        modules.add(alias.asname or alias.name)
            elif isinstance(node, ast.ClassDef) and node.name == self.old and not is_home:
                is_elsewhere = True
        if is_bound and is_elsewhere:
            raise SystemExit(f"{name} has another {self.old}")
        imports = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == self.module
        ]
        return self._replaced(text, is_bound=is_bound, modules=modules, imports=imports)

    def _replaced(self, text: str, *, is_bound: bool, modules: set[str], imports: list[int]) -> str:
        lines = text.splitlines(keepends=True)
        spots: list[tuple[int, int]] = []
        before = ["", ""]
        statement = 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if not before[1]:
                statement = token.start[0]
            if token.type == tokenize.NAME and token.string == self.old:
                is_attribute = before[1] == "."
                is_ours = before[0] in modules if is_attribute else is_bound
                if is_ours or (statement in imports and not is_attribute):
                    spots.append(token.start)
            elif is_bound and token.type in (tokenize.STRING, tokenize.COMMENT):
                spots.extend(self._in_words(token))
            is_end = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
            before = ["", ""] if token.type == tokenize.NEWLINE else before
            if not is_end:
                before = [before[1], token.string]
        for row, column in sorted(spots, reverse=True):
            line = lines[row - 1]
            lines[row - 1] = line[:column] + self.new + line[column + len(self.old) :]
        return "".join(lines)

    def _in_words(self, token: tokenize.TokenInfo) -> Iterator[tuple[int, int]]:
        """In backticks, after "See", and in strings that are types."""
        row, column = token.start
        for number, line in enumerate(token.string.split("\n")):
            for match in re.finditer(rf"(?<=`){self.old}\b|(?<=See ){self.old}\b", line):
                yield row + number, match.start() + (column if number == 0 else 0)
        if token.type == tokenize.STRING and re.fullmatch(
            rf'"{self.old}( \| None)?"', token.string
        ):
            yield row, column + 1


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.pyi", "*.md", "*.toml", "*.txt", "*.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.split()


def _module_of(name: str) -> str:
    return name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def main() -> None:
    """Read the command line."""
    module, old, new = sys.argv[1:]
    print(f"{module}.{old} -> {new}: {Rename(module, old, new).everywhere()} files")


if __name__ == "__main__":
    main()
