"""What fails runs once more, alone, is named, and nothing else is forgiven."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
from tests.rerun import LISTED, MOST_FLAKY, Failure, why_final

ROOT = Path(__file__).parents[3]
TEST = "tests/system/test_x.py::test_y[a-1]"


def failure(test: str = TEST, text: str = "assert 1 == 2", **fields: object) -> Failure:
    return Failure(**{"test": test, "when": "call", "error": "assert", "text": text, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "failed",
    [
        failure(marks=("exact",)),
        failure(when="collect"),
        failure(text="rank 1 was killed by SIGSEGV"),
        failure(text="worker 'gw0' crashed while running 'test_y'"),
        failure(text="==12==ERROR: AddressSanitizer: heap-use-after-free"),
        failure(text="a.cc:3:5: runtime error: signed integer overflow"),
        failure(text="E  tests.system.conftest.LeftBehindError: 12: sleep 600", when="teardown"),
        failure("tests/system/test_listed.py::test_y"),
    ],
    ids=lambda failed: f"{failed.test} {failed.when} {failed.text[:20]}",
)
def test_some_are_final(failed: Failure) -> None:
    listed = ["tests/system/test_listed.py::test_y"]
    assert why_final(failed, listed)
    assert not why_final(failure(), listed)


def test_the_list_says_of_each_what_is_known() -> None:
    for entry in tomllib.loads(LISTED.read_text()).get("flaky", []):
        assert set(entry) == {"test", "date", "cause", "owner"}
        assert isinstance(entry["date"], date)
        assert (ROOT / entry["test"].partition("::")[0]).exists()


IN_PARALLEL = "PYTEST_XDIST_WORKER"  # only the first run is
BEGIN = f"import os, pathlib, pytest\nfirst = {IN_PARALLEL!r} in os.environ\n"
FLAKY = """
def test_flaky(seed, tmp_path):
    pathlib.Path(tmp_path, "log.txt").write_text("first words")
    with open("seeds", "a") as file:
        file.write(f"{seed}\\n")
    assert not first, "the clock"
"""
TWICE = "def test_twice(): assert False\n"
EXACT = "@pytest.mark.exact\ndef test_exact(): assert not first\n"
CRASH = "def test_crash(): first and os.abort()\n"
MANY = f"""
@pytest.mark.parametrize("n", range({MOST_FLAKY + 1}))
def test_many(n): assert not first
"""


class Suite:
    """A copy of what runs failed tests twice, with planted tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tests" / "system").mkdir(parents=True)
        for name in ("__init__.py", "conftest.py", "parts.py", "rerun.py", "flaky.toml"):
            (folder / "tests" / name).write_text((ROOT / "tests" / name).read_text())
        (folder / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")

    def plant(self, text: str) -> None:
        (self.folder / "tests" / "system" / "test_planted.py").write_text(BEGIN + text)

    def run(self) -> subprocess.CompletedProcess[str]:
        twice = str(ROOT / "scripts" / "twice")
        command = [twice, sys.executable, "--quiet", "--numprocesses", "2", "tests"]
        # In a folder of their own: pytest tidies up those of other runs.
        environ = {**os.environ, "TMPDIR": str(self.folder)}
        environ["PYTEST_ADDOPTS"] = "-p no:cacheprovider"
        environ.pop(IN_PARALLEL, None)
        return subprocess.run(
            command, cwd=self.folder, env=environ, check=False, capture_output=True, text=True
        )


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


@pytest.mark.slow
def test_a_flaky_test_is_named_and_does_not_end_the_run(suite: Suite) -> None:
    suite.plant(FLAKY + "def test_good(): pass\n")
    done = suite.run()
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    seed, again = (suite.folder / "seeds").read_text().split()
    assert again == seed  # or a failure that depends on it would be forgiven
    assert last.startswith(f"FLAKY tests/system/test_planted.py::test_flaky (seed {seed}, load ")
    assert "AssertionError: the clock" in last
    kept = suite.folder / last.rpartition("see ")[2]
    assert (kept / "files" / "log.txt").read_text() == "first words"
    assert f"seed {seed}" in (kept / "call.txt").read_text()
    assert "the clock" in (kept / "call.txt").read_text()


@pytest.mark.slow
def test_others_end_it(suite: Suite) -> None:
    suite.plant(FLAKY + TWICE + EXACT + CRASH + FLAKY.replace("flaky", "listed"))
    (suite.folder / "tests" / "flaky.toml").write_text(
        "[[flaky]]\ntest = 'tests/system/test_planted.py::test_listed'\n"
    )
    done = suite.run()
    assert done.returncode == 1
    for reason in (
        "FLAKY tests/system/test_planted.py::test_flaky (seed ",
        "FAILED tests/system/test_planted.py::test_twice (twice: ",
        "FAILED tests/system/test_planted.py::test_exact (exact: ",
        "FAILED tests/system/test_planted.py::test_crash (a process crashed: ",
        "FAILED tests/system/test_planted.py::test_listed (listed in tests/flaky.toml: ",
    ):
        assert reason in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        (MANY, f"{MOST_FLAKY + 1} tests failed that could be run again; {MOST_FLAKY} at most are"),
        ("def test_x(: pass", "test_planted.py (could not be collected: "),
    ],
    ids=["many", "collect"],
)
def test_so_do_many_and_what_cannot_be_read(suite: Suite, planted: str, reason: str) -> None:
    suite.plant(planted)
    done = suite.run()
    assert done.returncode == 1
    assert reason in done.stdout, done.stdout + done.stderr
