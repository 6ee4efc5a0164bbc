"""What `make` shows while it compiles, with commands that only print what a build prints."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import ROOT

PROGRAM = ROOT / "scripts" / "build_progress.py"
BUILD = """
print("-- The CXX compiler identification is GNU 12.2.0")
print("[0/2] Re-checking globbed directories...")
print("[1/2] Re-running CMake...")
for done in range(1, 9):
    print(f"  [{done}/8] Building CXX object native/file_{done}.cc.o")
"""
FAILING = """
import sys
print("[1/8] Building CXX object native/file_1.cc.o")
print("FAILED: [code=1] native/file_2.cc.o")
print("native/file_2.cc:7:3: error: 'widht' was not declared in this scope")
sys.exit(3)
"""


def build(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [
        sys.executable,
        PROGRAM,
        "it",
        folder / "log",
        sys.executable,
        "-c",
        code,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def without_times(text: str) -> str:
    return re.sub(r"\b\d+ s\b", "N s", text)


def test_without_a_terminal_there_is_a_line_at_each_quarter(tmp_path: Path) -> None:
    done = build(BUILD, tmp_path)
    assert without_times(done.stdout).splitlines() == [
        "building it",
        "building it: 2 of 8 files, about N s left",
        "building it: 4 of 8 files, about N s left",
        "building it: 6 of 8 files, about N s left",
        "building it: 8 of 8 files",
        "built it in N s",
    ]
    assert (done.returncode, done.stderr) == (0, "")
    assert "compiler identification" in (tmp_path / "log").read_text()


def test_what_a_compiler_says_of_an_error_is_shown(tmp_path: Path) -> None:
    done = build(FAILING, tmp_path)
    assert done.returncode == 3
    first, second, last = without_times(done.stderr).splitlines()
    assert first == "FAILED: [code=1] native/file_2.cc.o"
    assert second == "native/file_2.cc:7:3: error: 'widht' was not declared in this scope"
    assert last.startswith("rallypoint: building it failed after N s: see above; all output is in ")


def test_a_failure_of_another_kind_shows_the_last_lines(tmp_path: Path) -> None:
    done = build("print('no room left'); raise SystemExit(1)", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("no room left\n")


def test_on_a_terminal_one_line_is_rewritten(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command: list[str | Path] = [
        sys.executable,
        PROGRAM,
        "it",
        tmp_path / "log",
        sys.executable,
        "-c",
        BUILD,
    ]
    subprocess.run(command, stdout=theirs, check=True, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    shown = without_times(os.read(ours, 1 << 16).decode())
    os.close(ours)
    assert "\r\033[Kbuilding it: 5 of 8 files, about N s left\r" in shown
    assert shown.endswith("\r\033[Kbuilt it in N s\r\n")


@pytest.mark.parametrize("signal", [2, 9])
def test_the_end_of_the_build_by_a_signal_is_its_status(signal: int, tmp_path: Path) -> None:
    done = build(f"import os; os.kill(os.getpid(), {signal})", tmp_path)
    assert done.returncode == 128 + signal
