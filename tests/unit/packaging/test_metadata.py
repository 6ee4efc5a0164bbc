"""What the installed package says of itself, and that each fact is defined in one place."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rallypoint

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
META = importlib.metadata.metadata("rallypoint")


def supported_pythons() -> list[str]:
    """Such as 3.11, 3.12, as the classifiers say."""
    found = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    return sorted(found, key=lambda text: int(text[2:]))


def test_the_version_is_defined_once() -> None:
    version = PROJECT["project"]["version"]
    assert rallypoint.__version__ == META["Version"] == version
    command = [sys.executable, "-m", "rallypoint", "--version"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told == f"rallypoint {version}\n"


def test_the_version_costs_nothing_until_it_is_asked_for() -> None:
    code = "import sys, rallypoint; sys.exit('importlib.metadata' in sys.modules)"
    # Not the interpreter's site, which may load it for other packages.
    command = [sys.executable, "-S", "-c", f"import sys; sys.path = {sys.path!r}; {code}"]
    subprocess.run(command, check=True)


def test_every_page_is_the_projects_own() -> None:
    urls = dict(line.split(", ", 1) for line in META.get_all("Project-URL") or ())
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())
    home = urls["Homepage"].removeprefix("https://github.com/")
    readme = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in readme["substitutions"]:
        assert f"/{home}/" in each["replacement"]
    for path in ("SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml"):
        if (ROOT / path).exists():
            own = set(re.findall(r"github\.com/([\w-]+/[\w-]+)", (ROOT / path).read_text()))
            assert own == {home}, path


def test_every_supported_python_is_named_everywhere() -> None:
    pythons = supported_pythons()
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{python.replace('.', '')}-*" for python in pythons]
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if workflow.exists():
        tested = set(re.findall(r'python: "(3\.\d+)"', workflow.read_text()))
        assert tested == set(pythons)
    # The wheel of the stable ABI serves all but the first.
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == built[1][:5]


def test_pytorchs_versions_are_those_of_the_guide_and_of_the_refusal() -> None:
    (extra,) = PROJECT["project"]["optional-dependencies"]["torch"]
    oldest = extra.removeprefix("torch>=")
    newest = PROJECT["dependency-groups"]["torch-newest"][0].removeprefix("torch==")[:-2]
    guide = (ROOT / "docs" / "guides" / "pytorch.md").read_text()
    assert f"PyTorch {oldest} to {newest}" in guide
    refusal = (ROOT / "src" / "rallypoint" / "pytorch" / "versions.py").read_text()
    assert f"needs {oldest} " in refusal
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if workflow.exists():
        tested = set(re.findall(r'torch: "(\d+\.\d+)\.\d+"', workflow.read_text()))
        assert tested == {"2.13", "2.14", newest}


def test_licences_are_installed() -> None:
    files = importlib.metadata.files("rallypoint") or []
    licences = {path.name: path for path in files if "licenses" in path.parts}
    assert set(licences) == set(PROJECT["project"]["license-files"])
    notices = Path(str(licences["THIRD_PARTY_NOTICES.md"].locate())).read_text()
    for who in ("Wenzel Jakob", "Thibaut Goetghebuer-Planchon"):
        assert who in notices


def test_nanobinds_licence_is_that_of_the_installed_one() -> None:
    nanobind = pytest.importorskip("nanobind", reason="nanobind is not installed")
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text().split()
    licence = next(
        Path(str(path.locate())).read_text()
        for path in importlib.metadata.files("nanobind") or ()
        if path.name == "LICENSE"
    )
    robin = Path(nanobind.__file__).parent / "ext/robin_map/include/tsl/robin_map.h"
    header = robin.read_text().split("*/")[0].replace("/**", "").replace("\n *", "\n")
    for text in (licence, header):
        assert " ".join(text.split()) in " ".join(notices)


def test_the_installed_guardian_can_be_executed() -> None:
    guardian = Path(rallypoint.__file__).parent / "launch" / "agent" / "guardian"
    asked = subprocess.run([guardian], capture_output=True, check=False, timeout=60)
    assert asked.returncode == 2  # it was told nothing to guard
