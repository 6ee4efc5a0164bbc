"""What PyTorch's gloo groups are in, as the launcher's memory tells it: live, and after SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_flight_record import record_of

from rallypoint.base.flight_record import ask_for_more, has_told_more, read_counts, read_groups
from rallypoint.base.recorded_call import GroupCounts, RecordedCall, RecordedGroup
from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES
from rallypoint.launch.inspection.python_stacks import ask_for_stacks

pytestmark = [pytest.mark.system, pytest.mark.needs_torch]

BEGIN = """
import ctypes, os, select, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
array = torch.ones(4, 3)
for _ in range(40):
    dist.all_reduce(array)
def ready():
    time.sleep(0.3)
    os.symlink(str(os.getpid()), f"ready.{rank}")
"""


def start(launch: Launch, code: str, ranks: int, *, begin: str = BEGIN) -> int:
    """The record's descriptor, once all ranks have called ready()."""
    launch.start("--nproc-per-node", str(ranks), launch.script(begin + code))
    launch.wait_for("ready.*", ranks)
    return record_of(launch)


def groups_of(record: int, rank: int, *, asks: bool = True) -> dict[str, RecordedGroup]:
    offset = rank * FLIGHT_RECORD_BYTES
    if asks:
        ask_for_more(record, offset)
        deadline = time.monotonic() + 60
        while not has_told_more(record, offset):
            assert time.monotonic() < deadline, f"rank {rank} does not answer"
            time.sleep(0.01)
    return {group.name: group for group in read_groups(record, offset)}


def brief(call: RecordedCall) -> tuple[object, ...]:
    return call.operation, call.number, call.state, call.dtype, call.shape


STUCK = """
pair = dist.new_group([1, 2], group_desc="pair")
if rank > 0:
    dist.broadcast(torch.zeros(2, dtype=torch.int64), src=1, group=pair)
    dist.send(array, 3 - rank) if rank == 1 else dist.recv(array, 3 - rank)
ready()
if rank == 0:
    dist.all_reduce(torch.zeros(7, 1, 2, dtype=torch.bfloat16))
if rank == 1:
    dist.recv(torch.zeros(5), src=2, tag=77)
if rank == 2:
    fd = os.open("go", os.O_RDWR)
    asked = (ctypes.c_int * 2)(fd, select.POLLIN)  # struct pollfd
    found = ctypes.CDLL(None).poll(asked, 1, -1)  # a signal to this thread would end it
    os.symlink(str(found), "polled")
    time.sleep(1000)
"""


def test_a_stuck_job(launch: Launch) -> None:
    os.mkfifo(launch.directory / "go")
    record = start(launch, STUCK, 3)
    wait_until(lambda: groups_of(record, 0)["default group"].calls[-1].number == 40)
    wait_until(lambda: groups_of(record, 1)["default group"].transfers)
    now_ns = time.monotonic_ns()
    seen = [groups_of(record, rank) for rank in range(3)]
    for rank in range(3):
        default = seen[rank]["default group"]
        assert (default.backend, default.members, default.key) == ("gloo", "0-2", "torch 0")
        assert default.is_complete
        assert [call.number for call in default.calls] == [*range(9 if rank == 0 else 8, 40)] + (
            [40] if rank == 0 else []
        )
        assert all(0 < now_ns - call.since_ns < 300e9 for call in default.calls)
        assert brief(default.calls[-2]) == (
            "all_reduce",
            39 if rank == 0 else 38,
            "done",
            "float32",
            (4, 3),
        )
    stuck = seen[0]["default group"].calls[-1]
    assert brief(stuck) == ("all_reduce", 40, "running", "bfloat16", (7, 1, 2))
    assert stuck.count == 14
    assert seen[0].keys() == {"default group"}
    for rank in (1, 2):
        pair = seen[rank]["group pair"]
        assert pair.members == "1-2"
        assert [brief(call) for call in pair.calls] == [("broadcast", 0, "done", "int64", (2,))]
    (receive,) = seen[1]["default group"].transfers
    assert (receive.operation, receive.peer, receive.root) == ("recv", 2, 77)
    assert (receive.state, receive.dtype, receive.count) == ("running", "float32", 5)
    assert seen[0]["default group"].transfers == seen[2]["default group"].transfers == ()

    pids = [int((launch.directory / f"ready.{rank}").readlink().name) for rank in range(3)]
    answers = ask_for_stacks(pids, wait_s=5)
    innermost = []
    for pid in pids:
        (main,) = [stack for stack in answers[pid].stacks if stack.is_main]
        innermost.append(next(f for f in main.frames if f.file.endswith("worker.py")).line)
    lines = (BEGIN + STUCK).splitlines()
    assert [lines[line - 1].split("(")[0].strip() for line in innermost] == [
        "dist.all_reduce",
        "dist.recv",
        "found = ctypes.CDLL",
    ]
    assert not (launch.directory / "polled").is_symlink()
    (launch.directory / "go").write_text("go")
    (polled,) = launch.wait_for("polled*")
    assert polled.readlink().name == "1"  # the thread of ours took the signal

    os.kill(pids[0], signal.SIGKILL)
    assert launch.process is not None
    launch.process.wait(60)
    after = groups_of(record, 0, asks=False)["default group"]
    assert after.calls[-1] == stuck
    assert "rank 0 in all_reduce #40 (14 x bfloat16)" in launch.err
    assert "rank 1 in recv from rank 2 (5 x float32, tag 77)" in launch.err
    os.close(record)


def test_what_python_waits_for_is_counted(launch: Launch) -> None:
    """In the first group, whichever is waited for; who comes last waits for nobody."""
    code = (
        "pair = dist.new_group([0, 1])\n"
        "for group in (None, pair):\n"
        "    if rank == 1: time.sleep(1)\n"
        "    dist.all_reduce(array, group=group)\n"
        "if rank == 1: time.sleep(1)\n"
        "if rank == 1: dist.send(array, 0)\n"
        "if rank == 0: dist.recv(array, 1)\n"
        "ready()\n"
        "time.sleep(1000)\n"
    )
    record = start(launch, code, 2)

    def counts(rank: int) -> list[GroupCounts]:
        groups = read_counts(record, rank * FLIGHT_RECORD_BYTES)
        return [group.counts for group in groups if group.counts is not None]

    wait_until(lambda: all(counts(rank)[0].calls == 41 for rank in range(2)))
    default, pair = counts(0)
    assert (default.transfers, default.peers, default.bytes) == (1, (1,), 0)
    assert (pair.calls, pair.waited_ns) == (1, 0)
    assert default.waited_ns > 2.5e9
    assert default.waited_ns > counts(1)[0].waited_ns + 2e9
    assert default.waited_squared_ns2 > 2e18


def test_what_is_behind_is_written_without_being_asked(launch: Launch) -> None:
    code = "ready()\nif rank == 0: dist.barrier()\nelse: time.sleep(1000)\n"
    record = start(launch, code, 2)
    deadline = time.monotonic() + 60
    seen: list[RecordedCall] = []
    while not seen or seen[-1].operation != "barrier":
        assert time.monotonic() < deadline
        calls = groups_of(record, 0, asks=False)["default group"].calls
        seen.append(calls[-1])
    # Until the calls themselves are read, #39 may seem to go on: see decision 081, "Limits".
    assert (calls[-2].number, calls[-2].state) == (39, "done")
    assert {call.number for call in seen} <= {39, 40}
    assert {call.state for call in seen if call.number == 40} == {"running"}
    assert time.monotonic_ns() - seen[-1].since_ns > 1e9
    os.close(record)


def test_the_last_calls_are_written_once_no_other_begins(launch: Launch) -> None:
    """The rank that keeps others waiting is in no call; what it has called last is known."""
    code = (
        "ready()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "dist.barrier()\n"
        "time.sleep(1000)\n"
    )
    record = start(launch, code, 2)
    # A new group's calls are written at once.

    def is_written(*call: object) -> bool:
        groups = [groups_of(record, rank, asks=False)["default group"] for rank in range(2)]
        return all(brief(each.calls[-1])[:3] == call for each in groups)

    wait_until(lambda: is_written("all_reduce", 39, "done"))
    (launch.directory / "go").touch()
    wait_until(lambda: is_written("barrier", 40, "done"))
    os.close(record)


MESSAGES = """
other = 1 - rank
works = [dist.irecv(torch.zeros(3), other, tag=i) for i in range(20)]
ones = torch.ones(3)
sent = [dist.isend(ones, other, tag=i) for i in range(20)]
for work in works:
    work.wait()
sent[3].wait()
dist.barrier()
del sent  # the others are never waited for
group = dist.group.WORLD
send, receive = torch.ones(3), torch.zeros(3)
work = group.send(tensors=[send], dstRank=other, tag=50)
group.recv_anysource([receive], 50).wait()
work.wait()
assert receive.sum() == 3
sparse = torch.ones(3).to_sparse()
for wrong in (lambda: group.send([sparse], other, 0), lambda: group.send(7), lambda: group.recv()):
    try:
        wrong()
    except (RuntimeError, TypeError, ValueError):
        continue
    raise AssertionError(wrong)
before = dist.group.WORLD
dist.destroy_process_group()
del group, before, work, works
import rallypoint
rallypoint.init_process_group()
rallypoint.all_reduce(__import__("numpy").ones(8))
# In the job's store, gloo would find where the first group had listened.
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.PrefixStore("second", dist.TCPStore(host, port, is_master=False))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.all_reduce(array)
late = dist.irecv(torch.zeros(3), other, tag=9)
ready()
time.sleep(1000)
"""


def test_messages_and_groups_that_come_and_go(launch: Launch) -> None:
    record = start(launch, MESSAGES, 2)
    groups_of(record, 0)
    groups = read_groups(record, 0)
    assert [(group.backend, group.has_left) for group in groups] == [
        ("gloo", True),
        ("rallypoint", False),
        ("gloo", False),
    ]
    assert groups[0].transfers == ()
    assert [call.operation for call in groups[1].calls] == ["all_reduce"]
    assert [brief(call) for call in groups[2].calls] == [
        ("all_reduce", 0, "done", "float32", (4, 3))
    ]
    assert [(call.peer, call.root) for call in groups[2].transfers] == [(1, 9)]
    os.close(record)


# NCCL's backend of 2.15 leaves its record to PyTorch's hooks. This one has its name and does
# nothing; a backend in Python cannot tell when its calls end.
RECORDED_BY_HOOKS = """
import os, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import Backend
class Done(dist.Work):
    def wait(self, timeout=None): return True
class Silent(Backend):
    def getBackendName(self): return "nccl2"
    def allreduce(self, tensors, options): return Done()
    def barrier(self, options): return Done()
    def send(self, tensors, peer, tag): return Done()
def make(store, rank, size, timeout): return Silent(rank, size)
dist.Backend.register_backend("silent", make, devices=["cpu", "meta"])
dist.init_process_group("cpu:gloo,meta:silent")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
late = dist.irecv(torch.zeros(6), 1 - rank, tag=9)
hooked = dist.new_group(backend="cpu:silent", group_desc="hooked")
for _ in range(3):
    dist.all_reduce(torch.ones(2, 3), group=hooked)
sent = dist.isend(torch.ones(5), 1 - rank, group=hooked, tag=8)
dist.all_reduce(torch.ones(7, dtype=torch.int32), group=hooked)
def ready():
    time.sleep(0.3)
    os.symlink(str(os.getpid()), f"ready.{rank}")
ready()
time.sleep(1000)
"""


def test_what_pytorchs_hooks_record_and_two_backends_in_a_group(launch: Launch) -> None:
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    if not hasattr(c10d, "_maybe_attach_flight_recorder"):
        pytest.skip("PyTorch before 2.15: no hooks that record")
    record = start(launch, RECORDED_BY_HOOKS, 2, begin="")
    seen = groups_of(record, 0)
    gloo, silent, hooked = seen.values()
    assert (gloo.name, gloo.key) == ("default group (gloo)", "torch 0 gloo")
    assert (silent.name, silent.key) == ("default group (nccl2)", "torch 0 nccl2")
    assert [brief(call) for call in gloo.calls] == [("all_reduce", 0, "done", "float32", (4,))]
    assert [(call.operation, call.count) for call in gloo.transfers] == [("recv", 6)]
    assert silent.calls == silent.transfers == ()
    assert hooked.backend == "nccl2"
    assert [brief(call) for call in hooked.calls] == [
        *(("all_reduce", number, "running", "float32", (2, 3)) for number in range(3)),
        ("all_reduce", 3, "running", "int32", (7,)),
    ]
    assert [brief(call)[:3] for call in hooked.transfers] == [("send", 0, "running")]
    os.close(record)


@pytest.mark.everyday
def test_a_program_without_a_launcher_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import torch.distributed as dist, sys, os\n"
        f"dist.init_process_group('gloo', rank=0, world_size=1, init_method='file://{tmp_path}/s')\n"
        "assert 'rallypoint.pytorch.other_backends' not in sys.modules\n"
        "assert not hasattr(dist.Work.wait, '__wrapped__')\n"
        "tasks = '/proc/self/task'\n"
        "names = [open(f'{tasks}/{t}/comm').read() for t in os.listdir(tasks)]\n"
        "assert 'rally-scribe\\n' not in names, names\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
