"""Jobs that hang say so by themselves, once, and why; jobs that are slow say nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from itertools import islice, pairwise
from typing import Any

import pytest
from tests.conftest import EACH_WAY, SOON_S
from tests.system.conftest import Launch
from tests.system.test_explain import BEGIN, COMMON, NEEDS_TORCH, explain, worker_pids
from tests.system.test_logs import COMMON as OF_EVERY_EVENT
from tests.system.test_logs import documented_events

pytestmark = pytest.mark.system

SLEEPS = """
if rank == culprit:
    time.sleep(600)
dist.all_reduce(ones())
"""
SLEEPS_ONCE = """
if rank == culprit and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
dist.all_reduce(ones())
"""
COMES_LATE = """
if rank == culprit:
    time.sleep(6)
for _ in range(20):
    dist.all_reduce(ones())
    time.sleep(0.05)
pathlib.Path(f"late.{rank}").touch()
time.sleep(600)
"""
EXCHANGES = """
if rank == culprit:
    time.sleep(600)
other = (rank + 1) % size
(dist.recv if other == culprit else dist.send)(ones(), culprit if other == culprit else other)
"""
# Each call takes a second: ten times that is not reached.
SLOW = """
for _ in range(2):
    time.sleep(1)
    dist.all_reduce(ones())
if rank == culprit:
    time.sleep(4)
dist.all_reduce(ones())
dist.destroy_process_group()
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
# Kinds of calls, and slow jobs; in CI, the first two.
SLOW_WAYS = (
    *(("N", "slow", SLOW), ("G", "beside", BESIDE)),
    *(("G", "slow", SLOW), ("N", "beside", BESIDE)),
)
# What the engine says to the launcher, if it is said to this process instead.
COMPLAINS = """
import socket
from datetime import timedelta
from rallypoint.base import worker_hook
launcher, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
worker_hook.control_fd = ours.fileno()
"""
WAITS = """
def poll(work):
    while not work.is_completed():
        try:
            work.wait(timedelta(seconds=0.1))
        except dist.CollectiveTimeoutError:
            pass
for _ in range(20):
    dist.all_reduce(ones())
if rank == culprit:
    time.sleep(5.5)
{call}
launcher.setblocking(False)
try:
    while rank == 0:
        print(launcher.recv(1000).decode())
except BlockingIOError:
    pass
"""
CALLS = {
    "a collective": "dist.all_reduce(ones())",
    "a collective that is polled": "poll(dist.all_reduce(ones(), async_op=True))",
    "a message": "(dist.send if rank else dist.recv)(ones(), 1 - rank)",
    "a message that is polled": "poll((dist.isend if rank else dist.irecv)(ones(), 1 - rank))",
}
LINE = re.compile(
    r"(?m)^rallypoint: the job hangs: rank 1 never entered all_reduce #3 of default group: it is in"
    r" time\.sleep at worker\.py:\d+; ranks 0, 2 wait for it at worker\.py:\d+ \(\d+\.\d s\)\.$"
)
KINDS = ["N", pytest.param("G", marks=NEEDS_TORCH)]


def wait_for_text(launch: Launch, text: str, *, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while text not in launch.err:
        assert time.monotonic() < deadline, launch.err
        time.sleep(0.05)


def events(launch: Launch, name: str) -> list[dict[str, Any]]:
    lines = (launch.directory / "events.json").read_text().splitlines()
    found = [event for event in map(json.loads, lines) if event["event"] == name]
    assert all(set(event) == OF_EVERY_EVENT | documented_events()[name] for event in found)
    return found


def start(launch: Launch, kind: str, body: str, *flags: str) -> None:
    script = launch.script(BEGIN[kind] + COMMON + body)
    words = ("--nproc-per-node", "3", "--json-events", "events.json", *flags, script, "1")
    launch.start(*words)


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("T", marks=pytest.mark.needs_torch)])
def test_a_hang_is_told_once(launch: Launch, kind: str) -> None:
    start(launch, kind, SLEEPS, "--hang-after", "2")
    launch.wait_for("ready.*", 3)
    began = time.monotonic()
    wait_for_text(launch, "the job hangs")
    assert 2 <= time.monotonic() - began < max(6.0, 2 + SOON_S)
    assert launch.process is not None
    time.sleep(7)  # each of those who wait complains again
    assert launch.process.poll() is None
    assert len(LINE.findall(launch.err)) == len(launch.err.splitlines()) == 1, launch.err
    (event,) = events(launch, "hang")
    assert (event["ranks"], event["waiting"], event["cause"]) == ([1], [0, 2], "elsewhere")
    assert event["sentence"] in launch.err
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_goes_on_says_so(launch: Launch, kind: str) -> None:
    start(launch, kind, COMES_LATE, "--hang-after", "2")
    launch.wait_for("late.*", 3)
    wait_for_text(launch, "the job goes on")
    assert LINE.match(launch.err)
    assert re.search(
        r"the job goes on: rank [02] is no longer waiting, after \d\.\d s$", launch.err
    )
    (event,) = events(launch, "hang_over")
    assert event["rank"] in (0, 2)
    assert 3 < event["waited_s"] < 8


STEPS = """
end = ones(1) * 0
while end[0] == 0:  # the same on all ranks
    time.sleep(0.02)
    end[0] = os.path.exists("end")
    dist.all_reduce(end)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_stopped_is_told_sooner(launch: Launch, kind: str) -> None:
    """A tenth of the time is enough, as it cannot just be computing."""
    start(launch, kind, STEPS, "--hang-after", "20")
    launch.wait_for("ready.*", 3)
    assert launch.process is not None
    pid = worker_pids(launch.process.pid)[1]
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    wait_for_text(launch, "the job hangs: rank 1 is stopped (SIGSTOP)")
    assert 2 <= time.monotonic() - began < max(6.0, 2 + SOON_S)
    os.kill(pid, signal.SIGCONT)
    wait_for_text(launch, "the job goes on: rank 1 is no longer stopped, after")
    (launch.directory / "end").touch()
    assert launch.process.wait(30) == 0
    assert len(launch.err.splitlines()) == 2, launch.err


def test_a_rank_that_is_slowed_down_with_signals_is_no_hang(launch: Launch) -> None:
    """As cpulimit does it: stopped many times a second, though never for half a second."""
    start(launch, "N", STEPS, "--hang-after", "5")
    launch.wait_for("ready.*", 3)
    assert launch.process is not None
    pid = worker_pids(launch.process.pid)[1]
    for _ in range(30):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.06)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.06)
    (launch.directory / "end").touch()
    assert launch.process.wait(30) == 0
    assert launch.err == ""


def test_a_stopped_rank_that_nobody_waits_for_yet_is_told_once_they_do(launch: Launch) -> None:
    late = 'if rank != culprit:\n    time.sleep(3)\npathlib.Path(f"late.{rank}").touch()\n'
    start(launch, "N", late + STEPS, "--hang-after", "10")
    launch.wait_for("ready.*", 3)
    assert launch.process is not None
    pid = worker_pids(launch.process.pid)[1]
    os.kill(pid, signal.SIGSTOP)
    launch.wait_for("late.[02]", 2)
    began = time.monotonic()
    wait_for_text(launch, "the job hangs: rank 1 is stopped (SIGSTOP)")  # after 1, 2, 4 s
    assert 0.5 <= time.monotonic() - began < max(7.0, 2 + SOON_S), launch.err
    os.kill(pid, signal.SIGCONT)
    (launch.directory / "end").touch()
    assert launch.process.wait(30) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_sends_and_receives(launch: Launch, kind: str) -> None:
    start(launch, kind, EXCHANGES, "--hang-after", "2")
    wait_for_text(launch, "the job hangs: rank 1 ")
    assert "sleep at worker.py:" in launch.err


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(kind, body, id=f"{kind}-{name}", marks=NEEDS_TORCH if kind == "G" else ())
        for kind, name, body in islice(SLOW_WAYS, None if EACH_WAY else 2)
    ],
)
def test_a_slow_job_says_nothing(launch: Launch, kind: str, body: str) -> None:
    start(launch, kind, body, "--hang-after", "2")
    assert launch.process is not None
    assert launch.process.wait(60) == 0, launch.err
    assert launch.err == ""
    assert events(launch, "hang") == []


@pytest.mark.parametrize("flags", [("--on-hang", "off"), ()], ids=["off", "half a minute"])
def test_nothing_is_told_before_it_is_time(launch: Launch, flags: tuple[str, ...]) -> None:
    after = ("--hang-after", "1") if flags else ()
    start(launch, "N", SLEEPS, *flags, *after)
    launch.wait_for("ready.*", 3)
    time.sleep(4)
    assert launch.err == ""


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_who_waits_complains_ever_more_seldom(launch: Launch, call: str) -> None:
    script = launch.script(COMPLAINS + BEGIN["N"] + COMMON + WAITS.format(call=call))
    assert launch.run("--nproc-per-node", "2", "--hang-after", "1", script, "1") == 0, launch.err
    said = [json.loads(line) for line in launch.out.splitlines()]
    assert all(each["kind"] == "wait" for each in said)
    times = [each["seconds"] for each in said if not each["is_over"]]
    assert 1 <= times[0] < 8
    assert all(later >= 2 * before - 0.01 for before, later in pairwise(times))
    over = [each for each in said if each["is_over"]]
    assert over == said[len(times) :]
    if not call.startswith("poll"):  # or else it may be done while nobody waits
        assert len(over) == 1
        assert 5 < over[0]["seconds"] < 8


def test_a_restart(launch: Launch) -> None:
    flags = ("--hang-after", "2", "--on-hang", "restart", "--max-restarts", "1")
    start(launch, "N", SLEEPS_ONCE, *flags)
    assert launch.process is not None
    assert launch.process.wait(60) == 0, launch.err
    told, ended = launch.err.splitlines()
    assert LINE.match(told)
    why = r"rallypoint: round 0 ended: the job hung: rank 1 never .* s\); restart 1 of 1$"
    assert re.match(why, ended)


@pytest.mark.parametrize("restarts", [0, 1])
def test_no_restart_is_left(launch: Launch, restarts: int) -> None:
    flags = ("--hang-after", "2", "--on-hang", "restart", "--max-restarts", str(restarts))
    start(launch, "N", SLEEPS, *flags)
    assert launch.process is not None
    assert launch.process.wait(60) == 1
    last = launch.err.splitlines()[-1]
    why = r"rallypoint: job failed: the job hung: rank 1 never entered .* s\); .* restarts are "
    assert re.match(why, last), launch.err
    assert len(events(launch, "hang")) == restarts + 1
    assert len(events(launch, "round_began")) == restarts + 1
    done = explain(str(launch.process.pid))
    assert done.returncode == 3
    assert done.stdout.startswith("rank 1 never entered all_reduce #3")
    assert "the launcher stopped it, because the job hung: rank 1 never entered" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_is_to_end(launch: Launch, kind: str) -> None:
    flags = ("--hang-after", "2", "--on-hang", "stop", "--max-restarts", "3", "--quiet")
    start(launch, kind, SLEEPS, *flags)
    assert launch.process is not None
    assert launch.process.wait(60) == 1
    # With gloo, a rank may complain of one that was ended just before it.
    why = r"^rallypoint: stopped, because the job hung: rank 1 never .* s\), after \d+\.\d s$"
    assert re.search(why, launch.err, re.MULTILINE), launch.err
    assert len(events(launch, "round_began")) == 1
    assert launch.left_over(within_s=2) == []
    done = explain(str(launch.process.pid))
    assert done.returncode == 3
    assert done.stdout.startswith("rank 1 never entered all_reduce #3")
