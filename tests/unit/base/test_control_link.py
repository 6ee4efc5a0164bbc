"""A worker's link to its agent; what a real clock ends, in a process of its own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from rallypoint.base import control_link
from rallypoint.base.control_link import ControlLink
from rallypoint.base.control_message import Place, Released, Stage, WorkerReport, decode, encode

WAIT = """
import sys, time
from rallypoint.base.control_link import ControlLink
link = ControlLink(int(sys.argv[1]))
print("waits", flush=True)
began = time.monotonic()
place = link.wait(0, float(sys.argv[2]))
print(place and place.round, time.monotonic() - began)
"""


def waiting(seconds: float) -> tuple[subprocess.Popen[str], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", WAIT, str(theirs.fileno()), str(seconds)],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    return process, ours


def told(process: subprocess.Popen[str]) -> tuple[str, float]:
    out, _ = process.communicate()
    round_, took_s = out.split()
    return round_, float(took_s)


def test_a_wait_ends_in_time() -> None:
    process, ours = waiting(0.3)
    with ours:
        round_, took_s = told(process)
    assert round_ == "None"
    assert took_s >= 0.3


def test_a_wait_ends_with_a_newer_place() -> None:
    process, ours = waiting(600.0)
    with ours:
        ours.send(encode(Place(0, {})))  # the one that it has
        ours.send(encode(Place(3, {})))
        round_, _ = told(process)
    assert round_ == "3"


class Clock(threading.Condition):
    """A wait takes what it is given, except for one during which the process is stopped."""

    def __init__(self, *, stopped_in: int) -> None:
        super().__init__()
        self._now = 0.0
        self._stopped_in = stopped_in
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self._now

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._now += 9.0 if len(self.waits) == self._stopped_in else timeout
        self.waits.append(timeout)
        return False


def test_time_for_which_the_process_is_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has been told when it goes on, but its thread that listens may be the later one."""
    clock, listener = Clock(stopped_in=1), SimpleNamespace(start=lambda: None)
    threads = SimpleNamespace(Condition=lambda: clock, Thread=lambda **_: listener)
    monkeypatch.setattr(control_link, "time", clock)
    monkeypatch.setattr(control_link, "threading", threads)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        link = ControlLink(theirs.fileno())
        with link._socket:
            assert link.wait(0, 2.5) is None
    assert clock.waits == [1.0, 1.0, 1.0, 1.0, 0.5]


# The stages of a worker, as its agent hears of them.


class Agent:
    """The other end of a worker's link."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_newcomer: bool = False) -> None:
        monkeypatch.setenv("RALLYPOINT_STANDBY", "1" if is_newcomer else "")
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.link = ControlLink(theirs.fileno())

    def heard(self) -> WorkerReport:
        report = decode(self._ours.recv(4096))
        assert isinstance(report, WorkerReport)
        return report

    def tell(self, message: Place | Released) -> None:
        self._ours.send(encode(message))

    def close(self) -> None:
        self._ours.close()
        self.link._socket.close()


def test_a_newcomers_way(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(monkeypatch, is_newcomer=True)
    with contextlib.closing(agent):
        link = agent.link
        link.enroll()
        assert agent.heard() == WorkerReport(Stage.SPARE, -1, is_elastic=True)
        link.ready()
        assert agent.heard() == WorkerReport(Stage.READY, -1, is_elastic=True)
        agent.tell(Place(3, {}))
        assert agent.heard() == WorkerReport(Stage.ASSIGNED, 3, is_elastic=True)
        link.joined(3)
        assert agent.heard() == WorkerReport(Stage.JOINED, 3, is_elastic=True)
        link.synchronized(3, begins_again=True)
        assert agent.heard() == WorkerReport(Stage.SYNCHRONIZED, 3, True, True)


def test_what_it_did_in_an_older_round_does_not_hide_a_newer_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(Agent(monkeypatch)) as agent:
        agent.link.joined(0)
        agent.tell(Place(1, {}))
        assert agent.link.wait(0, 60) is not None
        agent.link.synchronized(0, begins_again=False)
        stages = [agent.heard() for _ in range(3)]
        assert stages[-1] == WorkerReport(Stage.ASSIGNED, 1, is_elastic=True)
        assert not agent.link.leave(), "others wait for it there"


@pytest.mark.parametrize("answer", [Released(), Place(1, {})], ids=["released", "a place"])
def test_who_leaves_asks_whether_others_need_it(
    monkeypatch: pytest.MonkeyPatch, answer: Place | Released
) -> None:
    with contextlib.closing(Agent(monkeypatch)) as agent:
        agent.link.joined(0)
        agent.link.synchronized(0, begins_again=False)
        assert [agent.heard().is_elastic for _ in range(2)] == [False, True]
        found: list[bool] = []
        leaving = threading.Thread(target=lambda: found.append(agent.link.leave()))
        leaving.start()
        assert agent.heard() == WorkerReport(Stage.LEAVING, 0)
        agent.tell(answer)
        leaving.join()
        if isinstance(answer, Released):
            assert (found, agent.link.stage) == ([True], Stage.LEFT)
            agent.tell(Place(1, {}))
            assert agent.link.wait(0, 60) is not None
            assert agent.link.stage is Stage.LEFT, "it does not go there"
            agent.link.joined(2)
            assert agent.heard() == WorkerReport(Stage.JOINED, 2)
        else:
            assert found == [False]
            assert agent.heard() == WorkerReport(Stage.ASSIGNED, 1, is_elastic=True)


def test_no_stage_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        contextlib.closing(Agent(monkeypatch, is_newcomer=True)) as agent,
        pytest.raises(RuntimeError, match="a worker cannot go from SPARE to SYNCHRONIZED"),
    ):
        agent.link.synchronized(0, begins_again=False)
