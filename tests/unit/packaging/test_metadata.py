"""What the installed package says of itself, and that each fact is defined in one place."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rallypoint
from rallypoint.rendezvous.transport import codec

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
META = importlib.metadata.metadata("rallypoint")
SBOM = "rallypoint.cdx.json"


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


def test_the_bill_of_materials_lists_the_compiled_in_code_of_others() -> None:
    """PEP 770: a scanner that reads it knows which nanobind is in the package."""
    files = importlib.metadata.files("rallypoint") or []
    (path,) = (path for path in files if path.parent.name == "sboms")
    assert path.parts[-3:] == (f"rallypoint-{META['Version']}.dist-info", "sboms", SBOM)
    sbom = json.loads(Path(str(path.locate())).read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert sbom["metadata"]["component"]["purl"] == f"pkg:pypi/rallypoint@{META['Version']}"
    components = {each["name"]: each for each in sbom["components"]}
    assert {"nanobind", "robin-map"} <= set(components)
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text()
    for name, each in components.items():
        assert name in notices
        (licence,) = each["licenses"]
        for identifier in licence["expression"].split(" WITH "):
            assert identifier in notices, name
    for name in ("nanobind", "robin-map"):
        version = components[name]["version"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert re.fullmatch(rf"pkg:\w+/.*{name}@v?{version}", components[name]["purl"])


def test_the_package_has_types_and_no_tests() -> None:
    files = importlib.metadata.files("rallypoint") or []
    scripts = {path.name for path in files if path.parent.name == "bin"}
    assert scripts == {"rallypoint", "rallyrun"}
    tops = {path.parts[0] for path in files if path.parts[0] != ".."}
    itself = f"rallypoint-{META['Version']}.dist-info"
    assert tops == {"rallypoint", itself, "rallypoint_worker.pth"}
    package = {path.relative_to("rallypoint") for path in files if path.parts[0] == "rallypoint"}
    assert {Path("py.typed"), Path("__init__.pyi")} <= {Path(str(path)) for path in package}
    assert not [path for path in package if {"tests", "testing"} & set(path.parts)]
    assert not [path for path in package if path.name.startswith(("test_", "conftest"))]


def test_the_changelog_has_the_version_and_its_date() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert sections[0] == ("Unreleased", "")
    newest, date = sections[1]
    assert newest == PROJECT["project"]["version"]
    assert date
    home = PROJECT["project"]["urls"]["Homepage"]
    assert f"[Unreleased]: {home}/compare/v{newest}...HEAD\n" in text
    for version, _ in sections[1:]:
        assert re.search(rf"^\[{version}\]: {home}/\S+v{version}$", text, re.MULTILINE)


def test_each_minor_version_has_a_protocol_of_its_own() -> None:
    """So that their launchers refuse each other: docs/upgrading.md promises it.

    A new minor version adds its row, and raises VERSION if it is still that of the one before.
    """
    protocols = {"0.1": 7, "0.2": 10}
    assert len(set(protocols.values())) == len(protocols)
    minor = ".".join(PROJECT["project"]["version"].split(".")[:2])
    assert protocols[minor] <= codec.VERSION


def test_the_installed_guardian_can_be_executed() -> None:
    guardian = Path(rallypoint.__file__).parent / "launch" / "agent" / "guardian"
    asked = subprocess.run([guardian], capture_output=True, check=False, timeout=60)
    assert asked.returncode == 2  # it was told nothing to guard
