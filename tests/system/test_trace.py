"""`rallypoint trace`: calls of real jobs, read back by a strict reader, and by Perfetto's own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.chrome_trace import Slice, Trace, read
from tests.perfetto.processor import TraceProcessor
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_jobs import rallypoint

pytestmark = pytest.mark.system

TRAINING = """
import os, time, numpy as np, rallypoint as dist
dist.init_process_group()
rank = dist.get_rank()
pair = dist.new_group([0, 1], group_desc="pair")
array, step = np.ones(1000, np.float32), np.zeros(1)
open(f"ready.{rank}", "w")
while step[0] >= 0:  # the same on all ranks
    dist.all_reduce(array)
    if rank < 2:
        dist.broadcast(array, src=1, group=pair)
    if rank == 0:
        works = [dist.isend(array, 1, tag=5), dist.isend(array, 1, tag=6)]
    if rank == 1:
        time.sleep(0.003)
        dist.recv(array, 0, tag=6)
        dist.recv(array, 0, tag=5)
    if rank == 0:
        [work.wait() for work in works]
    step += 1
    if os.path.exists("end"):
        step[0] = -1
    dist.broadcast(step, src=0)
    if step[0] == int(os.environ.get("STOP_AT", 0)) and rank == 1:
        open("stuck", "w")
        time.sleep(1000)
"""


def traced(directory: Path, *words: str, name: str = "trace.json.gz") -> tuple[Trace, str]:
    """What the command has written, and said."""
    told = rallypoint("trace", *words, "-o", str(directory / name))
    assert told.returncode == 0, told.stderr
    trace = read(directory / name)
    (line,) = [line for line in told.stdout.splitlines() if "https://ui.perfetto.dev" in line]
    said = re.search(r", (\d+) calls of (\d+) ranks? on (\d+) nodes? \(", line)
    assert said is not None
    assert int(said[1]) == len(trace.slices) == trace.about["calls"]
    return trace, told.stdout


def traced_until(
    directory: Path, holds: Callable[[Trace], bool], *words: str, name: str = "trace.json.gz"
) -> Trace:
    """The first trace of which that is true."""
    found: list[Trace] = []

    def is_found() -> bool:
        told = rallypoint("trace", *words, "-o", str(directory / name))
        found[:] = [read(directory / name)] if told.returncode == 0 else []
        return any(map(holds, found))

    wait_until(is_found)
    return found[0]


def start(launch: Launch, ranks: int, script: str, **environ: str) -> str:
    process = launch.start(
        *("--nproc-per-node", str(ranks), launch.script(script)), environ=environ
    )
    launch.wait_for("ready.*", ranks)
    return str(process.pid)


def rank_of(one: Slice) -> int:
    return int(one.process.split()[1])


def of(trace: Trace, rank: int, track: str) -> list[Slice]:
    return [one for one in trace.slices if rank_of(one) == rank and one.track == track]


def enough(trace: Trace) -> bool:
    """All tracks of all ranks, with some calls each."""
    found = Counter((rank_of(one), one.track.partition(",")[0]) for one in trace.slices)
    expected = {
        *((rank, "default group") for rank in range(3)),
        *((rank, "group pair") for rank in range(2)),
        *((rank, "default group: sends and receives") for rank in range(2)),
    }
    assert found.keys() <= expected
    return found.keys() == expected and min(found.values()) > 10


@pytest.mark.everyday
def test_a_running_job(launch: Launch) -> None:
    pid = start(launch, 3, TRAINING)
    trace = traced_until(launch.directory, enough, pid, "--seconds", "0.5")
    (launch.directory / "end").touch()
    for rank in range(3):
        calls = [one for one in of(trace, rank, "default group") if one.end is not None]
        numbers = [one.args["number"] for one in calls]
        assert numbers == sorted(set(numbers))
        assert {one.name for one in calls} == {"all_reduce", "broadcast"}
    sums = [one for one in of(trace, 2, "default group") if one.name == "all_reduce"]
    assert sums[0].args["bytes"] == 4000
    received = [one for one in trace.slices if one.name == "recv"]
    assert {one.args["from"] for one in received} == {"rank 0"}
    assert {one.args["tag"] for one in received} == {5, 6}
    flows = {(flow[0].name, flow[0].track, *sorted(map(rank_of, flow))) for flow in trace.flows}
    assert ("all_reduce", "default group", 0, 1, 2) in flows
    assert ("broadcast", "group pair", 0, 1) in flows
    assert all(len({one.args["number"] for one in flow}) == 1 for flow in trace.flows)
    assert launch.process is not None
    assert launch.process.wait(60) == 0, launch.err


def test_when_calls_begin_and_end(launch: Launch) -> None:
    pid = start(launch, 3, TRAINING)
    trace, _ = traced(launch.directory, pid, "--seconds", "1.5")
    (launch.directory / "end").touch()
    assert trace.about["missed"] == trace.about["left out"] == 0
    for rank in range(3):
        calls = [one for one in of(trace, rank, "default group") if one.end is not None]
        numbers = [one.args["number"] for one in calls]
        assert len(calls) > 50
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    # Rank 1 is late; the others are with it in the call for as long as that.
    sums = [one for one in of(trace, 2, "default group") if one.name == "all_reduce"]
    late = [one.args["entered last"] for one in sums if "entered last" in one.args]
    assert sum(text.startswith("rank 1, ") for text in late) > len(late) * 0.8
    lasted = sorted(one.end - one.begin for one in sums if one.end is not None)
    assert lasted[len(lasted) // 2] > 2.5e6
    for flow in trace.flows:
        if flow[0].name == "all_reduce":  # nobody leaves before all have entered
            entered = max((one.begin for one in flow if "times" not in one.args), default=0)
            assert all(one.end is None or one.end >= entered for one in flow)


def test_the_last_calls_of_a_job_that_hangs_and_of_one_that_failed(launch: Launch) -> None:
    pid = start(launch, 3, TRAINING, STOP_AT="20")
    launch.wait_for("stuck")

    def all_wait(trace: Trace) -> bool:
        last = [of(trace, rank, "default group")[-1:] for rank in (0, 2)]
        return all(one and "waits at" in one[0].args for one in last)

    trace = traced_until(launch.directory, all_wait, pid, "-s", "0.5", name="trace.json")
    for rank in (0, 2):
        last = of(trace, rank, "default group")[-1]
        assert (last.name, last.end, last.args["number"]) == ("all_reduce (not done)", None, 40)
        assert last.args["waits at"] == "worker.py:9"
    assert of(trace, 1, "default group")[-1].args["number"] == 39
    assert all(one.end is not None for one in of(trace, 1, "default group"))

    assert launch.process is not None
    launch.process.send_signal(signal.SIGINT)
    launch.process.wait(60)
    trace, said = traced(launch.directory, pid)
    assert "note: the job ended at " in said
    assert of(trace, 0, "default group")[-1].args["number"] == 40
    assert all(one.args["times"] == "within some milliseconds" for one in trace.slices)


@contextmanager
def tracing(launch: Launch, pid: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A trace of a minute that has begun: another one is refused."""
    command = [sys.executable, "-m", "rallypoint", "trace", pid, "-s", "60", "-o", str(path)]
    short = ("trace", pid, "-s", "0.01", "-o", str(launch.directory / "other.json"))
    refused = "this job is being traced already"
    while True:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as one:
            wait_until(lambda: refused in rallypoint(*short).stderr or one.poll() is not None)
            if one.poll() is None:
                yield one
                return
            # The other one was first.
            assert one.stderr is not None
            assert refused in one.stderr.read()


def test_ctrl_c_ends_it_and_one_at_a_time(launch: Launch) -> None:
    pid = start(launch, 2, TRAINING)
    path = launch.directory / "trace.json"
    with tracing(launch, pid, path) as one:
        one.send_signal(signal.SIGINT)
        out, err = one.communicate(timeout=60)
    assert one.returncode == 0, err
    assert re.search(r"trace\.json: (\d+\.\d s|\d+ ms) of job ", out)
    assert read(path).slices
    # It has left nothing on.
    traced(launch.directory, pid, "-s", "0.3")
    (launch.directory / "end").touch()


def test_a_job_that_ends_meanwhile(launch: Launch) -> None:
    pid = start(launch, 2, TRAINING)
    path = launch.directory / "trace.json"
    with tracing(launch, pid, path) as one:
        (launch.directory / "end").touch()
        out, err = one.communicate(timeout=60)
    assert one.returncode == 0, err
    assert "note: 2 of 2 workers of node 0 had exited before the trace ended" in out
    assert read(path).slices


def test_a_job_without_calls_and_wrong_use(launch: Launch) -> None:
    pid = start(launch, 1, "import time\nopen('ready.0', 'w')\ntime.sleep(1000)\n")
    trace, said = traced(launch.directory, pid, "-s", "0.1")
    assert trace.slices == []
    assert "note: no call was seen: " in said
    for words, status, text in (
        ((pid,), 2, "name the file to write, as in -o trace.json.gz"),
        ((pid, "-o", "x.json", "-s", "0"), 2, "--seconds is '0'"),
        ((pid, "-o", "x.json", "-s", "nan"), 2, "--seconds is 'nan'"),
        (("no-such-job", "-o", "x.json"), 5, "no job no-such-job runs on this machine"),
        ((pid, "-o", "/nowhere/x.json"), 1, "cannot write /nowhere/x.json: No such file"),
        (("--wrong",), 2, "unknown flag --wrong"),
    ):
        told = rallypoint("trace", *words)
        assert (told.returncode, told.stdout) == (status, ""), told
        assert text in told.stderr


GLOO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
array = torch.ones(4, 3)
open(f"ready.{rank}", "w")
import time
while True:
    array[0] = os.path.exists("end")
    dist.all_reduce(array)
    if array[0, 0] > 0:
        break
    time.sleep(0.05 if rank == 1 else 0.0)
"""


@pytest.mark.needs_torch
def test_gloo(launch: Launch) -> None:
    pid = start(launch, 2, GLOO)
    trace, _ = traced(launch.directory, pid, "-s", "2")
    (launch.directory / "end").touch()
    for rank in range(2):
        calls = of(trace, rank, "default group (gloo)")
        numbers = [one.args["number"] for one in calls]
        assert len(calls) > 10
        assert numbers == sorted(set(numbers))
        assert {one.name.removesuffix(" (not done)") for one in calls} == {"all_reduce"}
        assert (calls[0].args["bytes"], calls[0].args["shape"]) == (48, "4 x 3")
    late = [flow[-1] for flow in trace.flows if len(flow) == 2]
    assert len(late) > 8
    assert sum(rank_of(one) == 1 for one in late) > len(late) * 0.8


def test_perfettos_trace_processor_reads_it(launch: Launch) -> None:
    """What ui.perfetto.dev makes of a trace (tests/perfetto)."""
    pid = start(launch, 3, TRAINING)
    trace, _ = traced(launch.directory, pid, "-s", "1")
    (launch.directory / "end").touch()
    with TraceProcessor(launch.directory / "trace.json.gz") as perfetto:
        assert (
            perfetto.rows("select name, value from stats where severity != 'info' and value > 0")
            == []
        )
        slices = perfetto.rows(
            "select slice.name, ts, dur, process.name as process, thread.name as track from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
            "join process using (upid) order by ts, process, track"
        )
        (flows,) = perfetto.rows("select count(*) as n from flow")
    assert len(slices) == len(trace.slices)
    assert flows["n"] == sum(len(flow) - 1 for flow in trace.flows)
    found = Counter((one["process"], one["track"], one["name"], one["dur"] < 0) for one in slices)
    assert found == Counter(
        (one.process, one.track, one.name, one.end is None) for one in trace.slices
    )
