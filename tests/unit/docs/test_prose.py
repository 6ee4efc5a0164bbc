"""scripts/prose.py finds the faults that are planted in a small tree of pages, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import ROOT

PAGES = {
    "README.md": "# Rallypoint\n\nRead [Ports](docs/ports.md), or [the guide](docs/ports.md).\n",
    "docs/ports.md": "# Ports\n\nA job opens ports.\n",
    "docs/architecture.md": "# Architecture\n\nWe go on in [Decision 1](decisions/001.md).\n",
    "docs/decisions/001.md": "# 001. A choice\n\nOur reasons.\n",
    "mkdocs.yml": "nav:\n  - Ports: ports.md\n  - More:\n      - Architecture: architecture.md\n",
}
LONG = " ".join(["word"] * 31)


def check(root: Path) -> tuple[int, list[str]]:
    """Its exit status, and its lines."""
    command = [sys.executable, str(ROOT / "scripts/prose.py"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def write(root: Path, pages: dict[str, str]) -> None:
    for page, text in pages.items():
        (root / page).parent.mkdir(parents=True, exist_ok=True)
        (root / page).write_text(text)


def test_the_pages_of_this_repository() -> None:
    assert check(ROOT) == (0, [])


def test_pages_without_faults(tmp_path: Path) -> None:
    write(tmp_path, PAGES)
    assert check(tmp_path) == (0, [])


@pytest.mark.parametrize(
    ("page", "text", "fault"),
    [
        ("docs/ports.md", f"# Ports\n\nShort. {LONG}.\n", "31 words"),
        ("docs/ports.md", f"# Ports\n\n- one\n- {LONG}\n", "31 words"),
        ("docs/ports.md", f"# Ports\n\n| a | b |\n|-|-|\n| c | {LONG} |\n", "31 words"),
        ("docs/ports.md", f"# Ports\n\n`code` [{LONG}](ports.md)\n", "32 words"),
        ("docs/ports.md", "# Ports\n\nOpen the ports of the meeting\npoint.\n", "rendezvous host"),
        ("docs/ports.md", "# Ports\n\n| a |\n|-|\n| the job goes on |\n", "continue"),
        ("docs/ports.md", "# Ports\n\nOur ports.\n", "Rallypoint's"),
        ("docs/ports.md", "# Open ports\n", 'mkdocs.yml: "Ports"'),
        ("docs/ports.md", "# Ports\n\n[Why](decisions/001.md)\n", "only CONTRIBUTING.md links"),
        ("README.md", "# Rallypoint\n\n[All\nports](docs/ports.md)\n", 'a link "All ports"'),
        ("README.md", "# Rallypoint\n\n[built](docs/architecture.md)\n", "only CONTRIBUTING.md"),
        (
            "mkdocs.yml",
            PAGES["mkdocs.yml"] + "  - Ports: more/ports.md\n",
            "docs/more/ports.md: its heading",
        ),
    ],
)
def test_a_fault_is_found(tmp_path: Path, page: str, text: str, fault: str) -> None:
    write(tmp_path, {**PAGES, "docs/more/ports.md": "# Ports\n", page: text})
    status, lines = check(tmp_path)
    assert status == 1
    assert any(fault in line for line in lines), lines


@pytest.mark.parametrize(
    "text",
    [
        f"```text\n{LONG}\n```",
        f"<!-- {LONG} -->",
        "`" + LONG + "`",
        " ".join(["word"] * 30) + ". " + " ".join(["word"] * 30) + ".",
        "The message is `the job goes on`.",
    ],
)
def test_what_is_no_fault(tmp_path: Path, text: str) -> None:
    write(tmp_path, {**PAGES, "docs/ports.md": f"# Ports\n\n{text}\n"})
    assert check(tmp_path) == (0, [])
