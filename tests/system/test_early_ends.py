"""A worker's end is told before the kernel has unmapped its memory, and nothing else is an end."""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.system.everyday import wait_until

from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES
from rallypoint.launch.agent.guardian import Guardian, GuardianReport, ReportKind
from rallypoint.launch.output.flight_report import FlightRecords

pytestmark = pytest.mark.system

KILLS = int(os.environ.get("RALLYPOINT_TEST_EARLY_ENDS", "10"))
SLOT = 1
FLIGHT_RECORD_FD = 4
LIFE_WORD_AT = SLOT * FLIGHT_RECORD_BYTES + 4056
# A worker with a group, and so many MiB in pages of 4 KiB; then it does what it is told.
WORKER = """
import mmap, os, signal, sys, tempfile, threading, time
import rallypoint
mib, code = int(sys.argv[1]), sys.argv[2]
memory = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
memory[:] = bytes([1]) * (mib << 20)
with tempfile.NamedTemporaryFile() as file:
    rallypoint.init_process_group(init_method=f"file://{file.name}", rank=0, world_size=1)
print("ready", flush=True)
sys.stdin.readline()
exec(code)
"""


class Worker:
    """A worker of a guardian; `slot` is where that looks for its record."""

    def __init__(
        self,
        code: str,
        *,
        mib: int = 1,
        slot: int = SLOT,
        waits: bool = True,
        guardian: Guardian | None = None,
        number: int = 0,
    ) -> None:
        self.records = FlightRecords(SLOT + 1)
        self.guardian = guardian or Guardian()
        self._ours, theirs = socket.socketpair()
        control, _control = socket.socketpair()  # nobody reads it
        record = f"{FLIGHT_RECORD_FD}:{SLOT * FLIGHT_RECORD_BYTES}"
        with theirs, control, _control:
            end = theirs.fileno()
            self.guardian.spawn(
                number,
                (sys.executable, "-c", WORKER, str(mib), code),
                {**os.environ, "RALLYPOINT_CONTROL_FD": "3", "RALLYPOINT_FLIGHT_RECORD": record},
                descriptors=(end, end, 2, control.fileno(), self.records.fileno()),
                record_slot=slot,
            )
        self.pid = self.guardian.read()[0].pid
        if waits:
            assert self._ours.recv(64) == b"ready\n"
            wait_until(self.holds_word)

    def word(self) -> int:
        return int.from_bytes(os.pread(self.records.fileno(), 4, LIFE_WORD_AT), sys.byteorder)

    def holds_word(self) -> bool:
        thread = self.word() & 0x3FFFFFFF
        return Path(f"/proc/{self.pid}/task/{thread}").exists() and thread != 0

    def act(self) -> None:
        self._ours.send(b"\n")

    def end(self) -> GuardianReport:
        """How it ended, which is told once."""
        reports = self.guardian.read()
        reports = reports or self.guardian.read()
        (report,) = reports
        assert (report.kind, report.pid) == (ReportKind.EXITED, self.pid)
        wait_until(lambda: not Path(f"/proc/{self.pid}").exists())
        self.guardian.end()
        assert [each.kind for each in self.guardian.read()] == [ReportKind.ENDED]
        return report

    def close(self) -> None:
        self._ours.close()
        self.guardian.close()
        self.records.close()


@pytest.fixture(params=[SLOT, SLOT + 7], ids=["heard early", "not heard"])
def slot(request: pytest.FixtureRequest) -> int:
    """Where there is no record, a worker's end is told as ever."""
    return int(request.param)


@pytest.mark.everyday
def test_a_kill_is_told_before_the_memory_is_unmapped() -> None:
    """A busy machine may take longer than the kernel, but not each time."""
    for _ in range(10):
        with closing(Worker("time.sleep(600)", mib=256)) as worker:
            process = os.pidfd_open(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
            assert select.select([worker.guardian], [], [], 60)[0]
            was_early = not select.select([process], [], [], 0)[0]
            os.close(process)
            report = worker.end()
        assert (report.code, report.status) == (2, signal.SIGKILL)
        if was_early:
            return
    pytest.fail("no end was told before the process was gone")


@pytest.mark.timeout(60 + KILLS)
def test_a_kill_at_any_moment_is_told_once(seed: int) -> None:
    """Also before there is a group, and of a process that is stopped."""
    chance = random.Random(seed)
    early = 0
    for _ in range(KILLS):
        has_group = chance.random() < 0.5
        with closing(Worker("", mib=32, waits=has_group)) as worker:
            time.sleep(chance.uniform(0.0, 0.02 if has_group else 0.4))
            if chance.random() < 0.2:
                os.kill(worker.pid, signal.SIGSTOP)
                assert worker.guardian.read()[0].kind is ReportKind.STOPPED
            early += worker.holds_word()
            os.kill(worker.pid, signal.SIGKILL)
            report = worker.end()
            assert (report.code, report.status) == (2, signal.SIGKILL)
    print(f"{KILLS} kills, {early} of them while the word was held")
    assert early > 0


def test_ends_are_told_in_their_order_by_a_guardian_that_was_stopped() -> None:
    with ExitStack() as stack:
        guardian = Guardian()
        workers = [Worker("", guardian=guardian, number=number) for number in range(4)]
        for worker in workers:
            stack.enter_context(closing(worker))
        os.kill(guardian.pid, signal.SIGSTOP)
        order = [2, 0, 3, 1]
        for number in order:
            process = os.pidfd_open(workers[number].pid)
            os.kill(workers[number].pid, signal.SIGKILL)
            assert select.select([process], [], [], 60)[0]  # its last thread is gone
            os.close(process)
        os.kill(guardian.pid, signal.SIGCONT)
        told: list[int] = []
        while len(told) < 4:
            told += [each.worker for each in guardian.read()]
        assert told == order


@pytest.mark.parametrize(
    ("code", "status"),
    [
        pytest.param("os._exit(3)", (1, 3), id="os._exit"),
        pytest.param("sys.exit(255)", (1, 255), id="sys.exit"),
        pytest.param("sys.exit()", (1, 0), id="success"),
        pytest.param("os.abort()", (2, signal.SIGABRT), id="abort"),
        pytest.param("os.kill(os.getpid(), 9)", (2, signal.SIGKILL), id="SIGKILL"),
        pytest.param("os.fork() and os._exit(4); time.sleep(600)", (1, 4), id="a child lives on"),
    ],
)
def test_how_it_ended(code: str, status: tuple[int, int], slot: int) -> None:
    with closing(
        Worker(f"import resource; resource.setrlimit(4, (0, 0)); {code}", slot=slot)
    ) as worker:
        worker.act()
        report = worker.end()
        assert (report.code, report.status) == status


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("os.execvp('sleep', ['sleep', '600'])", id="exec"),
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", id="a stop"),
        pytest.param(
            "t = threading.Thread(target=print); t.start(); t.join(); time.sleep(600)",
            id="a thread's end",
        ),
        pytest.param("os.fork() or os._exit(1); time.sleep(600)", id="a child's end"),
    ],
)
def test_what_is_no_end(code: str) -> None:
    with closing(Worker(code)) as worker:
        before = worker.word()
        worker.act()
        if "exec" in code:
            wait_until(lambda: worker.word() != before)  # the kernel has marked it
        time.sleep(0.3)
        told = {each.kind for each in worker.guardian.read(wait=False)}
        assert told <= {ReportKind.STOPPED}
        os.kill(worker.pid, signal.SIGKILL)
        report = worker.end()
        assert (report.code, report.status) == (2, signal.SIGKILL)


def test_a_worker_cannot_take_the_memory_away_that_the_guardian_reads() -> None:
    with closing(Worker("os.ftruncate(4, 0)")) as worker:
        worker.act()
        report = worker.end()
        assert (report.code, report.status) == (1, 1)  # PermissionError
        assert fcntl.fcntl(worker.records.fileno(), 1034) & 2  # F_GET_SEALS, F_SEAL_SHRINK


@pytest.mark.repeated
def test_threads_of_the_guardian_end_with_the_workers() -> None:
    with closing(Worker("os._exit(1)")) as worker:
        tasks = Path(f"/proc/{worker.guardian.pid}/task")
        assert len(list(tasks.iterdir())) == 2
        worker.act()
        worker.end()
        wait_until(lambda: len(list(tasks.iterdir())) == 1)
