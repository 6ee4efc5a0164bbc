"""A contender's processes: their answers are passed on, failures are told, and all are ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.base.process_end import ProcessEnd
from rallypoint.lab.bench import crew as module
from rallypoint.lab.bench.crew import Crew, CrewError, check_ranks, new_address

# Two ranks that do as they are told: rank 0 starts rank 1.
RANKS = """
import json, os, signal, socket, sys
rank = 0 if os.fork() else 1
print(f"this is process {rank}", flush=True)
server = socket.socket(socket.AF_UNIX)
server.connect("\\0" + sys.argv[1])
lines = server.makefile("rw")
is_deaf = False
for line in lines:
    order = json.loads(line)
    if order.get("leaves") == rank:
        break
    if order.get("order") == "stop":
        if is_deaf:
            continue
        break
    is_deaf |= "is_deaf" in order
    if order.get("is_stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if order.get("is_silent") == rank:
        continue
    answer = {"rank": rank, "pid": os.getpid(), "order": order, "directory": os.getenv("TMPDIR")}
    if order.get("fails") == rank:
        answer = {"error": "MemoryError: too long"}
    print(json.dumps(answer), file=lines, flush=True)
if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
    signal.pause()
"""


class Pair:
    """A crew of such ranks, and how their ends are noticed."""

    def __init__(self, directory: Path) -> None:
        self.address = new_address()
        self.directory = directory / "crew"
        self.crew = Crew("mpich", ranks=2, address=self.address, directory=self.directory)
        self.command = [sys.executable, "-I", "-S", "-c", RANKS, self.address]
        self.pids: list[int] = []
        self.ends: list[ProcessEnd] = []

    def start(self, command: list[str] | None = None, **begin: object) -> None:
        answers = self.crew.start(self.command if command is None else command, os.environ, begin)
        pids = {answer["rank"]: answer["pid"] for answer in answers}  # in any order, at first
        self.pids = [pids[0], pids[1]]
        self.ends = [ProcessEnd(pid) for pid in self.pids]

    def have_ended(self) -> bool:
        return all(end.wait(10) for end in self.ends)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.crew.end()
    assert made.have_ended()
    for end in made.ends:
        end.close()


def test_orders_reach_all_and_answers_come_by_rank(pair: Pair) -> None:
    pair.start(first=1)
    answers = pair.crew.ask({"count": 7})
    assert [answer["rank"] for answer in answers] == [0, 1]
    assert [answer["order"] for answer in answers] == [{"count": 7}] * 2
    assert {answer["directory"] for answer in answers} == {str(pair.directory)}
    groups = {os.getpgid(pid) for pid in pair.pids}
    assert groups == {pair.pids[0]} != {os.getpgid(0)}  # which Ctrl-C does not reach


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"fails": 1}, "mpich: MemoryError: too long"),
        ({"leaves": 0}, "mpich: a process ended\n  | this is process "),
        ({"is_silent": 1}, "mpich: no answer within 300 s"),
    ],
)
def test_what_goes_wrong_is_told(pair: Pair, order: dict[str, int], message: str) -> None:
    pair.start()
    if "is_silent" in order:
        pair.crew._members[1].connection.settimeout(0.01)
    with pytest.raises(CrewError) as raised:
        pair.crew.ask(order)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("program", "limit_s", "message"),
    [
        ("echo one; echo two >&2; exit 3", 120.0, "mpich: it did not start\n  | one\n  | two"),
        ("exec sleep 60", 0.0, "mpich: not all processes connected within 0 s"),
    ],
)
def test_those_that_do_not_connect(
    pair: Pair, program: str, limit_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "START_S", limit_s)
    pair.crew._listener.settimeout(0.01)
    with pytest.raises(CrewError) as raised:
        pair.crew.start(["sh", "-c", program], os.environ, {})
    assert str(raised.value).startswith(message)


def test_processes_of_other_users_are_turned_away(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So all of them are, which then end without an order."""
    monkeypatch.setattr(os, "geteuid", lambda: 123_456)
    pair.crew._listener.settimeout(0.01)
    with pytest.raises(CrewError, match=r"it did not start\n  [|] this is process "):
        pair.start()


@pytest.mark.parametrize("is_ours", [True, False])
def test_those_that_do_not_leave_are_killed(
    pair: Pair, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another host's MPI started them, which is not told."""
    monkeypatch.setattr(module, "_LEAVE_S", 0.01)
    if is_ours:
        pair.start(is_stubborn=True)
        pair.crew.end()
    else:
        other = subprocess.Popen(pair.command, stdout=subprocess.DEVNULL)
        pair.start([], is_stubborn=True)
        pair.crew.end()
        other.wait()
    assert pair.have_ended()


def test_those_that_do_not_hear_the_word_notice_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their connection is closed."""
    monkeypatch.setattr(module, "_LEAVE_S", 10.0)  # on a machine that may be busy
    pair.start(is_deaf=True)
    pair.crew.end()
    assert pair.crew._process is not None
    assert pair.crew._process.returncode == 0  # it was not killed


def test_ranks_that_did_not_find_each_other() -> None:
    check_ranks("mpich", [{"rank": 1}, {"rank": 0}])
    with pytest.raises(CrewError) as raised:
        check_ranks("mpich", [{"rank": 0}, {"rank": 0}])
    assert str(raised.value) == (
        "mpich: its 2 processes did not find each other; each reports that it is rank 0, 0"
    )
