"""Two rounds' workers are never alive at one time, whatever keeps an agent from its work.

Workers note when they begin and, all the time, that they live; all hosts have one clock here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.nodes import Agents
from tests.system.test_blocked_output import fill

pytestmark = pytest.mark.system

# Three nodes begin at once, however late the third one comes on a busy machine.
FULL = ("--rdzv-conf", "last_call_timeout=60")
LEASE = "keep_alive_interval=0.3,keep_alive_max_attempt=5"
WATCHFUL = ("--rdzv-conf", f"last_call_timeout=60,{LEASE}")
WITNESS = """
import os, time
e = os.environ
name = f"{e['TORCHELASTIC_RESTART_COUNT']}.{os.uname().nodename}.{e['RANK']}"
size = f"{e['TORCHELASTIC_RESTART_COUNT']} {e['RANK']}/{e['WORLD_SIZE']}"
def note(kind):
    with open(f"part.{kind}.{name}", "w") as file:
        file.write(f"{time.monotonic()} {os.getpid()}")
    os.rename(f"part.{kind}.{name}", f"{kind}.{name}")
note("began")
with open(f"part.up.{name}", "w") as file:
    file.write(size)
os.rename(f"part.up.{name}", f"up.{os.uname().nodename}")
while not os.path.exists("go"):
    note("lived")
    time.sleep(0.003)
"""


def times(directory: Path, kind: str) -> dict[int, list[float]]:
    """Round -> when its workers began, or were last seen alive."""
    found: dict[int, list[float]] = {}
    for path in directory.glob(f"{kind}.*"):
        at = float(path.read_text().split()[0])
        found.setdefault(int(path.name.split(".")[1]), []).append(at)
    return found


def check_rounds(agents: Agents) -> None:
    """No worker of a round was seen alive after one of the next had begun."""
    began, lived = times(agents.directory, "began"), times(agents.directory, "lived")
    for number in lived:
        later = [each for other in began if other > number for each in began[other]]
        assert not later or max(lived[number]) < min(later), (number, agents.story())


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        (tmp_path / "worker.py").write_text(WITNESS)
        yield agents


@pytest.fixture
def full_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    fill(writing)
    yield writing
    os.close(reading)
    os.close(writing)


def start_three(agents: Agents, *flags: str, err: int | None = None) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", *flags, err=err if number == 3 else None)
    agents.wait_for({f"host{i}": f"0 {i - 1}/3" for i in (1, 2, 3)})


@pytest.mark.everyday
def test_two_rounds_of_a_failing_rank(agents: Agents) -> None:
    start_three(agents, "--max-restarts", "1", *FULL)
    agents.kill_worker(2)
    agents.wait_for({f"host{i}": f"1 {i - 1}/3" for i in (1, 2, 3)})
    agents.finish((1, 2, 3))
    check_rounds(agents)


@pytest.mark.repeated
def test_stopped_stderr_beside_a_failing_rank(agents: Agents, full_pipe: int) -> None:
    start_three(agents, "--max-restarts", "1", *WATCHFUL, err=full_pipe)
    agents.kill_worker(2)
    agents.wait_for({f"host{i}": f"1 {i - 1}/3" for i in (1, 2, 3)})
    time.sleep(2.5)  # more than the others would wait for a node that fell silent
    check_rounds(agents)
    assert agents.up() == {f"host{i}": f"1 {i - 1}/3" for i in (1, 2, 3)}
    agents.send(3, signal.SIGTERM)
    assert agents.ended(3) == 143
    agents.wait_for({"host1": "2 0/2", "host2": "2 1/2"})
    check_rounds(agents)
    agents.finish((1, 2))


@pytest.mark.repeated
def test_stopped_stderr_beside_a_cut_cable(agents: Agents, full_pipe: int) -> None:
    start_three(agents, *WATCHFUL, err=full_pipe)
    agents.hosts.pull_cable(3)
    agents.wait_for({"host1": "1 0/2", "host2": "1 1/2"})
    check_rounds(agents)
    agents.hosts.plug_cable(3)
    agents.wait_for({f"host{i}": f"2 {i - 1}/3" for i in (1, 2, 3)})
    check_rounds(agents)
    agents.finish((1, 2, 3))


def test_a_tee_that_nobody_reads_beside_a_failing_rank(agents: Agents, full_pipe: int) -> None:
    """Its worker has written more than a pipe holds: the node stays in the job."""
    script = agents.directory / "worker.py"
    script.write_text("for i in range(5000): print('x' * 100)\n" + WITNESS)
    for number in (1, 2):
        agents.start(
            number, "--nnodes", "1:2", "--max-restarts", "1", "--tee", "1", "--log-dir",
            f"log{number}", *WATCHFUL, out=full_pipe if number == 2 else None,
        )  # fmt: skip
    agents.wait_for({f"host{i}": f"0 {i - 1}/2" for i in (1, 2)})
    agents.kill_worker(1)
    agents.wait_for({f"host{i}": f"1 {i - 1}/2" for i in (1, 2)})
    time.sleep(2.5)
    check_rounds(agents)
    assert agents.up() == {f"host{i}": f"1 {i - 1}/2" for i in (1, 2)}
    (agents.directory / "go").touch()
    assert agents.ended(1) == 0
    agents.send(2, signal.SIGTERM)  # it would wait 30 s for somebody to read
    agents.ended(2)


@pytest.mark.parametrize("number", [1, 3], ids=["the coordinator", "another"])
def test_a_stopped_agents_workers_are_dead_before_the_next_round(
    agents: Agents, number: int
) -> None:
    start_three(agents, *WATCHFUL)
    agents.send(number, signal.SIGSTOP)
    others = [i for i in (1, 2, 3) if i != number]
    wait_until(lambda: {agents.up()[f"host{i}"] for i in others} == {"1 0/2", "1 1/2"})
    check_rounds(agents)
    agents.send(number, signal.SIGCONT)
    wait_until(lambda: set(agents.up().values()) == {f"2 {rank}/3" for rank in range(3)})
    check_rounds(agents)
    agents.finish((1, 2, 3))


def test_a_static_job_and_one_left_alone_outlive_a_stopped_launcher(agents: Agents) -> None:
    """Nobody starts workers instead of them: Ctrl-Z and a debugger do no harm."""
    alone = ("--rdzv-conf", f"last_call_timeout=0.1,{LEASE}")
    agents.start(3, "--nnodes", "1:2", "--rdzv-endpoint", "host3:29400", *alone)
    flags = ("--nnodes", "2", "--rdzv-backend", "static", "--master-addr", "host1")
    for number in (1, 2):
        agents.start(number, *flags, "--rdzv-endpoint", "", "--node-rank", str(number - 1))
    agents.wait_for({"host1": "0 0/2", "host2": "0 1/2", "host3": "0 0/1"})
    for number in (2, 3):
        agents.send(number, signal.SIGSTOP)
    time.sleep(8)  # longer than a network may be down
    for number in (2, 3):
        agents.send(number, signal.SIGCONT)
    time.sleep(1)
    assert agents.up() == {"host1": "0 0/2", "host2": "0 1/2", "host3": "0 0/1"}
    agents.finish((1, 2, 3))


def test_a_job_of_one_node_outlives_a_stopped_launcher(launch: Launch) -> None:
    process = launch.start(launch.script(WITNESS))
    (began,) = launch.wait_for("began.*")
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2)
    pid = int(began.read_text().split()[1])
    assert Path(f"/proc/{pid}").exists()
    os.kill(process.pid, signal.SIGCONT)
    (launch.directory / "go").touch()
    assert process.wait(60) == 0


def test_the_witness_sees_what_it_should(agents: Agents) -> None:
    """Two rounds at once, by hand: the check of this file finds them."""
    processes = [
        agents.hosts[1].popen(
            [sys.executable, str(agents.directory / "worker.py")],
            env={
                **os.environ,
                "TORCHELASTIC_RESTART_COUNT": str(number),
                "RANK": "0",
                "WORLD_SIZE": "1",
            },
            cwd=agents.directory,
        )
        for number in range(2)
    ]

    def live_both() -> bool:
        began, lived = times(agents.directory, "began"), times(agents.directory, "lived")
        return len(began) == len(lived) == 2 and min(lived.values()) > max(began.values())

    wait_until(live_both)
    with pytest.raises(AssertionError):
        check_rounds(agents)
    (agents.directory / "go").touch()
    for process in processes:
        assert process.wait(60) == 0
