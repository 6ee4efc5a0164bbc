"""Completion scripts, run by the shells that are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import blocks_tested_by

from rallypoint import cli
from rallypoint.cli.completion import _ABOUT_JOBS, _flags_of, completion, script_for
from rallypoint.cli.flags import JobOptions, RunOptions

# A stand-in for the program that names running jobs, one of which could do harm.
JOBS = r"rallypoint() { printf '%s\n' train-1f0e 'my job' '$(touch harm)'; }"
COMPLETED = [
    ("rallypoint expl", ["explain"]),
    ("rallypoint help expl", ["explain"]),
    ("rallypoint run --on-h", ["--on-hang"]),
    ("rallypoint run --on-hang re", ["report", "restart"]),
    ("rallypoint bench all_r", ["all_reduce"]),
    ("rallypoint bench all_reduce --op pro", ["product"]),
    ("rallypoint script slurm --ti", ["--time"]),
    ("rallypoint script jobset --im", ["--image"]),
    ("rallypoint doctor --wa", ["--wait"]),
    ("rallypoint completion f", ["fish"]),
    ("rallypoint stop t", ["train-1f0e"]),
    ("rallyrun --numa-binding e", ["exclusive"]),
    ("rallyrun --npr", ["--nproc-per-node"]),
]
# The words as bash splits them.
IN_BASH = [
    (["rallypoint", "run", "--on-hang", "=", "re"], "report restart"),
    (["rallypoint", "run", "--on-hang", "="], "off report restart stop"),
    (["rallypoint", "run", "--role", ""], ""),
    (["rallypoint", "run", "-r", ""], "0 1 2 3"),
    (["/opt/bin/rallypoint", "logs", "--fol"], "--follow"),
    (["torchrun", "--npr"], "--nproc-per-node"),
    (["rallypoint", "stop", "my"], r"my\ job"),
    (["rallypoint", "stop", "$"], r"\$\(touch\ harm\)"),
]


def in_bash(words: list[str], directory: Path) -> str:
    body = f"{script_for('bash')}\n{JOBS}\n"
    body += 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rallypoint; echo "${COMPREPLY[*]}"'
    command = ["bash", "-c", body, "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory)
    assert done.stderr == ""
    assert list(directory.iterdir()) == []
    return done.stdout.rstrip("\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [*((line.split(" "), " ".join(found)) for line, found in COMPLETED), *IN_BASH],
)
def test_bash(words: list[str], found: str, tmp_path: Path) -> None:
    assert in_bash(words, tmp_path) == found


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed: apt install fish")
@pytest.mark.parametrize(("line", "found"), COMPLETED)
def test_fish(line: str, found: list[str]) -> None:
    jobs = "function rallypoint; echo train-1f0e; end"
    body = f"{script_for('fish')}\n{jobs}\ncomplete -C '{line}'"
    command = ["fish", "--no-config", "-c", body]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [each.partition("\t")[0] for each in done.stdout.splitlines()] == found


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed: apt install zsh")
def test_zsh_reads_its_script() -> None:
    subprocess.run(["zsh", "-f", "-n"], input=script_for("zsh"), text=True, check=True)


def test_the_guides_line(tmp_path: Path) -> None:
    (block,) = blocks_tested_by("tests/unit/cli/test_completion.py::test_the_guides_line")
    program = tmp_path / "rallypoint"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m rallypoint "$@"\n')
    program.chmod(0o755)
    body = f"PATH={tmp_path}:$PATH\n{block.text}\ncomplete -p rallypoint"
    done = subprocess.run(["bash", "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout == "complete -o default -F _rallypoint rallypoint\n"


def test_every_command_about_a_job_completes_jobs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cli._COMMANDS:
        monkeypatch.setattr("sys.argv", ["rallypoint", name, "--help"])
        assert cli.main() == 0
        takes_job = f"usage: rallypoint {name} [JOB]" in capfd.readouterr().out
        assert takes_job is (name in _ABOUT_JOBS), name


def test_each_command_completes_its_own_flags(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(cli._COMMANDS) - {"run", "doctor", "script"}:  # their help leaves some out
        monkeypatch.setattr("sys.argv", ["rallypoint", name, "--help"])
        assert cli.main() == 0
        out = capfd.readouterr().out
        shown = set(re.findall(r"^  (?:-\w, )?(--[a-z][\w-]*)", out, re.MULTILINE))
        assert {flag.name for flag in _flags_of(name)} == shown, name
    of_run = {flag.name for flag in _flags_of("run")}
    assert of_run == set(RunOptions.flags)
    of_doctor = {flag.name for flag in _flags_of("doctor")}
    assert of_doctor == {*JobOptions.flags, "--json", "--path", "--wait", "--help"}
    of_script = {flag.name for flag in _flags_of("script")}
    assert of_script > set(JobOptions.flags) | {"--image", "--time"}
    assert not of_script & {"--print-completion", "--use-env"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [([], "name one shell"), (["tcsh"], "the shell is 'tcsh'; it must be bash, zsh or fish.")],
)
def test_unknown_shells(words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert completion(words) == 2
    assert sentence in capfd.readouterr().err
