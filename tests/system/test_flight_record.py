"""Workers that were killed, hang or disagree: the launcher says what each was in."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until

from rallypoint.base.flight_record import read_counts, read_groups, read_pages
from rallypoint.base.worker_hook import FLIGHT_RECORD, FLIGHT_RECORD_BYTES, FLIGHT_RECORD_NAME
from rallypoint.launch.inspection.tracing import CallTrace

pytestmark = pytest.mark.system

BEGIN = """
import glob, os, signal, sys, time, numpy as np, rallypoint as dist
from datetime import timedelta
dist.init_process_group(timeout=timedelta(seconds=float(os.environ.get("WAIT", 100))))
rank = dist.get_rank()
array = np.ones(1000, np.float32)
for _ in range(17):
    dist.all_reduce(array)
"""

# The others are stopped where they are: they would go on, or end, while the launcher looks.
HERE = "os.symlink(str(os.getpid()), f'pid.{rank}')\n"
DIE = """
    while len(glob.glob("pid.*")) < dist.get_world_size():
        time.sleep(0.01)
    time.sleep(1)
    for path in glob.glob("pid.*"):
        if path != f"pid.{rank}":
            os.kill(int(os.readlink(path)), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def told(launch: Launch) -> str:
    """What the report says of operations, times left out."""
    lines = launch.err.splitlines()
    first = lines.index("  operations at that time:") + 1
    own = [line.strip() for line in lines[first:] if line.startswith("    ")]
    return re.sub(r"\d[\d.]* m?s\b", "T", "\n".join(own))


def operations(launch: Launch) -> dict[int, dict[str, Any]]:
    """The latest call of each rank, as the event says."""
    lines = (launch.directory / "events.json").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (seen,) = [event for event in events if event["event"] == "operations"]
    return {call["rank"]: call for call in seen["operations"]}


@pytest.mark.everyday
def test_a_killed_worker(launch: Launch) -> None:
    script = launch.script(
        f"{BEGIN}"
        f"{HERE}"
        "if rank == 1:\n"
        "    while len(glob.glob('pid.*')) < dist.get_world_size():\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(array)\n"
    )
    flags = ("--nproc-per-node", "4", "--json-events", "events.json")
    assert launch.run(*flags, script) == 1
    # On a busy machine, some of the other ranks may not have been in it yet.
    seen = told(launch)
    assert re.search(r"ranks? [-, 0-9]+ in all_reduce #17 \(1000 x float32, SUM\)", seen), seen
    assert re.search(r"ranks? [-, 0-9]+ never entered #17: last done all_reduce #16, T", seen), seen
    latest = operations(launch)[1]
    assert (latest["number"], latest["state"]) == (16, "done")


def test_a_worker_that_hangs_until_the_timeout(launch: Launch) -> None:
    script = launch.script(f"{BEGIN}if rank == 1:\n    time.sleep(600)\ndist.all_reduce(array)\n")
    flags = ("--nproc-per-node", "4", "--json-events", "events.json")
    assert launch.run(*flags, script, environ={"WAIT": "3"}) == 1
    assert told(launch) == (
        "default group: ranks 0, 2-3 in all_reduce #17 (1000 x float32, SUM) for T, at "
        "worker.py:11; rank 1 never entered #17: last done all_reduce #16, T ago"
    )
    by_rank = operations(launch)
    assert sorted(by_rank) == [0, 1, 2, 3]
    assert (by_rank[1]["number"], by_rank[1]["state"]) == (16, "done")
    assert (by_rank[0]["number"], by_rank[0]["dtype"], by_rank[0]["count"]) == (17, "float32", 1000)


def test_different_operations_groups_and_messages(launch: Launch) -> None:
    script = launch.script(
        f"{BEGIN}"
        "pair = dist.new_group([1, 3], group_desc='pair')\n"
        f"{HERE}"
        "if rank == 0: dist.all_reduce(array)\n"
        "if rank == 1: dist.barrier(group=pair)\n"
        "if rank == 2: dist.recv(np.ones(3), src=3, tag=5)\n"
        f"if rank == 3:{DIE}"
    )
    assert launch.run("--nproc-per-node", "4", script) == 1
    assert told(launch) == (
        "default group: rank 0 in all_reduce #17 (1000 x float32, SUM) for T, at worker.py:11; "
        "rank 2 in recv from rank 3 (3 x float64, tag 5) for T, at worker.py:13; "
        "ranks 1-3 never entered #17: last done all_reduce #16, T ago\n"
        "group pair: rank 1 in barrier #0 for T, at worker.py:12; "
        "rank 3 never entered #0: has made no call yet"
    )


def record_of(launch: Launch) -> int:
    """The memory of the workers' records, opened anew."""
    assert launch.process is not None
    for link in Path(f"/proc/{launch.process.pid}/fd").iterdir():
        if FLIGHT_RECORD_NAME in str(link.readlink()):
            return os.open(link, os.O_RDWR)
    raise AssertionError("the launcher holds no flight records")


MANY = """
import glob, os, threading, time, numpy as np, rallypoint as dist
dist.init_process_group()
array = np.zeros(1)
if dist.get_rank() == 0:
    open("pid", "w").write(str(os.getpid()))
    opened = [dist.irecv(np.zeros(1), 1, tag=tag) for tag in range(40)]
    waiting = threading.Thread(target=opened[30].wait)
    waiting.start()
    open("ready", "w").close()
    try:
        opened[35].wait()
    except KeyboardInterrupt:  # it waits for that no more
        dist.recv(array, 1, tag=77)
    for work in opened: work.wait()
    waiting.join()
else:
    while not glob.glob("go"): time.sleep(0.01)
    for tag in [77, *range(40)]: dist.send(array, 0, tag=tag)
dist.barrier()
"""


def test_what_threads_wait_for_is_recorded_however_many_messages_are_open(launch: Launch) -> None:
    launch.start("--nproc-per-node", "2", launch.script(MANY))
    launch.wait_for("ready")
    record = record_of(launch)

    def recorded() -> set[int]:
        return {call.root for group in read_groups(record, 0) for call in group.transfers}

    wait_until(lambda: recorded() >= {30, 35})
    os.kill(int((launch.directory / "pid").read_text()), signal.SIGINT)
    wait_until(lambda: recorded() >= {30, 77})
    assert 35 not in recorded()
    (launch.directory / "go").touch()
    assert launch.process is not None
    assert launch.process.wait(60) == 0
    os.close(record)


def test_ends_of_calls(launch: Launch) -> None:
    """Nobody leaves an all_reduce before all have entered it, and who came first has waited."""
    script = launch.script(
        f"{BEGIN}"
        "if rank == 1: time.sleep(1)\n"
        "dist.all_reduce(array)\n"
        "open(f'ready.{rank}', 'w').close()\n"
        "time.sleep(1000)\n"
    )
    launch.start("--nproc-per-node", "2", script)
    launch.wait_for("ready.*", 2)
    record = record_of(launch)
    calls = []
    for local_rank in range(2):
        (group,) = read_groups(record, local_rank * FLIGHT_RECORD_BYTES)
        calls.append(group.calls)
    os.close(record)
    assert calls[0][-1].ended_ns - calls[0][-1].since_ns > 0.8e9
    for first, second in zip(*calls, strict=True):
        assert first.number == second.number
        latest = max(first.since_ns, second.since_ns)
        # The end of a call that was not seen to wait is its beginning, give or take a time slice.
        assert min(first.ended_ns, second.ended_ns) >= latest - 0.3e9


def test_counts_of_a_group(launch: Launch) -> None:
    """The bytes are those of the program; only who came first has waited."""
    script = launch.script(
        f"{BEGIN}"
        "for _ in range(4):\n"
        "    if rank == 1: time.sleep(0.25)\n"
        "    dist.all_reduce(array)\n"
        "    if rank == 1: time.sleep(0.25)\n"
        "    (dist.send if rank else dist.recv)(np.ones(100), 1 - rank)\n"
        "dist.all_reduce(array, async_op=True)\n"
        "if rank == 1: time.sleep(1)\n"
        "dist.all_reduce(array, async_op=True).wait()\n"
        "open(f'ready.{rank}', 'w').close()\n"
        "time.sleep(1000)\n"
    )
    launch.start("--nproc-per-node", "2", script)
    launch.wait_for("ready.*", 2)
    record = record_of(launch)
    counts = []
    for local_rank in range(2):
        offset = local_rank * FLIGHT_RECORD_BYTES
        (group,) = read_groups(record, offset)
        (counted,) = read_counts(record, offset)
        assert counted == group.__replace__(calls=group.calls[-1:], transfers_begun=0)
        assert group.counts is not None
        counts.append(group.counts)
    os.close(record)
    for rank, each in enumerate(counts):
        assert each.calls == 17 + 4 + 2
        assert (each.transfers, each.peers) == (4, (1 - rank,))
        assert each.bytes == 23 * 4000 + 4 * 800
        assert each.running_since_ns == 0
    assert counts[0].waited_ns > 2.5e9
    assert counts[1].waited_ns < counts[0].waited_ns - 2e9
    # Eight waits of 0.25 s, and one of a second.
    assert counts[0].waited_squared_ns2 > 1.2e18


WRITER = """
import sys, numpy as np, rallypoint as dist
from rallypoint.store.local_store import HashStore
dist.init_process_group(store=HashStore(), rank=0, world_size=1)
one, other = np.ones(111, np.float32), np.ones(222, np.int64)
print("ready", flush=True)
while True:
    dist.all_reduce(one)
    dist.all_reduce(other, op=dist.ReduceOp.MAX)
"""


@contextmanager
def writing(program: str, memory: int, offset: int = 0) -> Iterator[None]:
    """It writes its record there, from the moment when it is ready until it is killed."""
    writer = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, FLIGHT_RECORD: f"{memory}:{offset}"},
        pass_fds=[memory],
        stdout=subprocess.PIPE,
    )
    with writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            yield
        finally:
            writer.kill()


@pytest.mark.exact
def test_a_record_is_never_read_torn(seed: int) -> None:
    """While its owner writes more than a million calls in a second, and after it was killed."""
    chance = random.Random(seed)
    memory = os.memfd_create(FLIGHT_RECORD_NAME)
    os.truncate(memory, 2 * FLIGHT_RECORD_BYTES)
    offset = FLIGHT_RECORD_BYTES
    with writing(WRITER, memory, offset):
        latest, looks = -1, 0
        while looks < 500 or latest <= 100:
            looks += 1
            (group,) = read_groups(memory, offset)
            for call in group.calls:
                expected = ("int64", 222, "MAX") if call.number % 2 else ("float32", 111, "SUM")
                assert (call.dtype, call.count, call.operator) == expected, call
                assert call.ended_ns == 0 or call.state == "done", call
            assert group.calls == () or group.calls[-1].number >= latest
            latest = group.calls[-1].number if group.calls else latest
            time.sleep(chance.random() / 2000)
    (group,) = read_groups(memory, offset)
    numbers = [call.number for call in group.calls]
    assert len(numbers) >= 31  # but for the one that was being written
    assert numbers[-1] - numbers[0] < 32
    assert numbers[-1] >= latest
    assert read_groups(memory, 0) == ()
    os.close(memory)


FORMS = """
import numpy as np, rallypoint as dist
from rallypoint.store.local_store import HashStore
dist.init_process_group(store=HashStore(), rank=0, world_size=1)
print("ready", flush=True)
number = 0
while True:
    group = dist.new_group([0], group_desc=f"{number}")
    for i in range(3):
        dist.all_reduce(np.ones(number), group=group)
    dist.destroy_process_group(group)
    number += 1
"""


def test_groups_that_come_and_go_take_few_pages(seed: int) -> None:
    """A job that goes on in place forms its groups anew at each loss; none is read torn."""
    chance = random.Random(seed)
    memory = os.memfd_create(FLIGHT_RECORD_NAME)
    os.truncate(memory, FLIGHT_RECORD_BYTES)
    with writing(FORMS, memory):
        latest, deadline = 0, time.monotonic() + 60
        while latest < 1000:
            groups = read_groups(memory, 0)
            assert len(groups) <= 67
            numbers = [int(group.name.split()[1]) for group in groups[1:]]
            assert len(set(numbers)) == len(numbers)
            for number, group in zip(numbers, groups[1:], strict=True):
                assert {call.count for call in group.calls} <= {number}
                assert [call.number for call in group.calls] == list(range(len(group.calls)))
            latest = max(numbers, default=0)
            # But for the newest ones, all that the pages hold is complete.
            assert latest - min(numbers, default=0) < 80
            assert time.monotonic() < deadline
            time.sleep(chance.random() / 200)
    os.close(memory)


def test_a_trace_is_never_read_torn(seed: int) -> None:
    """Each call is read once with its own values, or counted as missed, also when the ring is."""
    chance = random.Random(seed)
    memory = os.memfd_create(FLIGHT_RECORD_NAME)
    os.truncate(memory, FLIGHT_RECORD_BYTES)
    with writing(WRITER, memory):
        trace = CallTrace(memory, 0, most=10_000_000)
        assert trace.begin() == ""
        for number in range(60):
            time.sleep(0.2 if number % 20 == 10 else chance.random() / 100)
            trace.read()
        trace.end()
        names, _ = read_pages(memory, 0)
    calls = [
        call for page, is_transfer, call in trace.calls(names) if (page, is_transfer) == (1, 0)
    ]
    for call in calls:
        expected = ("int64", 222, "MAX") if call.number % 2 else ("float32", 111, "SUM")
        assert (call.dtype, call.count, call.operator, call.state) == (*expected, "done"), call
    passed_over = 0
    for before, after in pairwise(calls):
        passed_over += after.number - before.number - 1
        assert before.number < after.number
        assert before is calls[0] or before.since_ns < before.ended_ns <= after.since_ns
    assert passed_over == trace.missed
    assert calls
    os.close(memory)


GROUPS = """
import sys, numpy as np, rallypoint as dist
from rallypoint.store.local_store import HashStore
dist.init_process_group(store=HashStore(), rank=0, world_size=1)
for line in sys.stdin:
    more, calls = map(int, line.split())
    for _ in range(more):
        group = dist.new_group([0])
    for _ in range(calls):
        dist.all_reduce(np.ones(3))
        dist.all_reduce(np.ones(3), group=group)
    print("done", flush=True)
"""


def test_groups_and_a_trace_never_use_the_same_page() -> None:
    memory = os.memfd_create(FLIGHT_RECORD_NAME)
    os.truncate(memory, FLIGHT_RECORD_BYTES)
    program = subprocess.Popen(
        [sys.executable, "-c", GROUPS],
        env={**os.environ, FLIGHT_RECORD: f"{memory}:0"},
        pass_fds=[memory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def have(*, groups: int, calls: int) -> None:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{groups} {calls}\n")
        program.stdin.flush()
        assert program.stdout.readline() == "done\n"

    with program:
        have(groups=500, calls=1)
        trace = CallTrace(memory, 0, most=1000)
        assert trace.begin() == ""
        have(groups=20, calls=40_000)  # the ring is full; there is room for 10 of these groups
        trace.go_on()
        assert len(read_groups(memory, 0)) == 511
        assert any(os.pread(memory, 4096, FLIGHT_RECORD_BYTES - 4096))
        trace.pause()
        have(groups=20, calls=3)
        groups = read_groups(memory, 0)
        assert len(groups) == 531
        assert [len(group.calls) for group in groups[511:]] == [0] * 19 + [3]
        assert "it has 531 groups" in trace.begin()
        program.kill()
    os.close(memory)


@pytest.mark.everyday
def test_a_program_after_another_takes_the_record_over() -> None:
    memory = os.memfd_create(FLIGHT_RECORD_NAME)
    os.truncate(memory, FLIGHT_RECORD_BYTES)
    code = (
        "import sys, numpy as np, rallypoint as dist\n"
        "from rallypoint.store.local_store import HashStore\n"
        "dist.init_process_group(store=HashStore(), rank=0, world_size=1)\n"
        "for _ in range(int(sys.argv[1])): dist.all_reduce(np.ones(3))\n"
    )
    for count in (5, 2):
        subprocess.run(
            [sys.executable, "-c", code, str(count)],
            env={**os.environ, FLIGHT_RECORD: f"{memory}:0"},
            pass_fds=[memory],
            check=True,
        )
        (group,) = read_groups(memory, 0)
        assert [call.number for call in group.calls] == list(range(count))
        assert group.has_left
    os.close(memory)
