"""The guardian itself: order of ends, what a child inherits, and what it does on nonsense."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.conftest import parent_of
from tests.system.everyday import wait_until

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.launch.agent.guardian import Guardian, GuardianLostError, GuardianReport, ReportKind

pytestmark = pytest.mark.system

SLEEP = ("sleep", "600")


@pytest.fixture
def guardian() -> Iterator[Guardian]:
    guardian = Guardian()
    yield guardian
    guardian.close()


def spawn(guardian: Guardian, worker: int, *argv: str, directory: str = "") -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        guardian.spawn(
            worker, argv, dict(os.environ), descriptors=(0, 1, 2, theirs.fileno(), theirs.fileno()),
            directory=directory,
        )  # fmt: skip


def read(guardian: Guardian, count: int) -> list[GuardianReport]:
    reports: list[GuardianReport] = []
    while len(reports) < count:
        reports += guardian.read()
    assert len(reports) == count
    return reports


@pytest.mark.everyday
def test_ends_are_told_in_the_order_in_which_they_happened(guardian: Guardian) -> None:
    for worker in range(5):
        spawn(guardian, worker, *SLEEP)
    pids = {report.worker: report.pid for report in read(guardian, 5)}
    os.kill(guardian.pid, signal.SIGSTOP)  # so that it finds them all at once
    order = [3, 0, 4, 1, 2]
    for worker in order:
        os.kill(pids[worker], signal.SIGKILL)
        await_state([pids[worker]], "Z")
    os.kill(guardian.pid, signal.SIGCONT)
    reports = read(guardian, 5)
    assert [report.worker for report in reports] == order
    assert {(report.kind, report.status) for report in reports} == {(ReportKind.EXITED, 9)}


def test_children_start_with_clean_signals(guardian: Guardian) -> None:
    code = (
        "import signal, sys\n"
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "text = open('/proc/self/status').read()\n"
        "ignored = int(text.partition('SigIgn:')[2].split()[0], 16)\n"
        # What Python itself ignores: SIGPIPE and SIGXFSZ.
        "sys.exit(len(blocked) or ignored & ~(1 << 12 | 1 << 24))"
    )
    spawn(guardian, 0, sys.executable, "-c", code)
    started, ended = read(guardian, 2)
    assert (started.kind, ended.kind, ended.status) == (ReportKind.STARTED, ReportKind.EXITED, 0)


def test_the_working_directory(guardian: Guardian, tmp_path: Path) -> None:
    spawn(guardian, 0, "sh", "-c", "touch here", directory=str(tmp_path))
    assert read(guardian, 2)[1].status == 0
    assert (tmp_path / "here").exists()
    spawn(guardian, 1, "true", directory=str(tmp_path / "missing"))
    failed = read(guardian, 2)[1]
    assert (failed.kind, failed.code, failed.status) == (ReportKind.SPAWN_FAILED, 2, 2)


@pytest.mark.everyday
def test_end_spares_the_guardian_for_the_next_workers(guardian: Guardian) -> None:
    for round_number in range(3):
        spawn(guardian, round_number, *SLEEP)
        guardian.end()
        started, exited, ended = read(guardian, 3)
        assert started.kind is ReportKind.STARTED
        assert (exited.kind, exited.status) == (ReportKind.EXITED, 9)
        assert (ended.kind, ended.status) == (ReportKind.ENDED, 0)


def test_workers_that_others_stop_are_told(guardian: Guardian) -> None:
    spawn(guardian, 7, *SLEEP)
    (started,) = read(guardian, 1)
    for number, kind in (
        (signal.SIGSTOP, ReportKind.STOPPED),
        (signal.SIGCONT, ReportKind.CONTINUED),
    ):
        os.kill(started.pid, number)
        (told,) = read(guardian, 1)
        assert (told.kind, told.worker, told.pid) == (kind, 7, started.pid)
    guardian.pause()  # not told
    await_state([started.pid], "T")  # SIGCONT takes back a SIGSTOP that has not worked yet
    guardian.resume()
    assert read(guardian, 1)[0].kind is ReportKind.CONTINUED
    os.kill(started.pid, signal.SIGSTOP)
    assert read(guardian, 1)[0].kind is ReportKind.STOPPED
    guardian.resume()  # of nothing that it has paused
    time.sleep(0.1)
    assert state_of(started.pid) == "T"
    os.kill(started.pid, signal.SIGKILL)  # ends it although it is stopped
    assert read(guardian, 1)[0].kind is ReportKind.EXITED


def test_orphans_are_reaped_while_others_run(guardian: Guardian, tmp_path: Path) -> None:
    """Each says which process it is, and ends when all have been found to be the guardian's."""
    orphan = "echo $$ > part.$$; mv part.$$ orphan.$$; until [ -e go ]; do sleep 0.02; done"
    start = f"for i in 1 2 3 4 5; do (setsid sh -c '{orphan}' &); done; sleep 600"
    spawn(guardian, 0, "sh", "-c", start, directory=str(tmp_path))
    read(guardian, 1)
    wait_until(lambda: len(list(tmp_path.glob("orphan.*"))) == 5)
    processes = [Path(f"/proc/{path.read_text().strip()}") for path in tmp_path.glob("orphan.*")]
    # The shell that started one in the background may not have ended yet.
    wait_until(lambda: {parent_of(process) for process in processes} == {guardian.pid})
    (tmp_path / "go").touch()
    wait_until(lambda: not any(process.exists() for process in processes))


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"\xff" * 64, marks=pytest.mark.everyday),
        b"\0\0\0\0\x09\0\0\0",  # no such kind
        b"\x04\0\0\0\x01\0\0\0abcd",  # a spawn that is too short
        struct.pack("=6I", 16, 1, 0, 0, 0xFFFFFFFF, 0),  # 4 billion arguments
        struct.pack("=6I", 20, 1, 0, 0, 1, 0) + b"\0a\0b",  # bytes too many
        struct.pack("=6I", 19, 1, 0, 0, 1, 0) + b"\0a\0",  # no descriptors
        b"\x01\0\0\0\x02\0\0\0a",  # a signal that is too short
    ],
    ids=["noise", "kind", "spawn", "many arguments", "too long", "no descriptors", "signal"],
)
def test_nonsense_ends_it_and_its_workers(guardian: Guardian, request_bytes: bytes) -> None:
    spawn(guardian, 0, *SLEEP)
    pid = read(guardian, 1)[0].pid
    guardian._socket.sendall(request_bytes)
    with pytest.raises(GuardianLostError):
        while True:
            guardian.read()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(GuardianLostError):
        for _ in range(2):
            guardian.signal(0, 15)


def test_what_cannot_be_handed_to_a_program_is_refused(guardian: Guardian) -> None:
    with pytest.raises(InvalidArgumentError, match="more than Linux can pass"):
        spawn(guardian, 0, "x", "y" * (9 << 20))
    with pytest.raises(InvalidArgumentError, match="NUL character"):
        spawn(guardian, 0, "x", "a\0b")
    spawn(guardian, 1, "true", "y" * (3 << 20))  # within our limit, beyond the kernel's
    failed = read(guardian, 2)[1]
    assert (failed.kind, os.strerror(failed.status)) == (
        ReportKind.SPAWN_FAILED,
        "Argument list too long",
    )


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.everyday
def test_past_the_fence_everything_is_killed_and_nothing_starts(guardian: Guardian) -> None:
    guardian.fence(boot_time() + 600)
    for worker in range(3):
        spawn(guardian, worker, *SLEEP)
    read(guardian, 3)
    fence = boot_time() + 0.5
    guardian.fence(fence)
    reports = read(guardian, 4)
    assert boot_time() > fence
    assert reports[0].kind is ReportKind.FENCED
    assert {(each.kind, each.status) for each in reports[1:]} == {(ReportKind.EXITED, 9)}
    spawn(guardian, 3, *SLEEP)
    (refused,) = read(guardian, 1)
    assert (refused.kind, refused.status) == (ReportKind.SPAWN_FAILED, errno.ETIME)
    guardian.fence(None)
    spawn(guardian, 4, "true")
    assert [report.kind for report in read(guardian, 2)] == [
        ReportKind.STARTED,
        ReportKind.EXITED,
    ]


def test_a_lease_that_is_read_late_holds(guardian: Guardian) -> None:
    fence = boot_time() + 3.0
    guardian.fence(fence)
    spawn(guardian, 0, *SLEEP)
    (started,) = read(guardian, 1)
    os.kill(guardian.pid, signal.SIGSTOP)
    guardian.fence(boot_time() + 600)
    wait_until(lambda: boot_time() > fence)
    os.kill(guardian.pid, signal.SIGCONT)
    spawn(guardian, 1, "true")
    assert [report.worker for report in read(guardian, 2)] == [1, 1]
    assert Path(f"/proc/{started.pid}").exists()


FAMILY = """
import os, time
if os.fork() == 0:
    os.setsid()  # no signal to the worker's group reaches it
    os.fork()
while True:
    time.sleep(0.01)
"""


def family_of(pid: int) -> list[int]:
    """That process, and those below it."""
    with Path(f"/proc/{pid}/task/{pid}/children").open() as file:
        below = [int(each) for each in file.read().split()]
    return [pid, *[found for each in below for found in family_of(each)]]


def spawn_family(guardian: Guardian) -> list[int]:
    """A worker with a child and a grandchild, its own pid first."""
    spawn(guardian, 0, sys.executable, "-c", FAMILY)
    worker = read(guardian, 1)[0].pid
    wait_until(lambda: len(family_of(worker)) == 3)
    return family_of(worker)


def await_state(pids: list[int], states: str) -> None:
    wait_until(lambda: all(state_of(pid) in states for pid in pids))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_is_paused_stays_so_until_it_is_resumed(guardian: Guardian) -> None:
    worker, *_ = pids = spawn_family(guardian)
    guardian.pause()
    await_state(pids, "T")
    os.kill(worker, signal.SIGCONT)  # as a scheduler may
    time.sleep(0.1)
    await_state(pids, "T")
    guardian.resume()
    await_state(pids, "SR")
    assert read(guardian, 1)[0].kind is ReportKind.CONTINUED
    guardian.pause()
    guardian.end()
    assert [report.kind for report in read(guardian, 2)] == [ReportKind.EXITED, ReportKind.ENDED]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    spawn(guardian, 1, "true")  # and nothing is paused any more
    assert read(guardian, 2)[1].kind is ReportKind.EXITED


def test_a_fence_that_pauses_nobody_pauses_who_comes_after_it(guardian: Guardian) -> None:
    """Until it is resumed, with which each round begins."""
    guardian.end()
    guardian.fence(boot_time(), pauses=True)
    kinds = {report.kind for report in read(guardian, 2)}
    assert kinds == {ReportKind.ENDED, ReportKind.FENCED}
    guardian.fence(boot_time() + 60.0, pauses=True)
    spawn(guardian, 1, *SLEEP)
    (started,) = read(guardian, 1)
    spawn(guardian, 2, "true")  # the first end of a child
    await_state([started.pid], "T")
    guardian.resume()
    await_state([started.pid], "SR")


def test_past_a_fence_that_pauses_nothing_is_lost(guardian: Guardian) -> None:
    worker, *_ = pids = spawn_family(guardian)
    guardian.fence(boot_time() + 0.3, pauses=True)
    assert read(guardian, 1)[0].kind is ReportKind.FENCED
    await_state(pids, "T")
    os.kill(worker, signal.SIGCONT)
    time.sleep(0.1)
    await_state(pids, "T")
    spawn(guardian, 1, *SLEEP)
    (refused,) = read(guardian, 1)
    assert (refused.kind, refused.status) == (ReportKind.SPAWN_FAILED, errno.ETIME)
    guardian.fence(boot_time() + 2.0, pauses=True)
    guardian.resume()
    await_state(pids, "SR")
    assert [each.kind for each in read(guardian, 2)] == [ReportKind.CONTINUED, ReportKind.FENCED]
    await_state(pids, "T")
    guardian.fence(boot_time())  # now nobody can go on
    fenced, exited = read(guardian, 2)
    assert (fenced.kind, exited.kind) == (ReportKind.FENCED, ReportKind.EXITED)
    guardian.end()
    assert read(guardian, 1)[0].kind is ReportKind.ENDED
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.everyday
def test_requests_wait_for_a_guardian_that_does_not_read(
    guardian: Guardian, tmp_path: Path
) -> None:
    """Also with their descriptors, of which the agent's own are closed at once."""
    os.kill(guardian.pid, signal.SIGSTOP)
    big = {"BIG": "x" * 100_000}
    for worker in range(20):
        out = os.open(tmp_path / str(worker), os.O_WRONLY | os.O_CREAT)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fds = (0, out, 2, theirs.fileno(), theirs.fileno())
            guardian.spawn(worker, ("/bin/echo", str(worker)), big, descriptors=fds)
        os.close(out)
    assert guardian.has_unsent
    os.kill(guardian.pid, signal.SIGCONT)
    reports = read(guardian, 40)
    assert all(report.status == 0 for report in reports if report.kind is ReportKind.EXITED)
    assert [(tmp_path / str(worker)).read_text() for worker in range(20)] == [
        f"{worker}\n" for worker in range(20)
    ]
    assert not guardian.has_unsent


# A template as the guardian sees it: base/template.py imports, and does more with the worker.
TEMPLATE = 99
FORKS = """
import os, socket, struct, time
link = socket.socket(fileno=4)
def answer(pid, stage=0, error=0):
    link.send(struct.pack("=3i", pid, stage, error))
def request():
    message, fds, _, _ = socket.recv_fds(link, 1 << 20, 6)
    return fds if message else os._exit(0)
def fork(fds):
    reader, writer = os.pipe()
    if os.fork() == 0:
        pid = os.fork()
        if pid:
            os.write(writer, b"%d" % pid)
            os._exit(0)
        os._exit(5 if os.read(fds[5], 1) else 6)
    os.wait()
    for fd in fds:
        os.close(fd)
    return int(os.read(reader, 20))
"""
READY = f"{FORKS}\nanswer(0)\n"
LOOP = "while True: answer(fork(request()))"
SERVES = f"{READY}\n{LOOP}"
CODE = ("sh", "-c", "exit 7")  # of a worker that is started by exec; a forked one ends with 5


def start_template(guardian: Guardian, program: str) -> int:
    """Its process number."""
    nothing = os.open(os.devnull, os.O_RDWR)
    argv = (sys.executable, "-c", program)
    guardian.template(TEMPLATE, argv, dict(os.environ), descriptors=(nothing, 1, 2, nothing))
    os.close(nothing)
    (started,) = read(guardian, 1)
    assert (started.kind, started.worker) == (ReportKind.STARTED, TEMPLATE)
    return started.pid


def end_of(guardian: Guardian, worker: int) -> GuardianReport:
    """How a worker ends, if it is started and nothing else happens."""
    spawn(guardian, worker, *CODE)
    started, ended = read(guardian, 2)
    assert (started.kind, started.worker) == (ReportKind.STARTED, worker)
    assert (ended.worker, ended.pid) == (worker, started.pid)
    return ended


class TestTemplate:
    @pytest.mark.everyday
    def test_it_forks_the_workers(self, guardian: Guardian) -> None:
        pid = start_template(guardian, SERVES)
        for worker in range(3):
            end = end_of(guardian, worker)
            assert (end.kind, end.code, end.status) == (ReportKind.EXITED, 1, 5)
        guardian.end()  # spares it
        assert read(guardian, 1)[0].kind is ReportKind.ENDED
        assert end_of(guardian, 3).status == 5
        os.kill(pid, signal.SIGKILL)
        (killed,) = read(guardian, 1)
        assert (killed.kind, killed.worker, killed.status) == (ReportKind.EXITED, TEMPLATE, 9)
        assert end_of(guardian, 4).status == 7
        start_template(guardian, SERVES)
        assert end_of(guardian, 5).status == 5

    def test_workers_wait_while_it_imports(self, guardian: Guardian) -> None:
        start_template(guardian, f"import time\ntime.sleep(1)\n{SERVES}")
        assert end_of(guardian, 0).status == 5

    def test_it_may_say_that_it_cannot(self, guardian: Guardian) -> None:
        start_template(guardian, f"{READY}\nwhile True:\n    request()\n    answer(0)")
        assert end_of(guardian, 0).status == 7
        assert end_of(guardian, 1).status == 7

    def test_a_worker_that_cannot_be_set_up(self, guardian: Guardian) -> None:
        start_template(guardian, f"{READY}\nrequest()\nanswer(0, 4, {errno.EINVAL})\nrequest()")
        spawn(guardian, 0, *CODE)
        (failed,) = read(guardian, 1)
        assert (failed.kind, failed.code, failed.status) == (
            ReportKind.SPAWN_FAILED,
            4,
            errno.EINVAL,
        )

    def test_one_that_names_a_process_of_others(self, guardian: Guardian) -> None:
        start_template(guardian, f"{READY}\nrequest()\nanswer({os.getpid()})\nrequest()")
        assert end_of(guardian, 0).status == 7

    def test_one_that_dies_with_a_request(self, guardian: Guardian) -> None:
        """Also after the fork: the worker has not gone on, and never does."""
        for program in (f"{READY}\nrequest()", f"{READY}\nfork(request())"):
            start_template(guardian, program)
            spawn(guardian, 0, *CODE)
            ends: dict[int, int] = {}
            while len(ends) < 2:
                for report in guardian.read():
                    if report.kind is ReportKind.EXITED:
                        ends[report.worker] = report.status
            assert ends == {TEMPLATE: 0, 0: 7}

    def test_a_worker_that_dies_before_it_is_known(self, guardian: Guardian) -> None:
        kills = "pid = fork(request())\nos.kill(pid, 9)\ntime.sleep(0.2)\nanswer(pid)\nrequest()"
        start_template(guardian, f"{READY}\n{kills}")
        end = end_of(guardian, 0)
        assert (end.kind, end.code, end.status) == (ReportKind.EXITED, 2, 9)

    def test_one_that_does_not_answer(self, guardian: Guardian) -> None:
        pid = start_template(
            guardian, f"{READY}\npid = fork(request())\ntime.sleep(3)\nanswer(pid)\n{LOOP}"
        )
        spawn(guardian, 0, *CODE)
        late, started, ended = read(guardian, 3)
        assert (late.kind, late.worker) == (ReportKind.LATE, TEMPLATE)
        assert (started.worker, ended.worker, ended.status) == (0, 0, 7)
        assert end_of(guardian, 1).status == 7  # at once, until it answers
        wait_until(lambda: end_of(guardian, 2).status == 5)
        assert state_of(pid) == "S"

    def test_one_that_is_stopped(self, guardian: Guardian) -> None:
        pid = start_template(guardian, SERVES)
        assert end_of(guardian, 0).status == 5
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: end_of(guardian, 1).status == 7)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: end_of(guardian, 2).status == 5)

    def test_a_pause_is_no_delay(self, guardian: Guardian) -> None:
        pid = start_template(guardian, f"import time\ntime.sleep(1)\n{SERVES}")
        spawn(guardian, 0, *CODE)
        guardian.pause()
        await_state([pid], "T")
        time.sleep(1.5)
        guardian.resume()
        assert [report.status for report in read(guardian, 2)] == [0, 5]

    def test_it_outlives_a_round_that_ends_while_all_are_paused(self, guardian: Guardian) -> None:
        pid = start_template(guardian, SERVES)
        assert end_of(guardian, 0).status == 5
        guardian.pause()
        await_state([pid], "T")
        guardian.end()
        assert read(guardian, 1)[0].kind is ReportKind.ENDED
        assert end_of(guardian, 1).status == 5

    def test_the_end_of_a_round_drops_what_waits(self, guardian: Guardian) -> None:
        start_template(
            guardian, f"{READY}\npid = fork(request())\ntime.sleep(0.5)\nanswer(pid)\n{LOOP}"
        )
        spawn(guardian, 0, *CODE)
        spawn(guardian, 1, *CODE)
        guardian.end()
        first, second, ended = read(guardian, 3)
        assert {(each.kind, each.status, each.pid) for each in (first, second)} == {
            (ReportKind.EXITED, 9, 0)
        }
        assert ended.kind is ReportKind.ENDED
        assert end_of(guardian, 2).status == 5  # once it has answered

    def test_a_signal_reaches_who_waits(self, guardian: Guardian) -> None:
        start_template(guardian, "import time\ntime.sleep(600)")
        spawn(guardian, 0, *SLEEP)
        guardian.signal(0, signal.SIGTERM)
        started, ended = read(guardian, 2)
        assert (started.kind, ended.kind, ended.status) == (
            ReportKind.STARTED, ReportKind.EXITED, signal.SIGTERM
        )  # fmt: skip

    def test_past_the_fence_it_forks_nothing(self, guardian: Guardian) -> None:
        start_template(guardian, SERVES)
        guardian.fence(time.clock_gettime(time.CLOCK_BOOTTIME) - 1)
        spawn(guardian, 0, *CODE)
        kinds = {report.kind for report in read(guardian, 2)}
        assert kinds == {ReportKind.FENCED, ReportKind.SPAWN_FAILED}
