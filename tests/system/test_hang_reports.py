"""Jobs that hang say so by themselves, and why; jobs that are slow say nothing.

Which hangs are told, and how often, is held by tests/unit/launch/agent/test_complaints.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from itertools import pairwise
from typing import Any

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_explain import BEGIN, COMMON, NEEDS_TORCH, explain
from tests.system.test_logs import COMMON as OF_EVERY_EVENT
from tests.system.test_logs import documented_events

pytestmark = pytest.mark.system

SLEEPS = """
if rank == culprit:
    time.sleep(600)
dist.all_reduce(ones())
"""
# The culprit comes once there is a file "go"; all stay until there is a file "told".
COMES_LATE = """
while rank == culprit and not os.path.exists("go"):
    time.sleep(0.02)
for _ in range(3):
    dist.all_reduce(ones())
while not os.path.exists("told"):
    time.sleep(0.02)
"""
STEPS = """
end = ones(1) * 0
while end[0] == 0:  # the same on all ranks
    time.sleep(0.02)
    end[0] = os.path.exists("end")
    dist.all_reduce(end)
dist.destroy_process_group()
"""
# The culprit is late once, and then for good.
LATE_TWICE = """
if rank == culprit:
    time.sleep(2)
dist.all_reduce(ones())
if rank == culprit:
    time.sleep(600)
dist.all_reduce(ones())
"""
# Ranks 0 and 1 wait for long, but something else of theirs goes on.
BESIDE = """
group = dist.new_group([0, 1])
if rank == 2:
    time.sleep(7)
    dist.all_reduce(ones())
else:
    work = dist.all_reduce(ones(), async_op=True)
    waiting = threading.Thread(target=work.wait)
    waiting.start()
    for _ in range(400):
        dist.all_reduce(ones(), group=group)
        time.sleep(0.02)
    waiting.join()
dist.destroy_process_group()
"""
# What the engine says to the launcher is said to this process instead.
COMPLAINS = """
import json, socket
from datetime import timedelta
from rallypoint.base import worker_hook
launcher, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
worker_hook.control = worker_hook.ControlSocket(ours.fileno())
"""
# Rank 1 comes to a call once rank 0 has complained three times.
WAITS = """
def poll(work):
    while not work.is_completed():
        try:
            work.wait(timedelta(seconds=0.02))
        except dist.CollectiveTimeoutError:
            pass
def listen():
    for _ in range(3):
        told.append(launcher.recv(1000).decode())
    pathlib.Path("enough").touch()
told = []
if rank == 0:
    threading.Thread(target=listen, daemon=True).start()
while rank == 1 and not os.path.exists("enough"):
    time.sleep(0.01)
{call}
launcher.setblocking(False)
try:
    while rank == 0:
        told.append(launcher.recv(1000).decode())
except BlockingIOError:
    print(json.dumps(told))
"""
# Rank 1 is late to some calls, and comes to the last one once rank 0 has complained of it.
IS_USUAL = """
from rallypoint import _native
_native.tell_long_waits(ours.fileno(), 0.2, 2.0)
waits = []
for _ in range({times}):
    if rank == 1:
        time.sleep(1)
    began = time.monotonic()
    dist.all_reduce(ones())
    waits.append(time.monotonic() - began)
launcher.setblocking(False)
try:
    while True:
        launcher.recv(1000)
except BlockingIOError:
    launcher.setblocking(True)
def listen():
    print(json.dumps([json.loads(launcher.recv(1000))["seconds"], min(waits)]))
    pathlib.Path("enough").touch()
if rank == 0:
    threading.Thread(target=listen, daemon=True).start()
while rank == 1 and not os.path.exists("enough"):
    time.sleep(0.01)
dist.all_reduce(ones())
"""
CALLS = {
    "a collective": "dist.all_reduce(ones())",
    "a message that is polled": "poll((dist.isend if rank else dist.irecv)(ones(), 1 - rank))",
}
KINDS = [
    pytest.param("N", marks=pytest.mark.everyday),
    pytest.param("G", marks=NEEDS_TORCH),
]
# A hang is told once, in the words of that moment. On a busy machine, rank 1 may be about to run
# then ("it runs at worker.py:9 (2 % CPU)"), and those that wait may not have said their lines.
HANGS = re.compile(
    r"rallypoint: the job hangs: rank 1 (?:probably )?never entered all_reduce #3 of default group:"
    r" it .* at worker\.py:\d+.*; ranks? [02].*\n"
)


def events(launch: Launch, name: str) -> list[dict[str, Any]]:
    lines = (launch.directory / "events.json").read_text().splitlines()
    found = [event for event in map(json.loads, lines) if event["event"] == name]
    assert all(set(event) == OF_EVERY_EVENT | documented_events()[name] for event in found)
    return found


def start(launch: Launch, kind: str, body: str, *flags: str) -> None:
    script = launch.script(BEGIN[kind] + COMMON + body)
    words = ("--nproc-per-node", "3", "--json-events", "events.json", *flags, script, "1")
    launch.start(*words)


# Rank 0 has raised an exception, and cannot end; nobody waits for it in a call.
RAISES = """
def work():
    {work}
if rank == 0:
    threading.Thread(target=work).start()
    raise ValueError("bad sample 17")
while not os.path.exists("go"):
    time.sleep(0.01)
"""


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("work", "keeps"),
    [
        ("dist.barrier()", r"waits in barrier #3 at worker\.py:\d+"),
        ("import queue; queue.Queue().get()", r"waits for a queue in its own process at worker"),
    ],
)
def test_a_rank_that_raised_and_cannot_end_is_told(launch: Launch, work: str, keeps: str) -> None:
    start(launch, "N", RAISES.format(work=work), "--hang-after", "1")
    line = rf"the job hangs: rank 0 raised ValueError: bad sample 17 and cannot end: .* {keeps}"
    wait_until(lambda: re.search(line, launch.err), tells=lambda: launch.err)
    assert launch.process is not None
    assert launch.process.poll() is None
    pid = str(launch.process.pid)
    wait_until(lambda: explain(pid).returncode == 3)
    launch.process.send_signal(signal.SIGTERM)
    launch.process.wait(60)
    assert "job failed: rank 0 raised ValueError: bad sample 17" in launch.err


@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_is_told_and_that_the_job_goes_on(launch: Launch, kind: str) -> None:
    start(launch, kind, COMES_LATE, "--hang-after", "1")
    launch.wait_for("ready.*", 3)
    wait_until(lambda: HANGS.search(launch.err), tells=lambda: launch.err)
    (launch.directory / "go").touch()
    over = re.compile(r"the job continues: rank [02] is no longer waiting, after \d[\d.]* m?s\n")
    wait_until(lambda: over.search(HANGS.split(launch.err)[-1]))
    (launch.directory / "told").touch()
    assert launch.process is not None
    assert launch.process.wait(60) == 0, launch.err
    (hang,) = [event for event in events(launch, "hang") if HANGS.search(said(event))]
    assert (hang["ranks"], hang["cause"]) == ([1], "elsewhere")
    assert set(hang["waiting"]) <= {0, 2}
    assert said(hang) in launch.err
    assert events(launch, "hang_over")[-1]["rank"] in (0, 2)


def said(event: dict[str, Any]) -> str:
    return f"rallypoint: the job hangs: {event['sentence']}\n"


@pytest.mark.everyday
def test_a_rank_that_is_stopped_is_told(launch: Launch) -> None:
    """After a tenth of the time, as it cannot just be computing."""
    start(launch, "N", STEPS, "--hang-after", "10")
    launch.wait_for("ready.*", 3)
    assert launch.process is not None
    pid = int((launch.directory / "ready.1").read_text())
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: "the job hangs: rank 1 is stopped (SIGSTOP)" in launch.err)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "the job continues: rank 1 is no longer stopped, after" in launch.err)
    (launch.directory / "end").touch()
    assert launch.process.wait(60) == 0, launch.err


def test_a_rank_that_is_slowed_down_with_signals_is_no_hang(launch: Launch) -> None:
    """As cpulimit does it: stopped many times a second, though never for half a second."""
    start(launch, "N", STEPS, "--hang-after", "5")
    launch.wait_for("ready.*", 3)
    assert launch.process is not None
    pid = int((launch.directory / "ready.1").read_text())
    for _ in range(30):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.06)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.06)
    (launch.directory / "end").touch()
    assert launch.process.wait(60) == 0
    assert launch.err == ""


@pytest.mark.parametrize("kind", ["N", pytest.param("G", marks=NEEDS_TORCH)])
def test_a_chosen_time_counts_alone(launch: Launch, kind: str) -> None:
    start(launch, kind, LATE_TWICE, "--hang-after", "1", "--on-hang", "stop")
    assert launch.process is not None
    assert launch.process.wait(60) == 1
    hung = r"stopped, because the job (?:hung|may have hung): rank 1 .* \((\d+\.\d) s\)"
    waited = re.search(hung, launch.err)
    assert waited is not None, launch.err
    assert float(waited[1]) < 15


@pytest.mark.parametrize("times", [1, 2])
def test_two_long_waits_are_usual_and_one_is_not(launch: Launch, times: int) -> None:
    script = launch.script(COMPLAINS + BEGIN["N"] + COMMON + IS_USUAL.format(times=times))
    assert launch.run("--nproc-per-node", "2", script, "1") == 0, launch.err
    complained_s, shortest_s = json.loads(launch.out)
    if times == 1:
        assert complained_s < 5
    else:
        assert complained_s > 2 * shortest_s - 0.1


@NEEDS_TORCH
@pytest.mark.seldom
def test_a_job_in_which_something_goes_on_says_nothing(launch: Launch) -> None:
    start(launch, "G", BESIDE, "--hang-after", "2")
    assert launch.process is not None
    assert launch.process.wait(60) == 0, launch.err
    assert launch.err == ""
    assert events(launch, "hang") == []


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_who_waits_complains_ever_more_seldom(launch: Launch, call: str) -> None:
    script = launch.script(COMPLAINS + BEGIN["N"] + COMMON + WAITS.format(call=call))
    flags = ("--nproc-per-node", "2", "--hang-after", "0.1")
    assert launch.run(*flags, script, "1") == 0, launch.err
    said = [json.loads(packet) for packet in json.loads(launch.out)]
    assert all(each["kind"] == "wait" for each in said)
    times = [each["seconds"] for each in said if not each["is_over"]]
    assert times[0] >= 0.1
    assert all(later >= 2 * before - 0.01 for before, later in pairwise(times)), times
    over = [each for each in said if each["is_over"]]
    assert over == said[len(times) :]
    if not call.startswith("poll"):  # or else it may be done while nobody waits
        assert len(over) == 1
        assert over[0]["seconds"] >= times[-1]


@pytest.mark.everyday
def test_a_restart(launch: Launch) -> None:
    """On a busy machine, a rank may also be late at the start, and that cost a restart."""
    flags = ("--hang-after", "2", "--on-hang", "restart", "--max-restarts", "100")
    start(launch, "N", COMES_LATE, *flags)
    why = re.compile(
        r"rallypoint: round \d+ ended: the job hung: rank 1 never entered all_reduce #3 .*; "
        r"restart \d+ of 100\n"
    )
    wait_until(lambda: why.search(launch.err), tells=lambda: launch.err)
    for name in ("go", "told"):
        (launch.directory / name).touch()
    assert launch.process is not None
    assert launch.process.wait(60) == 0, launch.err


def test_a_job_that_is_to_end(launch: Launch) -> None:
    flags = ("--hang-after", "2", "--on-hang", "stop", "--max-restarts", "3", "--quiet")
    start(launch, "N", SLEEPS, *flags)
    assert launch.process is not None
    assert launch.process.wait(60) == 1
    why = r"^rallypoint: stopped, because the job hung: rank 1 never .* s\), after \d+\.\d s$"
    assert re.search(why, launch.err, re.MULTILINE), launch.err
    assert len(events(launch, "round_began")) == 1
    launch.expect_nothing_left()
    done = explain(str(launch.process.pid))
    assert done.returncode == 3
    assert done.stdout.startswith("rank 1 never entered all_reduce #3")
    assert "the launcher stopped it, because the job hung: rank 1 never entered" in done.stdout
