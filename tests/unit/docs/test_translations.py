"""Translations type what the originals type: their blocks of code are the originals'."""

from __future__ import annotations

import re

from tests.pages import ROOT, blocks

LINK = re.compile(r"\]\(([^)\s]+)\)")


def code(page: str) -> list[tuple[str, str, str]]:
    return [(block.language, block.title, block.text) for block in blocks(page)]


def test_the_tutorial_has_the_same_blocks() -> None:
    original = code("docs/tutorial.md")
    assert len(original) > 15
    assert code("docs/tutorial.zh-CN.md") == original


def test_the_readme_has_blocks_of_the_original_in_their_order() -> None:
    original = iter(code("README.md"))
    found = code("README.zh-CN.md")
    assert len(found) >= 6
    assert all(block in original for block in found)


def test_the_tutorial_has_the_same_sections() -> None:
    def levels(page: str) -> list[str]:
        text = (ROOT / page).read_text(encoding="utf-8")
        return re.findall(r"^(#+) ", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)

    assert levels("docs/tutorial.zh-CN.md") == levels("docs/tutorial.md")


def test_the_tutorial_links_to_the_same_pages() -> None:
    def targets(page: str) -> list[str]:
        links = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
        return [link for link in links if not link.startswith("#")]

    assert sorted(targets("docs/tutorial.zh-CN.md")) == sorted(targets("docs/tutorial.md"))
