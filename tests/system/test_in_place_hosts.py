"""Hosts are cut off from the others, or stopped, and come back: there is one history at any time.

In that of the others, whose processes go on, whether or not the host was the coordinator's.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from tests.hosts import Hosts
from tests.system.nodes import Agents, alive_on
from tests.system.test_in_place import PROGRAM, Step, check_steps, steps_of

# Of each kind; 50 in `make check-long`.
TIMES = int(os.environ.get("RALLYPOINT_TEST_PARTITIONS", "1"))
pytestmark = [pytest.mark.system, pytest.mark.timeout(300 + 30 * TIMES)]
PATIENT = ("--rdzv-conf", "last_call_timeout=60,keep_alive_interval=5,keep_alive_max_attempt=6")
WATCHFUL = ("--rdzv-conf", "last_call_timeout=60,keep_alive_interval=0.3,keep_alive_max_attempt=5")
RALLYPOINT = (sys.executable, "-m", "rallypoint")
WORKER = f"""
import os, runpy, sys
host = os.uname().nodename.removeprefix("host")
sys.argv = ["{PROGRAM}", os.getcwd(), "1000000", "0.005", "until", "host=" + host]
sys.argv += os.environ.get("OPTIONS", "").split()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        (tmp_path / "worker.py").write_text(WORKER)
        yield agents


class Watch:
    """What the ranks have told last."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    def last(self) -> dict[int, list[tuple[int, int]]]:
        """Step and number of ranks that each process told last, by host."""
        found: dict[int, list[tuple[int, int]]] = {}
        for path in self._agents.directory.glob("*.log"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 1000))
                lines = file.read().split(b"\n")[:-1]  # the last may be half of one
            if lines:
                number, _, _, size, *_ = lines[-1].split(b" ")
                told = found.setdefault(int(path.stem) // 10_000_000, [])
                told.append((int(number), int(size)))
        return found

    def step(self) -> int:
        return max(max(told)[0] for told in self.last().values())

    def await_size(self, size: int, hosts: tuple[int, ...]) -> int:
        """Until these hosts are further than now, as so many ranks; returns the step."""
        before, deadline = self.step(), time.monotonic() + 60
        while True:
            last = self.last()
            steps = [
                max((number for number, ranks in last[host] if ranks == size), default=0)
                for host in hosts
            ]
            if min(steps) > before + 5:
                return min(steps)
            assert time.monotonic() < deadline, (last, self._agents.story())
            time.sleep(0.02)


def start_three(
    agents: Agents,
    options: str = "",
    *,
    restarts: int = 1000,
    rdzv_conf: Sequence[str] = WATCHFUL,
    environ: Mapping[str, str] = MappingProxyType({}),
    workers: int = 1,
) -> Watch:
    flags = ("--nnodes", "2:3", "--max-restarts", str(restarts), *rdzv_conf)
    for number in (1, 2, 3):
        agents.start(number, *flags, workers=workers, environ={"OPTIONS": options, **environ})
    deadline = time.monotonic() + 60
    watch = Watch(agents)
    while set(watch.last()) != {1, 2, 3}:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.02)
    watch.await_size(3 * workers, (1, 2, 3))
    return watch


def check_history(agents: Agents) -> dict[int, list[Step]]:
    """All end as three; each step was committed once, by all ranks of one round."""
    (agents.directory / "enough").touch()
    for number in (1, 2, 3):
        assert agents.ended(number) == 0, agents.story()
    found = steps_of(agents.directory)
    check_steps(found, len(found))
    for number, told in found.items():
        assert len({step.rank for step in told}) == len(told) <= told[0].size, (number, told)
    return found


class Absence(NamedTuple):
    """A host that was cut off, or stopped, for some time."""

    host: int
    begin_s: float
    end_s: float

    def check(self, found: dict[int, list[Step]]) -> None:
        """The processes of the other hosts went on together, and it did nothing alone."""
        told = [step for steps in found.values() for step in steps]
        before = {step.pid for step in told if step.at_s < self.begin_s}
        within = [step for step in told if self.begin_s < step.at_s < self.end_s]
        alone = [step.number for step in within if step.pid // 10_000_000 == self.host]
        together = [step for step in within if step.size == 2]
        print(f"host{self.host} away {self.end_s - self.begin_s:.2f} s: {len(together) // 2} steps")
        assert {step.pid for step in together} <= before, self
        assert max(alone, default=0) < min(step.number for step in together)


def test_a_host_is_cut_off(agents: Agents, seed: int) -> None:
    """The two others go on; it waits, and joins them when the network is whole again."""
    chance = random.Random(seed)
    watch = start_three(agents)
    absences: list[Absence] = []
    for _ in range(1 + TIMES):
        lonely = chance.choice((1, 2, 3)) if absences else 1  # where the coordinator is
        time.sleep(chance.random() * 0.3)
        others = [number for number in (1, 2, 3) if number != lonely]
        begin_s = time.monotonic()
        agents.hosts.partition([lonely], others)
        watch.await_size(2, tuple(others))
        time.sleep(chance.random())
        absences.append(Absence(lonely, begin_s, time.monotonic()))
        agents.hosts.heal()
        watch.await_size(3, (1, 2, 3))
    found = check_history(agents)
    for absence in absences:
        absence.check(found)


def test_the_others_agents_are_held_up_as_leases_end(agents: Agents) -> None:
    """By a busy machine, say, for longer than the guardians wait for them."""
    watch = start_three(agents)
    begin_s = time.monotonic()
    agents.hosts.partition([1], [2, 3])  # where the coordinator is
    time.sleep(1.0)  # leases end after 1.2 to 1.5 s
    for number in (2, 3):
        agents.send(number, signal.SIGSTOP)
    time.sleep(3.5)
    for number in (2, 3):
        agents.send(number, signal.SIGCONT)
    watch.await_size(2, (2, 3))
    absence = Absence(1, begin_s, time.monotonic())
    agents.hosts.heal()
    watch.await_size(3, (1, 2, 3))
    absence.check(check_history(agents))


def test_agents_are_held_up_for_about_as_long_as_leases_last(agents: Agents, seed: int) -> None:
    """Whether or not the others go on meanwhile, all do together afterwards."""
    chance = random.Random(seed)
    watch = start_three(agents)
    for _ in range(2 * TIMES):
        held = chance.sample((1, 2, 3), chance.randint(1, 3))
        time.sleep(chance.random() * 0.3)
        for number in held:
            agents.send(number, signal.SIGSTOP)
        time.sleep(chance.uniform(1.2, 2.2))
        for number in held:
            agents.send(number, signal.SIGCONT)
        watch.await_size(3, (1, 2, 3))
    check_history(agents)


def test_the_network_is_down_for_a_while(agents: Agents) -> None:
    """Nobody can go on alone, for longer than a call may take; then all do, with what they have."""
    watch = start_three(agents, "timeout_s=3")
    for number in (1, 2, 3):
        agents.hosts.pull_cable(number)
    agents.wait_until_said(2, "pausing the workers of this node until the job continues")
    down_until = time.monotonic() + 5
    explain = agents.hosts[2].enter("env", f"TMPDIR={agents.directory}", *RALLYPOINT, "explain")
    told = subprocess.run(explain, capture_output=True, text=True, check=False).stdout
    assert "is paused by the launcher until the job continues" in told
    time.sleep(max(0.0, down_until - time.monotonic()))
    for number in (1, 2, 3):
        agents.hosts.plug_cable(number)
    watch.await_size(3, (1, 2, 3))
    found = check_history(agents)
    assert len({step.pid for told in found.values() for step in told}) == 3, agents.story()
    assert all(step.size == 3 for told in found.values() for step in told)


def test_connections_break_though_nobody_is_lost(agents: Agents) -> None:
    """The network is silent for longer than connections last, but not for as long as leases do."""
    watch = start_three(agents, rdzv_conf=PATIENT, environ={"RALLYPOINT_SILENCE": "2"})
    agents.hosts.partition([1], [2, 3])
    time.sleep(4.0)
    agents.hosts.heal()
    watch.await_size(3, (1, 2, 3))
    found = check_history(agents)
    assert len({step.pid for told in found.values() for step in told}) == 3, agents.story()
    text = r"connections between ranks broke; all connect again; ranks? [-0-9]+ of 3 continues?"
    assert len(re.findall(text, agents.story())) == 3, agents.story()
    assert "restart 1" not in agents.story(), "nobody was lost, so nothing is charged"


@pytest.mark.seldom
def test_connections_last_for_as_long_as_nodes_may_be_silent(agents: Agents) -> None:
    """They end after 5 s otherwise."""
    watch = start_three(agents, rdzv_conf=PATIENT)
    agents.hosts.partition([1], [2, 3])
    time.sleep(7.0)
    agents.hosts.heal()
    watch.await_size(3, (1, 2, 3))
    check_history(agents)
    assert "recovered in place" not in agents.story()


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")
def test_two_hosts_cannot_reach_each_other(agents: Agents) -> None:
    """The workers of one of them are given up, and those of the other and the third go on."""
    watch = start_three(agents, restarts=0, workers=2)
    agents.hosts.switch.run(
        "nft",
        "add table bridge faults\n"
        "add chain bridge faults drops { type filter hook forward priority 0; }\n"
        "add rule bridge faults drops ip saddr { 10.77.0.1, 10.77.0.2 } "
        "ip daddr { 10.77.0.1, 10.77.0.2 } tcp sport > 32767 tcp dport > 32767 drop",
    )
    try:
        watch.await_size(4, (3,))
        (agents.directory / "enough").touch()
        assert agents.ended(3) == 0, agents.story()
    finally:
        agents.hosts.switch.run("nft", "delete table bridge faults")
    found = steps_of(agents.directory)
    check_steps(found, len(found))
    before, after = {step.pid for step in found[1]}, {step.pid for step in found[len(found)]}
    assert after < before
    assert len({pid // 10_000_000 for pid in after}) == 2, "hosts"
    assert re.search(
        r"rank \d was killed by the launcher, as others could not reach it", agents.story()
    )


@pytest.mark.parametrize("only_agent", [False, True], ids=["all of it", "its agent"])
def test_a_host_is_stopped(agents: Agents, seed: int, only_agent: bool) -> None:
    """For longer than the others wait; what its workers have then, or do, is lost."""
    chance = random.Random(seed)
    watch = start_three(agents)
    absences: list[Absence] = []
    for _ in range(TIMES):
        stopped = chance.choice((1, 2, 3))
        time.sleep(chance.random() * 0.3)
        others = tuple(number for number in (1, 2, 3) if number != stopped)
        pids = [agents.pid(stopped)] if only_agent else alive_on(agents.hosts[stopped])
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        begin_s = time.monotonic()
        watch.await_size(2, others)
        absences.append(Absence(stopped, begin_s, time.monotonic()))
        agent = agents.pid(stopped)
        for pid in chance.sample(pids, len(pids)):
            with suppress(ProcessLookupError):  # those that came first may have ended it
                if pid == agent:
                    agents.send(stopped, signal.SIGCONT)
                else:
                    os.kill(pid, signal.SIGCONT)
        watch.await_size(3, (1, 2, 3))
    found = check_history(agents)
    for absence in absences:
        absence.check(found)
