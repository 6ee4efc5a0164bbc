"""Logs, the status line and the journal under load, and when something is in their way."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.test_torchrun_logs import files_below

pytestmark = pytest.mark.system

CHATTY = """
import os, sys
rank = os.environ["RANK"]
line = rank + " {:07d} " + "x" * 90
for stream in (sys.stdout, sys.stderr):
    for block in range(0, 20000, 500):
        stream.write("".join(line.format(i) + "\\n" for i in range(block, block + 500)))
"""


def test_eight_chatty_workers_lose_and_tear_nothing(launch: Launch) -> None:
    """32 MB in all, to files and to the terminal's stand-in."""
    flags = ["--nproc-per-node", "8", "--tee", "3", "--log-dir", "logs"]
    assert launch.run(*flags, launch.script(CHATTY)) == 0, launch.err
    expected = {rank: [f"{rank} {i:07d} {'x' * 90}" for i in range(20000)] for rank in range(8)}
    found = files_below(launch.directory / "logs")
    for rank in range(8):
        for name in ("stdout", "stderr"):
            assert found[f"attempt_0/{rank}/{name}.log"].splitlines() == expected[rank]
    for text in (launch.out, launch.err):
        shown: dict[int, list[str]] = {rank: [] for rank in range(8)}
        for line in text.splitlines():
            if line.startswith("[default"):
                rank = int(line[8])
                shown[rank].append(line[11:])
        assert shown == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import os; os.close(1); os.close(2)", ""),
        ("import os; os.write(1, b'x' * 1000000); os._exit(5)", "exited with code 5"),
        ("import os\nif os.fork() == 0:\n    import time; time.sleep(600)\n", ""),
    ],
    ids=["closes its streams", "fills them and exits", "leaves a child with them"],
)
def test_workers_that_end_oddly(text: str, told: str, launch: Launch) -> None:
    status = launch.run("--tee", "3", "--log-dir", "logs", launch.script(text))
    assert status == (1 if told else 0), launch.err
    assert told in launch.err
    assert launch.left_over() == []
    log = files_below(launch.directory / "logs")["attempt_0/0/stdout.log"]
    assert log == ("x" * 1000000 if "1000000" in text else "")


def test_a_slow_terminal_does_not_slow_the_workers(launch: Launch) -> None:
    script = launch.script(
        "import os, pathlib, sys\nsys.stdout.write('y' * 99 + '\\n'); sys.stdout.flush()\n"
        "sys.stdout.write(('z' * 99 + '\\n') * 50000); sys.stdout.flush()\n"
        "pathlib.Path('through').touch()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "run", "--tee", "1", "--log-dir", "l", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=launch.directory,
    ) as process:
        launch.wait_for_file("through")  # with nobody reading
        assert process.stdout is not None
        shown = process.stdout.read()
        assert process.wait(60) == 0
    assert shown.count(b"\n") == 50001


def test_a_place_for_logs_that_cannot_be(launch: Launch) -> None:
    script = launch.script("print('ran')")
    assert launch.run("--log-dir", f"{script}/logs", script) == 1
    assert launch.err.count("\n") == 1
    assert f"cannot create a directory for logs in {script}/logs: Not a directory" in launch.err
    assert launch.run("--json-events", f"{script}/e", script) == 1
    assert f"cannot open {script}/e: Not a directory" in launch.err
    assert launch.out == ""


def test_a_full_disk_is_told_once_and_the_job_goes_on(launch: Launch) -> None:
    words = f"--tee 3 --log-dir small --json-events small/events {script_of_lines(launch)}"
    status, out, err = run_on_a_full_disk(launch, words)
    assert status == 0, err
    lines = [line.removeprefix("[default0]:") for line in out.splitlines()]
    assert lines == [f"line {i}" for i in range(60000)]  # all of it, though the file has not
    assert err.count("No space left on device; the job continues") == 1
    assert "stdout.log: No space left" in err


def test_a_full_disk_fails_who_is_only_redirected_and_is_named(launch: Launch) -> None:
    status, _, err = run_on_a_full_disk(launch, f"-r 3 --log-dir small {script_of_lines(launch)}")
    assert status == 1
    assert "rank 0 raised OSError: [Errno 28] No space left on device" in err
    assert re.search(r"/small/.*/stderr\.log \(its file system is full", err.splitlines()[-1])


def script_of_lines(launch: Launch) -> str:
    return launch.script(
        "import sys\nfor i in range(60000): print('line', i)\nprint('end', file=sys.stderr)\n"
    )


def run_on_a_full_disk(launch: Launch, words: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a job that has 256 KiB in the directory `small`."""
    small = launch.directory / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=256k tmpfs {small}"
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = ["unshare", "--mount", *as_root, "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], check=False).returncode:
        pytest.skip("cannot mount a small file system here (needs root or user namespaces)")
    done = subprocess.run(
        [*unshare, f"{mount} && exec {sys.executable} -m rallypoint run {words}"],
        capture_output=True,
        text=True,
        cwd=launch.directory,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def screen_of(data: bytes) -> list[str]:
    """What a terminal shows of it: carriage returns, and erasing to the end of the line."""
    lines, column = [""], 0
    for token in re.findall(rb"\x1b\[K|\r|\n|[^\r\n\x1b]+", data):
        if token == b"\x1b[K":
            lines[-1] = lines[-1][:column]
        elif token == b"\r":
            column = 0
        elif token == b"\n":
            lines.append("")
            column = 0
        else:
            text = token.decode()
            lines[-1] = lines[-1][:column] + text + lines[-1][column + len(text) :]
            column += len(text)
    return lines


def run_at_a_terminal(
    launch: Launch, *words: str, sees: Callable[[list[str]], None] = lambda _: None
) -> tuple[int, list[bytes]]:
    """Exit status, and all that the terminal had got at each moment when something came.

    `sees` is given what it shows at that moment.
    """
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "run", *words],
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
        cwd=launch.directory,
        env={**os.environ, "TMPDIR": str(launch.directory)},
    )
    os.close(follower)
    data, moments = b"", []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([leader], [], [], 60)[0]:
            break
        try:
            data += os.read(leader, 65536)
        except OSError:  # the last writer is gone
            break
        moments.append(data)
        sees(screen_of(data))
    os.close(leader)
    return process.wait(60), moments


def test_the_status_line_never_mixes_with_output(launch: Launch) -> None:
    """Each round goes on until the line has been seen in it."""
    script = launch.script(
        "import itertools, os, sys, time\n"
        "number, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']\n"
        "for i in itertools.count():\n"
        "    print('part', end=' ', flush=True); time.sleep(0.05); print('whole', i, flush=True)\n"
        "    if i > 10 and os.path.exists('seen.' + number): break\n"
        "    time.sleep(0.15)\n"
        "open(f'whole.{number}.{rank}', 'w')\n"
        "if number == '0' and rank == '1':\n"
        "    while not os.path.exists('whole.0.0'): time.sleep(0.01)\n"
        "    sys.exit(1)\n"
    )
    pattern = re.compile(r"round ([01]) \| \d/2 ranks running \| ([01]) restarts \| [\d.]+ s")

    def note(screen: list[str]) -> None:
        for line in screen[:-1]:
            assert "ranks running" not in line, screen  # only ever the last one
        if found := pattern.fullmatch(screen[-1]):
            assert found[1] == found[2]
            (launch.directory / f"seen.{found[1]}").touch()

    flags = ["--nproc-per-node", "2", "--tee", "3", "--max-restarts", "1", "--log-dir", "l"]
    status, moments = run_at_a_terminal(launch, *flags, script, sees=note)
    assert status == 0
    last = screen_of(moments[-1])
    assert last[-1] == ""
    wholes = [line for line in last if line.startswith("[default")]
    assert all(re.fullmatch(r"\[default\d\]:part whole \d+", line) for line in wholes), wholes
    assert len(wholes) >= 36
    assert any("round 0 failed: rank 1 exited with code 1" in line for line in last)


def test_the_status_line_shows_the_steps(launch: Launch) -> None:
    script = launch.script(
        "import os, time, rallypoint\n"
        "rallypoint.progress(12345, 50000)\n"
        "while not os.path.exists('seen'): time.sleep(0.05)\n"
    )

    def note(screen: list[str]) -> None:
        if screen[-1].endswith("s | step 12,345 of 50,000, 25 %"):
            (launch.directory / "seen").touch()

    status, _ = run_at_a_terminal(launch, "--tee", "3", "--log-dir", "l", script, sees=note)
    assert status == 0


def test_the_status_line_counts_no_recovery_in_place_as_a_restart(launch: Launch) -> None:
    script = launch.script(
        "import os, signal, time\n"
        "import numpy as np\n"
        "import rallypoint as dist\n"
        "from rallypoint import elastic\n"
        "state = elastic.State(step=0)\n"
        "@elastic.run\n"
        "def train(state):\n"
        "    while True:\n"
        "        time.sleep(0.05)\n"
        "        seen = np.array([float(os.path.exists('seen'))])\n"
        "        dist.all_reduce(seen)\n"
        "        if seen[0]: return\n"
        "        with state.update(): state.step += 1\n"
        "        if (state.step, dist.get_rank()) == (3, 1): os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.init_process_group()\n"
        "train(state)\n"
    )
    lines = set()

    def note(screen: list[str]) -> None:
        if found := re.match(r"round [^0] \| \d/\d ranks running \| (\d+) restarts", screen[-1]):
            lines.add(found[1])
            (launch.directory / "seen").touch()

    flags = ["--nproc-per-node", "3", "--tee", "3", "--max-restarts", "1", "--log-dir", "l"]
    status, _ = run_at_a_terminal(launch, *flags, script, sees=note)
    assert (status, lines) == (0, {"0"})


def test_no_status_line_where_nothing_is_hidden_or_wanted(launch: Launch) -> None:
    script = launch.script("import time; time.sleep(1.2); print('done')")
    for flags in ([], ["--tee", "3", "--quiet"]):
        status, moments = run_at_a_terminal(launch, *flags, script)
        assert status == 0
        assert screen_of(moments[-1])[0] in ("done", "[default0]:done")


SPARE = """
import os, pathlib
print("process", os.getpid(), flush=True)
import rallypoint as dist
dist.init_process_group()
pathlib.Path(f"in.{os.getpid()}").touch()
dist.barrier()
while not os.path.exists("end"): pass
"""


@pytest.mark.parametrize("way", ["--tee", "--redirects"])
def test_a_spare_that_replaces_another_one_has_files_of_its_own(launch: Launch, way: str) -> None:
    # With restarts, a spare is replaced also if it was not ready yet.
    flags = ["--nproc-per-node", "1", "--spares", "1", "--max-restarts", "3"]
    flags += [way, "3", "--log-dir", "logs"]
    agent = launch.start(*flags, launch.script(SPARE))
    worker = int(launch.wait_for("in.*")[0].name.partition(".")[2])

    def told() -> dict[str, str]:
        """What each process has said, in whole lines, by its file."""
        files = files_below(launch.directory / "logs").items()
        return {path: text for path, text in files if text.endswith("\n")}

    for files in (2, 3, 4):
        deadline = time.monotonic() + 60
        while len(told()) != files:
            assert time.monotonic() < deadline, launch.err
            time.sleep(0.02)
        if files < 4:
            found = [int(text.split()[-1]) for text in told().values()]
            spare = next(pid for pid in found if pid != worker and Path(f"/proc/{pid}").exists())
            os.kill(spare, signal.SIGKILL)
    (launch.directory / "end").touch()
    assert agent.wait(100) == 0, launch.err
    parts = ("0", "1", "1.2", "1.3")
    assert told().keys() == {f"attempt_0/{part}/stdout.log" for part in parts}


@pytest.mark.parametrize("redirects", ["2", "0:3"], ids=["one stream", "one of two workers"])
def test_no_status_line_where_workers_write_to_the_terminal(redirects: str, launch: Launch) -> None:
    """Their half lines would be erased by it."""
    script = launch.script(
        "import time; print('half', end=' ', flush=True); time.sleep(1.2); print('whole')"
    )
    flags = ["--nproc-per-node", "2", "--redirects", redirects, "--log-dir", "l"]
    status, moments = run_at_a_terminal(launch, *flags, script)
    assert status == 0
    assert b"\x1b" not in moments[-1]
    told = [line for line in screen_of(moments[-1]) if line.startswith("rallypoint: ")]
    assert told[-1].startswith("rallypoint: job succeeded after ")


def test_quiet_and_verbose(launch: Launch) -> None:
    script = launch.script("import os, sys; sys.exit(os.environ['RANK'] == '0')")
    flags = ["--nproc-per-node", "2", "-r", "3", "--log-dir", "l", "--max-restarts", "1"]
    assert launch.run(*flags, "--quiet", script) == 1
    assert launch.err.startswith("rallypoint: job failed: rank 0 exited with code 1\n")
    assert launch.run(*flags, "--verbose", script) == 1
    told = [line for line in launch.err.splitlines() if line.startswith("rallypoint: ")]
    assert "rallypoint: running: round 0 with 2 workers here" in told
    assert any("restart 1 of 1" in line for line in told)
    assert launch.run(*flags, script) == 1
    normal = [line for line in launch.err.splitlines() if line.startswith("rallypoint: ")]
    assert [line.split(":")[1].split(" 0")[0].strip() for line in normal][:2] == ["logs", "round"]
    assert set(normal) < set(told) or len(normal) < len(told)


EVENTS = Path(__file__).parents[2] / "docs/events.md"


COMMON = {"time", "event", "run_id", "node_rank"}  # fields of every event
OF_HANGS = {"hang", "hang_over"}  # test_hang_reports.py
OF_SEVERAL_NODES = {"network"}
OF_SURVIVORS = {"went_on", "summary"}  # test_in_place.py


def documented_events() -> dict[str, set[str]]:
    """Event -> its fields, from the tables of docs/events.md."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|$", EVENTS.read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", fields)) for name, fields in rows}


@pytest.mark.everyday(writer="the launcher")
def test_every_event_is_as_documented(launch: Launch) -> None:
    script = launch.script(
        "import os, pathlib, sys, time\n"
        "rank, count = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if count == '0' and rank == '0': os.kill(os.getpid(), 9)\n"
        "if count == '1': pathlib.Path('second.' + rank).touch()\n"
        "time.sleep(600)\n"
    )
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--json-events", "events.json"]
    process = launch.start(*flags, "--event-log-handler", "console", script)
    launch.wait_for("second.*", 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    lines = (launch.directory / "events.json").read_text().splitlines()
    assert [line for line in launch.err.splitlines() if line.startswith("{")] == lines
    events = [json.loads(line) for line in lines]
    documented = documented_events()
    others = OF_HANGS | OF_SEVERAL_NODES | OF_SURVIVORS | {"preload"}
    assert {event["event"] for event in events} == set(documented) - others
    for event in events:
        assert set(event) == COMMON | documented[event["event"]], event
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    rounds = [event for event in events if event["event"] == "round_began"]
    assert [(each["round"], each["ranks"]) for each in rounds] == [(0, [0, 1]), (1, [0, 1])]
    killed = next(event for event in events if event.get("signal") == "SIGKILL")
    assert (killed["event"], killed["rank"], killed["round"]) == ("worker_ended", 0, 0)
    assert events[-1]["status"] == 143
