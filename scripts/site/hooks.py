"""What the site's builder does to pages: links into the repository, no file from elsewhere, and
messages of programs on several lines; and `llms.txt`, the list of pages for programs that read.

Pages are written to be read in the repository, too. There a link may lead to any file of it; on the
site, one that leaves `docs/` leads to the repository's address instead. A link to a file that does
not exist fails the build, as mkdocs does for links within `docs/`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any, TypeAlias

log = logging.getLogger("mkdocs.hooks.rallypoint")  # a warning fails a strict build

Of: TypeAlias = Any  # mkdocs is not there when types are checked
ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)(#[^)\s]*)?(?=\))")
_NAMED = re.compile(r"(?<![\w/\"=>.-])docs/([\w/-]+)\.md\b")
_PRINTED = re.compile(
    r'<div class="(language-(?:text|console) highlight)">(?=<pre>.*?<code>(.*?)</code>)', re.DOTALL
)
_WHOLE = re.compile(  # in text, not in a tag
    r"(?<=[\s>])(?:--?[a-zA-Z][\w-]{0,26}|\d{4}-\d\d-\d\d)(?=[^<>]*<)"
)
_TAG = re.compile(r"<[^>]+>")
_WIDEST_DRAWING = 105  # and the widest help text; what is wider has sentences in it
_DRAWING = re.compile(r"\S {3,}\S|--")
_LOADED = re.compile(
    r'<(?:script|img|iframe)\b[^>]*\bsrc="(https?:[^"]*)|'
    r'<link\b[^>]*\brel="(?:stylesheet|preload)"[^>]*\bhref="(https?:[^"]*)'
)
_UNREAD = re.compile(
    r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)|^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE
)
_TEXT = re.compile(r"(?!\*\*[^*]+\*\*$|- )[\w`*\[\"]")
_SENTENCE = re.compile(r".+?(?:[.!?:](?=\s|$)|。)")
_TEXT_OF_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]+\)")
_of_build: dict[str, Of] = {}  # the navigation, which mkdocs hands over only before pages are read


def on_nav(nav: Of, config: Of, files: Of) -> None:
    """Keep the navigation."""
    _of_build["nav"] = nav


def on_post_build(config: Of) -> None:
    """Write `llms.txt` (https://llmstxt.org), and warn of a page that begins without text."""
    text = llms_txt(config.site_name, config.site_description, _of_build["nav"].items)
    Path(config.site_dir, "llms.txt").write_text(text, encoding="utf-8")


def llms_txt(name: str, description: str, items: list[Of]) -> str:
    """The navigation as one list of links, each with the page's first sentence."""
    lines = [f"# {name}", "", f"> {description}.", "", "## Pages", "", *_entries(items, "")]
    return "\n".join([*lines, ""])


def _entries(items: list[Of], section: str) -> Iterator[str]:
    """The pages of a section, and then its sections."""
    for page in (item for item in items if item.is_page):
        sentence = first_sentence(page.markdown)
        if not sentence:
            log.warning("%s has no sentence that says what it is about", page.file.src_uri)
        yield f"- [{page.title}]({page.url}): {sentence}"
    for item in (item for item in items if item.is_section):
        title = f"{section}: {item.title}" if section else item.title
        yield from ("", f"## {title}", "", *_entries(item.children, title))


def first_sentence(markdown: str) -> str:
    """The first sentence of a page's text, which ends with a full stop; "" if there is none."""
    for paragraph in re.split(r"\n\s*\n", _UNREAD.sub("\n\n", markdown)):
        text = _TEXT_OF_LINK.sub(r"\1", " ".join(paragraph.split()))
        if _TEXT.match(text) and (found := _SENTENCE.match(text)):
            return re.sub(r":$", ".", found[0])
    return ""


def on_page_markdown(markdown: str, page: Of, config: Of, files: Of) -> str:
    """Lead links that leave `docs/` to the repository, and searches to guides before decisions."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.2}
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def absolute(match: re.Match[str]) -> str:
        target = normpath(str(folder / match[1]))
        if target == "docs" or target.startswith("docs/"):
            return match[0]
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{config.repo_url.rstrip('/')}/{kind}/main/{target}{match[2] or ''}"

    return _LINK.sub(absolute, markdown)


def on_page_content(html: str, page: Of, config: Of, files: Of) -> str:
    """Make links of the pages that docstrings name, let sentences in blocks of text wrap, and mark
    flags and dates.
    """
    folder = PurePosixPath(page.url).parent

    def link(match: re.Match[str]) -> str:
        if not (ROOT / match[0]).is_file():
            log.warning("%s names %s, which does not exist", page.file.src_uri, match[0])
        return f'<a href="{relpath(f"{match[1]}.html", folder)}">{match[0]}</a>'

    def wrap(match: re.Match[str]) -> str:
        lines = unescape(_TAG.sub("", match[2])).splitlines()
        if any(len(line) > _WIDEST_DRAWING for line in lines) or not any(
            _DRAWING.search(line) for line in lines
        ):
            return f'<div class="{match[1]} wraps">'
        return match[0]

    html = _PRINTED.sub(wrap, _NAMED.sub(link, html))
    return _WHOLE.sub(r'<span class="whole">\g<0></span>', html)


def on_post_page(output: str, page: Of, config: Of) -> str:
    """Warn of scripts, styles and images that a browser would fetch from another site, and keep the
    theme's script from asking GitHub for the number of stars.
    """
    for match in _LOADED.finditer(output):
        log.warning(
            "%s loads %s; the site must not need a network", page.file.src_uri, match[1] or match[2]
        )
    return output.replace(' data-md-component="source"', "")
