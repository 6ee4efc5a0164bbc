"""Each command line in the pages has flags that exist, whether it can run here or not."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import pytest
from tests.pages import ROOT, blocks, pages

from rallypoint.cli import _COMMANDS, command_of
from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import UsageError, parse

# The word after these is what they are to do, not a flag.
_WITH_A_SUBJECT = ("bench", "simulate", "script")


def lines() -> list[tuple[str, str]]:
    """(place, what follows `rallypoint`) of each line in a block, and of each piece of code in a
    sentence.
    """
    found = []
    for page in pages():
        for block in blocks(page):
            is_shell = block.language in ("sh", "console")
            text = block.text.replace("\\\n", " ") if is_shell else ""
            for match in re.finditer(
                r"\brally(?:point |(?=run ))([a-z]+(?: (?:'[^']*'|[^\n>|;&#'])*)?)", text
            ):
                found.append((block.place, match[1]))
        text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
        for match in re.finditer(r"`[^`\n]*(?<!import )\brallypoint ([a-z][^`]*)`", text):
            found.append((page, completed(" ".join(match[1].split()))))
    return found


def completed(line: str) -> str:
    """A command in a sentence, which may name a flag without what is before it, or its value."""
    line = re.sub(r"^bench (?=--(?!calibrate))", "bench all_reduce ", line)
    return re.sub(r" --[\w-]+$", r"\g<0> 1", line)


LINES = lines()


def refuse_unknown_flags(name: str, words: Sequence[str]) -> None:
    """Have the command's own parser read the words.

    With --help among them a command parses all, prints its help, and starts nothing.

    Raises:
        UsageError: a flag does not exist, or a value is missing.
    """
    if name == "run":
        parse(words, RunOptions, program="rallypoint run")
        return
    at = int(name in _WITH_A_SUBJECT and not words[0].startswith("-")) if words else 0
    if command_of(name)([*words[:at], "--help", *words[at:]]) != 0:
        raise UsageError(f"rallypoint {name} refuses {' '.join(words)}")


@pytest.mark.parametrize(("place", "line"), LINES, ids=[place for place, _ in LINES])
def test_command(place: str, line: str) -> None:
    name, *words = shlex.split(line)
    assert name in _COMMANDS, place
    refuse_unknown_flags(name, words)


@pytest.mark.parametrize("name", _COMMANDS)
def test_a_flag_that_does_not_exist_is_found(name: str) -> None:
    subject = {"bench": ["all_reduce"], "simulate": ["all_reduce"], "script": ["slurm"]}
    with pytest.raises(UsageError):
        refuse_unknown_flags(name, [*subject.get(name, []), "--foo", "train.py"])
    refuse_unknown_flags(name, subject.get(name, []))


def test_there_are_many() -> None:
    assert len(LINES) > 100
