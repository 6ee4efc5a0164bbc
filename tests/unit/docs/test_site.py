"""What the site adds to its builder: `llms.txt`, the list of pages for programs that read; flags
and dates that are kept whole; a worker for the search, where browsers have none.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
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


def test_flags_and_dates_are_kept_whole_but_not_in_tags() -> None:
    html = '<b>2026-11-28</b> <code>srun -n 2 run --nproc=4</code> <a title="a --b">c-d</a>'
    shown = HOOKS.on_page_content(html, page("A", "a.html", ""), None, None)
    whole = re.findall(r'<span class="whole">(.*?)</span>', shown)
    assert whole == ["2026-11-28", "-n", "--nproc"]
    assert re.sub(r"</?span[^>]*>", "", shown) == html


BROWSERS = ("chromium", "google-chrome", "chromium-browser")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), "")
WORKER = 'addEventListener("message", (event) => postMessage(event.data + event.data));'
PAGE = """\
<!doctype html><body><script src="iframe-worker.js"></script><p></p><script>
const worker = new Worker("worker.js");
worker.addEventListener("message", (event) => document.querySelector("p").append(event.data));
worker.postMessage("ab");
worker.postMessage("c");
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="there is no Chromium: apt install chromium")
def test_a_page_from_a_disk_has_workers(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "iframe-worker.js", tmp_path)
    (tmp_path / "worker.js").write_text(WORKER)
    (tmp_path / "page.html").write_text(PAGE)
    flags = ["--headless", "--no-sandbox", "--virtual-time-budget=10000", "--dump-dom"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path}", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "<p>ababcc</p>" in done.stdout, done.stderr
