#!/usr/bin/env python3
"""prose.py [ROOT]: check the words of users' pages; CONTRIBUTING.md has the style sheet.

It finds sentences that are too long, phrases to avoid, links to pages for contributors, and pages
whose title differs between mkdocs.yml, heading and links. Whether a sentence is true, or clear, is
left to readers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath

MOST_WORDS = 30
# Pages for contributors, and one that a program writes.
NOT_FOR_USERS = ("docs/decisions/", "docs/architecture.md", "docs/reference/command-line.md")
FOR_CONTRIBUTORS = ("docs/decisions/", "docs/architecture.md")
LABORATORY = "docs/measurements/2"  # dated notes: their sentences are as they were written

# A phrase, as a regular expression, and what to write instead.
PHRASES = {
    r"ours?": "Rallypoint's",
    r"meeting (point|place)": "rendezvous host, or endpoint",
    r"surroundings": "environment",
    r"(go|goes|going|went|gone) on": "continue",
    r"(get|gets|getting) on": "makes progress",
    r"(say|says|said|saying) so": "report, or print",
    r"(is|are|be|being) told": "gets, or is reported",
    r"(follow|follows) from": "is derived from",
    r"begun again": "retried",
    r"that which": "the thing's name",
    r"whoever": "a rank that, or readers who",
    r"in vain": "without success",
    r"for ever": "forever",
    r"but for": "except for",
    r"as ever": "as before",
}
_PHRASES = {re.compile(rf"\b({phrase})\b", re.IGNORECASE): new for phrase, new in PHRASES.items()}

_UNREAD = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ", re.MULTILINE)
_END = re.compile(r"""(?<!\.\.)(?<!e\.g)(?<!i\.e)([.!?]["')*]*)\s+""")
_NAVIGATION = re.compile(r"^ +- (?:([^:\n]+): )?([\w/-]+\.md)\b", re.MULTILINE)
_HEADING = re.compile(r"^# (.+)$", re.MULTILINE)


def pages(root: Path) -> list[str]:
    """The pages that users read, below the root of the repository."""
    found = [str(path.relative_to(root)) for path in sorted((root / "docs").rglob("*.md"))]
    others = [page for page in ("README.md", "examples/README.md") if (root / page).exists()]
    return [*others, *(page for page in found if not page.startswith(NOT_FOR_USERS))]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, with `Code` for each piece of code and without the links' targets.

    A cell of a table is a text of its own, and a semicolon in it ends a sentence.
    """
    text = _CODE.sub("Code", _LINK.sub(r"\1", _UNREAD.sub("\n\n", text)))
    for block in re.split(r"\n\s*\n", text):
        for line in block.splitlines():
            if line.lstrip().startswith("|"):
                for cell in re.split(r"[|;]", line):
                    yield from split(cell)
        prose = re.sub(r"^\s*(\||#|:::).*$", "", block, flags=re.MULTILINE)
        for item in _ITEM.split(prose):
            yield from split(item)


def split(text: str) -> list[str]:
    """The sentences of a paragraph."""
    return _END.sub(r"\1\n", " ".join(text.split())).splitlines()


def words(sentence: str) -> int:
    """How many words it has; a piece of code is one."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def faults_of_sentences(page: str, text: str) -> Iterator[str]:
    """Long sentences, and phrases to avoid."""
    for sentence in sentences(text):
        if words(sentence) > MOST_WORDS and not page.startswith(LABORATORY):
            yield f"{page}: {words(sentence)} words, at most {MOST_WORDS}: {sentence}"
        for phrase, instead in _PHRASES.items():
            for match in phrase.finditer(sentence):
                yield f'{page}: "{match[0]}": write {instead}: {sentence}'


def titles(root: Path) -> dict[str, str]:
    """Page -> its heading."""
    found = {}
    for path in sorted((root / "docs").rglob("*.md")):
        heading = _HEADING.search(path.read_text(encoding="utf-8"))
        found[str(path.relative_to(root))] = heading[1] if heading else ""
    return found


def faults_of_navigation(root: Path, heading_of: dict[str, str]) -> Iterator[str]:
    """Entries that differ from their page's heading, and headings of two pages."""
    first: dict[str, str] = {}
    for title, name in _NAVIGATION.findall((root / "mkdocs.yml").read_text(encoding="utf-8")):
        page = f"docs/{name}"
        heading = heading_of.get(page, "")
        if title and title != heading:
            yield f'mkdocs.yml: "{title}", but the heading of {page} is "{heading}"'
        other = first.setdefault(heading, page)
        if other != page:
            yield f'{page}: its heading "{heading}" is also that of {other}'


def faults_of_links(page: str, text: str, heading_of: dict[str, str]) -> Iterator[str]:
    """Links to pages for contributors, and links that begin like a title and are another one."""
    for shown, link in _LINK.findall(_UNREAD.sub("", text)):
        target = normpath(join(dirname(page), link.partition("#")[0]))
        if target.startswith(FOR_CONTRIBUTORS):
            yield f"{page}: only CONTRIBUTING.md links to {target}"
        name = " ".join(shown.split())
        is_title = name[:1].isupper() and "#" not in link
        if is_title and heading_of.get(target, name) != name:
            yield f'{page}: a link "{name}", but the heading of {target} is "{heading_of[target]}"'


def faults(root: Path) -> Iterator[str]:
    """Everything that is wrong, a line each."""
    heading_of = titles(root)
    yield from faults_of_navigation(root, heading_of)
    for page in pages(root):
        text = (root / page).read_text(encoding="utf-8")
        yield from faults_of_sentences(page, text)
        yield from faults_of_links(page, text, heading_of)


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    found = list(faults(root))
    for fault in found:
        print(fault)
    sys.exit(1 if found else 0)
