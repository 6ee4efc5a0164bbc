"""No block of the pages is left untested without a reason."""

from __future__ import annotations

import re

import pytest
from tests.pages import ROOT, TYPED, Block, blocks, pages

ALL = [block for page in pages() for block in blocks(page)]
# Lines that somebody is to type, whatever the block calls itself.
COMMAND = re.compile(
    r"^\s*(\$ |(rallypoint (run|bench|doctor|explain|simulate|script|where|store|trace|logs|ps) "
    r"|rallyrun |srun |sbatch |mpirun |flux run |kubectl |ray job |pip install |make |nft add )"
    r"(?!.*rallypoint run: ))",
    re.MULTILINE,
)


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.place)
def test_commands_are_in_blocks_that_are_tested(block: Block) -> None:
    if block.language not in TYPED and not block.page.endswith("command-line.md"):
        assert not COMMAND.search(block.text), f"{block.place}: call it `sh` or `console`"


def test_who_else_tests_a_block_is_there() -> None:
    for block in ALL:
        if block.mark == "tested by":
            path, _, name = block.said.partition("::")
            assert (ROOT / path).is_file(), f"{block.place}: no {path}"
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in text, f"{block.place}: no {name}"


def test_a_reason_is_a_sentence() -> None:
    for block in ALL:
        if block.mark == "not run:":
            assert len(block.said.split()) >= 3, block.place


def test_what_is_run_says_how_in_known_words() -> None:
    for block in ALL:
        for word in block.said.split(", ") if block.mark == "run:" else ():
            assert re.fullmatch(
                r"in the background|needs torch|needs sklearn|exits with \d+", word
            ), f"{block.place}: {word}"


def test_a_file_is_used() -> None:
    for block in ALL:
        if block.title and not block.mark:
            later = [other.text for other in ALL if other.page == block.page and other.is_run]
            assert any(block.title in text for text in later), f"{block.place}: nobody uses it"
