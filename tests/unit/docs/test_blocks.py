"""No block of the pages is left untested without a reason."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest
from tests.pages import ROOT, TYPED, Block, blocks, pages

ALL = [block for page in pages() for block in blocks(page)]
TESTED = [block for block in ALL if block.mark == "tested by"]
# Lines that somebody is to type, whatever the block calls itself.
COMMAND = re.compile(
    r"^\s*(\$ |(rallypoint (run|bench|doctor|explain|simulate|script|where|store|trace|logs|ps) "
    r"|rallyrun |srun |sbatch |mpirun |flux run |kubectl |ray job |pip install |make |nft add )"
    r"(?!.*rallypoint run: ))",
    re.MULTILINE,
)
FLAG = re.compile(r"--?[a-zA-Z][\w-]*")


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.place)
def test_commands_are_in_blocks_that_are_tested(block: Block) -> None:
    if block.language not in TYPED and not block.page.endswith("command-line.md"):
        assert not COMMAND.search(block.text), f"{block.place}: call it `sh` or `console`"


@functools.cache
def functions(path: Path) -> tuple[str, dict[str, str]]:
    """What a file of tests has besides tests, with what that imports from other such files; and
    the source of each test.
    """
    text = path.read_text(encoding="utf-8")
    shared, tests = [], {}
    for node in ast.parse(text).body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tests[node.name] = source
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.system."):
            shared.append(functions(ROOT / f"{(node.module or '').replace('.', '/')}.py")[0])
        else:
            shared.append(source)
    return "\n".join(shared), tests


def source_of(block: Block) -> str:
    """The source of the test that a block names."""
    path, _, name = block.said.partition("::")
    assert name, f"{block.place}: name a test of {path}, as PATH::NAME"
    assert (ROOT / path).is_file(), f"{block.place}: no {path}"
    shared, tests = functions(ROOT / path)
    assert name in tests, f"{block.place}: no {name} in {path}"
    return f"{shared}\n{tests[name]}"


def flags(block: Block) -> set[str]:
    """The flags of all that is typed, without their values; `-r` of `-r3`, say, is one."""
    words = [word for command in block.commands() for word in command]
    return {match[0] for word in words if (match := FLAG.match(word))}


def is_typed(block: Block, source: str) -> bool:
    """Whether a test reads the block, and types what it finds."""
    return f'blocks_tested_by("{block.said}")' in source or Path(block.page).name in source


@pytest.mark.parametrize("block", TESTED, ids=lambda block: block.place)
def test_the_test_of_a_block_is_there_and_has_its_flags(block: Block) -> None:
    source = source_of(block)
    if not is_typed(block, source):
        missing = {flag for flag in flags(block) if not re.search(rf"{flag}(?![\w-])", source)}
        assert not missing, f"{block.place}: not in {block.said}"


def test_flags_that_are_missing_are_found() -> None:
    made = {"line": 1, "title": "", "mark": "tested by", "page": "docs/none.md"}
    said = "tests/system/test_slurm.py::test_where"
    block = Block(language="sh", text="srun --foo a  # --bar\n", said=said, **made)  # type: ignore[arg-type]
    assert flags(block) == {"--foo"}
    assert "--foo" not in source_of(block)
    assert "--ntasks-per-node" in source_of(block)
    assert not is_typed(block, source_of(block))


def test_a_reason_is_a_sentence() -> None:
    for block in ALL:
        if block.mark == "not run:":
            assert len(block.said.split()) >= 3, block.place


def test_what_is_run_says_how_in_known_words() -> None:
    for block in ALL:
        for word in block.said.split(", ") if block.mark == "run:" else ():
            assert re.fullmatch(
                r"in the background|needs torch|needs sklearn|exits with \d+( or \d+)?", word
            ), f"{block.place}: {word}"


def test_a_file_is_used() -> None:
    for block in ALL:
        if block.title and not block.mark:
            later = [other.text for other in ALL if other.page == block.page and other.is_run]
            assert any(block.title in text for text in later), f"{block.place}: nobody uses it"


def test_the_first_example_and_the_introduction_are_the_same_everywhere() -> None:
    assert len({block.text for block in ALL if block.title == "first.py"}) == 1
    readme, index = ((ROOT / page).read_text() for page in ("README.md", "docs/index.md"))
    introduction = readme.partition("\n## ")[0].replace("](docs/", "](")
    assert index.startswith(introduction)


def test_the_first_page_has_commands_of_the_guides() -> None:
    """Its table has a command of each guide that it names, and its first block commands of any."""

    def tested(page: str) -> list[list[str]]:
        return [
            command
            for block in TESTED
            if block.page.startswith(page) and block.language in ("sh", "console")
            for command in block.commands()
        ]

    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[^\]]+\]\((guides/[\w-]+\.md)\) \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for guide, command in rows:
        assert shlex.split(command) in tested(f"docs/{guide}"), command
    install, *others = next(blocks("docs/index.md")).commands()
    assert install[:2] == ["pip", "install"]
    assert len(others) == 2
    assert all(command in tested("docs/guides/") for command in others)
