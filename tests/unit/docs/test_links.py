"""Links of the repository's pages lead somewhere: to a file, and to a heading in it."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.pages import ROOT

PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SOURCES = (".py", ".cc", ".h")
OF_USERS = ("sitecustomize.py",)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub and the site make it of a heading: they agree on headings like ours."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    kept = [c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN"]
    return re.sub(r"\s", "-", "".join(kept))


def anchors(page: Path) -> set[str]:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        parts = urlsplit(link)
        if parts.scheme:  # to elsewhere: only the form, as tests need no network
            assert parts.scheme in ("https", "http"), f"{link}: use https"
            assert re.fullmatch(r"[\w.-]+\.\w+", parts.netloc), link
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.exists(), f"{link} does not exist"
        is_of_a_name = parts.fragment.startswith("rallypoint.")  # the site's build checks it
        if parts.fragment and target.suffix == ".md" and not is_of_a_name:
            assert parts.fragment in anchors(target), f"{link}: no such heading"


def test_source_files_exist_that_architecture_and_decisions_name() -> None:
    rooms = (
        ROOT / room for room in ("src", "native", "tests", "benchmarks", "scripts", "examples")
    )
    files = [f"{path}" for room in rooms for path in room.rglob("*.*") if path.suffix in SOURCES]
    absent = [
        f"{page.name}: {name}"
        for page in (ROOT / "docs/architecture.md", *(ROOT / "docs/decisions").glob("*.md"))
        for name in re.findall(r"`([\w./]+\.(?:py|cc|h))`", page.read_text(encoding="utf-8"))
        if name not in OF_USERS and not any(file.endswith(f"/{name}") for file in files)
    ]
    assert not absent, absent
