"""The blocks of code in README.md and docs/, and what the pages say of how each one is tested.

A block that is to be typed (`sh`, `console`, `python`) is run by tests/system/test_pages.py, unless
the line above it says who else tests it, or why nobody can:

    <!-- tested by tests/system/test_slurm.py::test_where -->    by that test
    <!-- not run: it needs a Kubernetes cluster -->
    <!-- run: in the background -->                              while the following blocks run
    <!-- run: exits with 3, needs torch -->                      or: exits with 0 or 1

A test that a block names types the block's text, or what it starts has the flags of the block.

A block with a title is a file that later blocks use; a `python` block without one runs as a job of
two workers. A `text` block after one that is run is what it prints.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPED = ("sh", "console", "python")
_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- (tested by|not run:|run:) ([^\n]+?) -->\s*\Z")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str  # below the root of the repository
    line: int
    language: str
    title: str
    text: str
    mark: str  # "tested by", "not run:", "run:" or nothing
    said: str  # after the mark

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in TYPED and self.mark in ("", "run:")

    def commands(self) -> list[list[str]]:
        """The words of each line that a reader types in a terminal, without comments."""
        if self.language not in ("sh", "console"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        if any(line.count("'") % 2 for line in lines):  # one text of several lines
            lines = ["\n".join(lines)]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def pages() -> list[str]:
    """All pages with blocks: README.md and those of docs/, except for the decisions, and for
    translations: tests/unit/docs/test_translations.py holds their blocks to the originals'.
    """
    found = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if not path.name.endswith(".zh-CN.md")
    ]
    return ["README.md", *(str(path) for path in found if "decisions" not in path.parts)]


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        indent, language, information, code = match.groups()
        before = text[: match.start()].rstrip("\n ")
        mark = _MARK.search(before)
        title = _TITLE.search(information)
        yield Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=language,
            title=title[1] if title else "",
            text="".join(line.removeprefix(indent) for line in code.splitlines(keepends=True)),
            mark=mark[1] if mark else "",
            said=mark[2] if mark else "",
        )


def blocks_tested_by(test: str) -> list[Block]:
    """The blocks that name this test."""
    return [
        block
        for page in pages()
        for block in blocks(page)
        if block.mark == "tested by" and block.said == test
    ]
