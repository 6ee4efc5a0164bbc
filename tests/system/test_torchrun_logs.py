"""Log directories, redirects, tees, filters: the same files and terminal output as torchrun's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.system.conftest import OURS, Launch
from tests.system.test_torchrun_conformance import LAUNCHERS

pytestmark = pytest.mark.system

# Each line is one write: torchrun's tail would cut a line written piece by piece.
WORKER = """
import os, sys
rank, attempt = os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"apple {rank} {attempt}\\n")
sys.stderr.write(f"pear, or {rank} {attempt}\\n")
sys.stdout.write("10%\\r50%\\rdone\\n")
sys.stdout.flush()
if attempt == "0" and rank == "0":
    sys.exit(3)
"""


def run_below(directory: Path) -> Path:
    """The run's directory, beside which we make the link `latest`."""
    (run,) = (path for path in directory.iterdir() if not path.is_symlink())
    return run


def files_below(directory: Path) -> dict[str, str]:
    """Path below the run's directory -> content."""
    run = run_below(directory)
    paths = [path for path in run.rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes().decode() for path in paths}


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(OURS, id="rallypoint", marks=pytest.mark.everyday), LAUNCHERS[1]],
)
def test_files_and_terminal(launcher: tuple[str, ...], launch: Launch) -> None:
    flags = [
        *("--nproc-per-node", "3", "--max-restarts", "1", "--role", "tr", "--log-dir", "logs"),
        *("-r", "0:0,1:3,2:2", "-t", "0:3,1:0,2:1", "--duplicate-stdout-filters", "apple,done"),
        *("--duplicate-stderr-filters", "pear,, or", "--rdzv-id", "job"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
    ]
    assert launch.run(*flags, launch.script(WORKER), launcher=launcher) == 0, launch.err
    run = run_below(launch.directory / "logs")
    assert run.name.startswith("job_")
    found = files_below(launch.directory / "logs")
    expected = {}
    for attempt in (0, 1):
        for rank in range(3):
            out = f"apple {rank} {attempt}\n10%\r50%\rdone\n"
            expected[f"attempt_{attempt}/{rank}/stdout.log"] = out
            expected[f"attempt_{attempt}/{rank}/stderr.log"] = f"pear, or {rank} {attempt}\n"
    for name, text in expected.items():
        if name.startswith("attempt_0/"):
            assert text.startswith(found.get(name, "")), name  # stopped while it wrote, or before
        else:
            assert found[name] == text, name
    apples = found["attempt_1/filtered_stdout.log"].splitlines()
    assert sorted(apples) == [*("[tr0]:apple 0 1", "[tr0]:done", "[tr2]:apple 2 1", "[tr2]:done")]
    assert found["attempt_1/filtered_stderr.log"] == "[tr0]:pear, or 0 1\n"
    shown = launch.out.splitlines()
    for rank in (0, 2):
        for line in (f"apple {rank} 1", "10%", "50%", "done"):
            assert f"[tr{rank}]:{line}" in shown
    assert not [line for line in shown if line.startswith("[tr1]")]
    assert "[tr0]:pear, or 0 1" in launch.err.splitlines()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_filter_of_ranks_hides_but_keeps_files(launcher: tuple[str, ...], launch: Launch) -> None:
    script = launch.script("import os, sys; sys.stdout.write(f\"line of {os.environ['RANK']}\\n\")")
    flags = ["--nproc-per-node", "2", "--local-ranks-filter", "1", "--tee", "3", "--log-dir", "l"]
    assert launch.run(*flags, script, launcher=launcher) == 0, launch.err
    assert launch.out.splitlines() == ["[default1]:line of 1"]
    assert files_below(launch.directory / "l")["attempt_0/0/stdout.log"] == "line of 0\n"
    (launch.directory / "only").mkdir()
    flags = ["--nproc-per-node", "2", "--local-ranks-filter", "0"]
    assert launch.run(*flags, script, launcher=launcher) == 0, launch.err
    assert launch.out.splitlines() == ["line of 0"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_prefix_template_of_torchrun(launcher: tuple[str, ...], launch: Launch) -> None:
    script = launch.script("print('x')")
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}|${rank}|${local_rank}> "}
    flags = ("--nproc-per-node", "2", "--tee", "1", "--log-dir", "l")
    assert launch.run(*flags, script, environ=environ, launcher=launcher) == 0, launch.err
    assert sorted(launch.out.splitlines()) == ["<default|0|0> x", "<default|1|1> x"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_recorded_error_is_kept(launcher: tuple[str, ...], launch: Launch) -> None:
    script = launch.script(
        "import rallypoint\n"
        "@rallypoint.record\n"
        "def main():\n"
        "    raise ValueError('bad thing')\n"
        "main()\n"
    )
    assert launch.run("--log-dir", "l", "-r", "3", script, launcher=launcher) == 1
    text = files_below(launch.directory / "l")["attempt_0/0/error.json"]
    message = json.loads(text)["message"]
    assert message["message"] == "ValueError: bad thing"
    assert "in main" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 1_700_000_000
    assert "ValueError: bad thing" in launch.err


def test_the_logs_are_named_at_the_start_and_in_the_last_line(launch: Launch) -> None:
    script = launch.script("import sys; print('why', file=sys.stderr); sys.exit(4)")
    assert launch.run("--log-dir", "deep/er", "-r", "2", script) == 1
    lines = launch.err.splitlines()
    run = run_below(launch.directory / "deep/er")
    assert lines[0] == f"rallypoint: logs: {run}"
    path = Path(lines[-1].removeprefix("  logs: "))
    assert path == run / "attempt_0/0/stderr.log"
    assert path.read_text() == "why\n"
