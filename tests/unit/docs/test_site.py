"""What the site's builder adds: `llms.txt`, the list of pages for programs that read."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from tests.pages import ROOT


def load() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "scripts/site/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load()
FIRST = {
    "# A\n\nThe `.pth` file of [a page](b.md) is read. More.": "The `.pth` file of a page is read.",
    "# A\n\n<!-- mark -->\n```sh\nrun a.b\n```\n\nThis starts\neight.": "This starts eight.",
    "# A\n\n![A picture.](a.svg)\n\n**Part**\n\n| a. |\n|-|\n\n- An item.\n\nRun it:\n": "Run it.",
    "# A\n\n从第一个作业讲起。需要 Linux。": "从第一个作业讲起。",
    "# A\n\n## B\n\n::: rallypoint.store\n": "",
}


@pytest.mark.parametrize(("page", "sentence"), FIRST.items())
def test_the_first_sentence_of_a_page(page: str, sentence: str) -> None:
    assert HOOKS.first_sentence(page) == sentence


def page(title: str, url: str, markdown: str) -> SimpleNamespace:
    file = SimpleNamespace(src_uri=url.replace(".html", ".md"))
    return SimpleNamespace(
        is_page=True, is_section=False, title=title, url=url, markdown=markdown, file=file
    )


def section(title: str, *children: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(is_page=False, is_section=True, title=title, children=children)


def test_the_navigation_is_the_list(caplog: pytest.LogCaptureFixture) -> None:
    launch = section("Launch", page("Slurm", "guides/slurm.html", "Use srun. It works."))
    guides = section("Guides", launch, page("Guides", "guides/index.html", "# Guides"))
    items = [page("Name", "index.html", "What it is."), guides]
    assert HOOKS.llms_txt("Name", "Does this", items) == (
        "# Name\n\n> Does this.\n\n"
        "## Pages\n\n- [Name](index.html): What it is.\n\n"
        "## Guides\n\n- [Guides](guides/index.html): \n\n"
        "## Guides: Launch\n\n- [Slurm](guides/slurm.html): Use srun.\n"
    )
    assert "guides/index.md has no sentence" in caplog.text  # and the strict build fails
