"""What other programs read here: workflows, forms of issues, hooks for commits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GITHUB.exists(), reason="this is no git checkout"),
]


def read(path: Path) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", "workflows/*.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/[bfq]*.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_github_can_read_it(schema: str, pattern: str) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    paths = [str(path) for path in GITHUB.glob(pattern)]
    assert paths
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    checked = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_workflows_run_what_exists() -> None:
    goals = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (GITHUB / "workflows").glob("*.yml"):
        for job in read(path)["jobs"].values():
            for step in job["steps"]:
                words = step.get("run", "").split()
                if words[:1] == ["make"]:
                    assert words[1] in goals | {".venv/.installed"}, path
                elif words and words[0].startswith("scripts/"):
                    assert (ROOT / words[0]).exists(), path


def test_only_publishing_may_do_more_than_read() -> None:
    allowed = {
        "release.yml": {"github": {"contents": "write"}, "publish": {"id-token": "write"}},
        "docs.yml": {"publish": {"pages": "write", "id-token": "write"}},
    }
    for path in (GITHUB / "workflows").glob("*.yml"):
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}
        wider = {
            name: job["permissions"]
            for name, job in workflow["jobs"].items()
            if "permissions" in job
        }
        assert wider == allowed.get(path.name, {})
        assert "secrets." not in path.read_text()


def test_hooks_have_no_versions_of_their_own() -> None:
    """They run the tools in .venv, which pyproject.toml pins; nothing is left to drift."""
    configuration = read(ROOT / ".pre-commit-config.yaml")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pinned = [requirement.partition("==")[0] for requirement in groups["check"]]
    for repository in configuration["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            tool = hook["entry"].split()[0]
            assert tool.removeprefix(".venv/bin/") in pinned
            assert "additional_dependencies" not in hook


def test_a_bug_report_asks_for_what_commands_print() -> None:
    form = json.dumps(read(GITHUB / "ISSUE_TEMPLATE" / "bug.yml"))
    for command in ("rallypoint --version", "rallypoint explain", "rallypoint doctor --json"):
        assert command in form


def test_pages_of_the_repository_lead_somewhere() -> None:
    for name in ("CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "THIRD_PARTY_NOTICES.md"):
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / name).read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), (name, link)
