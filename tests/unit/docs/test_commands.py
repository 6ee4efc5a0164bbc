"""Each command line in the pages has flags that there are, whether it can run here or not."""

from __future__ import annotations

import re
import shlex

import pytest
from tests.pages import blocks, pages

from rallypoint.cli import _COMMANDS
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.options import parse


def lines() -> list[tuple[str, str]]:
    """(place, what follows `rallypoint`) of each line in a block."""
    found = []
    for page in pages():
        for block in blocks(page):
            is_shell = block.language in ("sh", "console")
            text = block.text.replace("\\\n", " ") if is_shell else ""
            for match in re.finditer(
                r"\brally(?:point |(?=run ))([a-z]+(?: (?:'[^']*'|[^\n>|;&#'])*)?)", text
            ):
                found.append((block.place, match[1]))
    return found


LINES = lines()


@pytest.mark.parametrize(("place", "line"), LINES, ids=[place for place, _ in LINES])
def test_command(place: str, line: str) -> None:
    name, *words = shlex.split(line)
    assert name in _COMMANDS, place
    if name == "run":
        parse(words, FLAGS, program="rallypoint run", environ={})  # raises


def test_there_are_many() -> None:
    assert len(LINES) > 50
