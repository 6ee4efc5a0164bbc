"""The source distribution has what building and testing need, and a package index's README."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]

# What is left out: for whoever works on the project with git, and what no test reads.
LEFT_OUT = (".ci/", ".git", ".pre-commit-config.yaml")
PHOTOGRAPHS = re.compile(r"docs/images/.*\.png")
BUILD = """
import sys
from scikit_build_core.build import build_sdist
build_sdist(sys.argv[1])
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    # Not tarfile: Python 3.11.2 has no filters yet, and 3.12 asks for one.
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
    (made,) = (path for path in folder.iterdir() if path.is_dir())
    return made


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_it_holds_what_git_holds(unpacked: Path) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout, or there is no git (Debian: apt-get install git)")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    expected = {
        path
        for path in listed.split("\0")
        if path
        and not path.startswith(LEFT_OUT)
        and not PHOTOGRAPHS.fullmatch(path)
        and (ROOT / path).exists()
    }
    assert files(unpacked) == expected | {"PKG-INFO"}


def test_it_builds_the_same_package(unpacked: Path) -> None:
    """The same sources, of which a wheel takes every file in src/rallypoint."""
    for folder in ("src", "native"):
        here = {path for path in files(ROOT / folder) if "__pycache__" not in path}
        assert files(unpacked / folder) == here
        for path in here:
            original = ROOT / folder / path
            assert (unpacked / folder / path).read_bytes() == original.read_bytes()
            assert os.access(unpacked / folder / path, os.X_OK) == os.access(original, os.X_OK)
    installed = {str(path) for path in importlib.metadata.files("rallypoint") or ()}
    compiled = {path for path in installed if path.endswith((".so", ".pyc", "/guardian"))}
    sources = {path for path in installed - compiled if path.startswith("rallypoint/")}
    assert sources == files(unpacked / "src")


def test_the_readme_leads_to_files_of_this_release(unpacked: Path) -> None:
    info, _, text = (unpacked / "PKG-INFO").read_text().partition("\n\n")
    version = re.findall(r"^Version: (.*)$", info, re.MULTILINE)[0]
    assert "Description-Content-Type: text/markdown" in info
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    ours = [link for link in links if link.startswith(f"{URL}/blob/v{version}/")]
    assert ours
    for link in ours:
        path = link.removeprefix(f"{URL}/blob/v{version}/").partition("#")[0]
        assert (ROOT / path).exists(), link
    assert all(re.match(r"https?://|mailto:|#", link) for link in links)
    # And in a checkout they are as they were.
    assert f"{URL}/blob/" not in (ROOT / "README.md").read_text()


def test_a_package_index_can_show_the_readme(unpacked: Path) -> None:
    markdown = pytest.importorskip(
        "readme_renderer.markdown", reason="readme_renderer is not installed"
    )
    text = (unpacked / "PKG-INFO").read_text().partition("\n\n")[2]
    shown = markdown.render(text)
    assert shown is not None
    assert "<h1" in shown
    assert "<pre" in shown
