"""What is kept of real jobs after their end, and what top, page and ps show of it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from tests.pages import blocks_tested_by
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_in_place import PROGRAM
from tests.system.test_jobs import rallypoint
from tests.system.test_page import served
from tests.system.test_top import seen

pytestmark = pytest.mark.system

# Steps of a hundredth of a second. In round 0, rank 1 dies after step 20 if that is asked for;
# round 1 begins again with step 11.
STEPS = """
import os, pathlib, sys, time, rallypoint
rank, number = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pathlib.Path(f"ready.{number}.{rank}").touch()
how = sys.argv[1]
for step in range(1 + 10 * number, 41):
    time.sleep(0.01)
    rallypoint.progress(step, 40)
    if number == 0 and rank == 1 and step == 20 and how != "well":
        time.sleep(0.2)
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "raise":
            raise ValueError("no such thing")
        time.sleep(600)
"""


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are kept: of this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/rallypoint"


def run(launch: Launch, how: str, *flags: str, environ: dict[str, str] | None = None) -> int:
    words = ("--nproc-per-node", "2", "--rdzv-id", "my-job", *flags)
    return launch.run(*words, launch.script(STEPS), how, "--api-key", "hunter2", environ=environ)


def events_of(found: dict[str, object]) -> list[tuple[str, str]]:
    events = found["events"]
    assert isinstance(events, list)
    return [(each["kind"], each["text"]) for each in events]


def listed() -> list[dict[str, object]]:
    lines = rallypoint("ps", "--all", "--json").stdout.splitlines()
    return [row for row in map(json.loads, lines) if row.get("phase") == "ended"]


@pytest.mark.everyday
def test_a_success(launch: Launch, kept: Path) -> None:
    assert run(launch, "well") == 0
    found = seen("my-job")
    assert (found["status"], found["headline"]) == (0, "the job succeeded")
    assert (found["step"], found["total"], found["losses"], found["restarts"]) == (40, 40, 0, 0)
    assert events_of(found) == [
        ("round", "round 0 begins with 2 ranks"),
        ("end", "the job succeeded"),
    ]
    (row,) = listed()
    assert (row["name"], row["status"], row["step"]) == ("my-job", 0, 40)
    uptime_s, trained = float(str(found["uptime_s"])), float(str(found["trained"]))
    assert 39 * 0.01 <= trained * uptime_s <= uptime_s
    (path,) = kept.iterdir()
    assert "hunter2" not in path.read_text()
    assert re.search(r"^my-job  round 0  2 ranks, 1 node  ended \d+ (s|min) ago, exit 0, after",
                     rallypoint("top", "my-job").stdout)  # fmt: skip
    line = r"^my-job +\d+ +\S+ \S+ +0 +\S+ m?s +40 +\d+\.\d % +/.*\.\.\.$"
    assert re.search(line, rallypoint("ps", "-a").stdout, re.MULTILINE)


def test_commands_about_running_jobs_say_how_a_job_has_ended(launch: Launch) -> None:
    for command in ("status", "explain"):
        done = rallypoint(command, "my-job")
        assert done.returncode == 5
        assert "no job my-job runs on this machine, and none has ended" in done.stderr
    assert run(launch, "well") == 0
    ended = r"ended \d+(ms|\.\d s| ms) ago with status 0; see: rallypoint top"
    trace = ("trace", "-o", str(launch.directory / "trace.json"))
    for words in (("explain",), ("logs",), trace, ("status",), ("stacks",), ("stop",)):
        done = rallypoint(*words, "my-job")
        assert done.returncode == 5
        assert re.search(rf"^rallypoint {words[0]}: my-job {ended} my-job$", done.stderr, re.M), (
            done.stderr
        )
        done = rallypoint(*words, "no-such-job")
        assert done.returncode == 5
        assert "no job no-such-job runs on this machine, and none has ended" in done.stderr
    done = rallypoint("status")
    last = rf"no job of yours runs on this machine; the last one, my-job, {ended}$"
    assert re.search(last, done.stderr, re.M), done.stderr


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_failure_has_the_sentence_of_explain(launch: Launch, how: str) -> None:
    assert run(launch, how) == 1
    found, why = seen("my-job"), rallypoint("explain", "my-job").stdout
    assert (found["status"], found["headline"]) == (1, why.splitlines()[0])
    kinds = [kind for kind, _ in events_of(found)]
    assert kinds == ["round", "end"]
    assert "rank 1" in events_of(found)[-1][1]


@pytest.mark.everyday
def test_a_killed_worker_and_a_restart(launch: Launch, tmp_path: Path) -> None:
    assert run(launch, "kill", "--max-restarts", "1") == 0
    found = seen("my-job")
    assert (found["round"], found["losses"], found["restarts"], found["step"]) == (1, 1, 1, 40)
    assert events_of(found) == [
        ("round", "round 0 begins with 2 ranks"),
        ("loss", "rank 1 was killed by SIGKILL"),
        ("round", "round 1 begins with 2 ranks: restart 1 of 1"),
        ("end", "the job succeeded"),
    ]
    saved = str(tmp_path / "saved.html")
    assert rallypoint("page", "my-job", "--save", saved).returncode == 0
    text = Path(saved).read_text()
    assert "rank 1 was killed by SIGKILL" in text
    assert '"status": 0' in text


def test_a_job_that_ends_while_it_is_looked_at(launch: Launch) -> None:
    """Before its rates are known, which takes two seconds."""
    flags = ("--nproc-per-node", "2", "--rdzv-id", "my-job")
    launch.start(*flags, launch.script(STEPS), "well")
    launch.wait_for("ready.0.*", 2)
    assert seen("my-job")["headline"] == "the job succeeded"


def test_a_loss_in_place(launch: Launch) -> None:
    flags = ("--nproc-per-node", "3", "--max-restarts", "0", "--rdzv-id", "my-job")
    launch.start(*flags, PROGRAM, str(launch.directory), "100000", "0.01", "until")
    logs = launch.wait_for("*.log", 3)
    wait_until(lambda: all(each.stat().st_size > 2000 for each in logs))
    os.kill(int(logs[0].stem), signal.SIGKILL)

    def is_told() -> bool:  # while the job runs, too
        found = json.loads(rallypoint("top", "--once", "--json", "my-job").stdout)
        return bool(found["losses"] == 1 and found["recovery_s"] > 0 and found["trained"] > 0)

    wait_until(is_told)
    screen = rallypoint("top", "--once", "my-job").stdout
    assert re.search(r"trained \d+\.\d %  losses 1 \(\d+ms\)  restarts 0$", screen, re.MULTILINE), (
        screen
    )
    assert re.search(
        r"^\d\d:\d\d:\d\d rank \d \(pid \d+\) was killed by SIGKILL; ", screen, re.MULTILINE
    )
    (launch.directory / "enough").touch()
    assert launch.process is not None
    assert launch.process.wait(100) == 0
    found = seen("my-job")
    assert (found["status"], found["losses"], found["restarts"]) == (0, 1, 0)
    assert [kind for kind, _ in events_of(found)] == ["round", "round", "loss", "end"]


def test_a_killed_agent_leaves_nothing(launch: Launch) -> None:
    words = ("--nproc-per-node", "2", "--rdzv-id", "my-job", launch.script(STEPS), "wait")
    process = launch.start(*words)
    launch.wait_for("ready.0.*", 2)
    process.kill()
    process.wait()
    launch.expect_nothing_left()
    done = rallypoint("top", "my-job")
    assert done.returncode == 5
    assert "none has ended that this machine knows of" in done.stderr
    assert listed() == []


@pytest.mark.everyday
def test_two_jobs_of_one_name(launch: Launch) -> None:
    """The running one is shown, and else the last."""
    run(launch, "raise")
    run(launch, "well")
    assert [row["status"] for row in listed()] == [0, 1]
    assert seen("my-job")["status"] == 0
    older = str(listed()[1]["pid"])
    assert seen(older)["status"] == 1
    process = launch.start(
        *("--nproc-per-node", "2", "--rdzv-id", "my-job", launch.script(STEPS), "wait")
    )
    launch.wait_for("ready.0.*", 2)
    wait_until(
        lambda: json.loads(rallypoint("top", "--once", "--json", "my-job").stdout)["status"] is None
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    found = seen("my-job")
    assert found["status"] == 143
    assert "signal" in [kind for kind, _ in events_of(found)]


def test_nothing_is_kept_if_that_is_not_wanted(launch: Launch, kept: Path) -> None:
    assert run(launch, "well", "--no-history") == 0
    assert run(launch, "well", environ={"RALLYPOINT_HISTORY": "off"}) == 0
    assert not kept.exists()
    assert run(launch, "well", environ={"RALLYPOINT_HISTORY": "of"}) == 2
    assert "RALLYPOINT_HISTORY is 'of'; it must be on or off." in launch.err


def test_without_a_place_for_it_the_job_is_unharmed(launch: Launch) -> None:
    (launch.directory / "file").touch()
    for place in ("/proc/1", str(launch.directory / "file"), "relative"):
        assert run(launch, "well", environ={"XDG_STATE_HOME": place}) == 0
        assert launch.err == ""


def test_the_guides_commands(launch: Launch) -> None:
    assert run(launch, "well") == 0
    for block in blocks_tested_by("tests/system/test_history.py::test_the_guides_commands"):
        for program, *words in block.commands():
            assert program == "rallypoint"
            done = rallypoint(*words)
            assert done.returncode == 0, done.stderr
            assert "my-job" in done.stdout


def test_a_page_of_it(launch: Launch) -> None:
    """It is served until Ctrl-C, as the page of a running job."""
    assert run(launch, "kill", "--max-restarts", "1") == 0
    with served("my-job") as page:
        data = page.data()
        assert (data["has_ended"], data["status"], data["restarts"]) == (True, 0, 1)
        events = data["events"]
        assert isinstance(events, list)
        assert [each["kind"] for each in events] == ["round", "loss", "round", "end"]
        assert float(str(data["job_began"])) <= events[0]["at"] <= events[-1]["at"]
        assert data["speeds"]
        page.process.send_signal(signal.SIGINT)
        assert page.process.wait(60) == 0


def test_each_node_keeps_its_own_part(
    launch: Launch, tmp_path: Path, free_port: int, kept: Path
) -> None:
    """Node 0 knows that a rank was lost on node 1, which knows how."""
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-id", "my-job"]
    flags += ["--master-port", str(free_port), launch.script(STEPS), "kill"]
    other = tmp_path / "other"
    other.mkdir()
    second = Launch(other)
    second.start("--node-rank", "1", *flags)
    assert launch.run("--node-rank", "0", *flags) == 0
    assert second.process is not None
    assert second.process.wait(60) == 0
    second.expect_nothing_left()
    parts = {int(str(row["node_rank"])): seen(str(row["pid"])) for row in listed()}
    assert sorted(parts) == [0, 1]
    texts = {
        node: [text for kind, text in events_of(parts[node]) if kind == "loss"] for node in parts
    }
    assert texts[1] == ["rank 1 was killed by SIGKILL"]
    assert len(texts[0]) == 1
    assert [parts[node]["losses"] for node in (0, 1)] == [1, 1]
    assert [parts[node]["restarts"] for node in (0, 1)] == [1, 1]
    first = (each.read_text() for each in kept.iterdir())
    assert any('"losses":{"elsewhere":1}' in text for text in first)
