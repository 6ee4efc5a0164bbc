"""The elastic example ends with the same network, whatever happens to its agents on the way."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import HOW_TO_GET

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not find_spec("sklearn"), reason=HOW_TO_GET["sklearn"]),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_digits_elastic.py"
SLOTS = 4
EVENTS = 6


class Cluster:
    """Agents of one job on this machine; that of slot 0 is at the endpoint."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        flags = ["--nnodes", f"1:{SLOTS}", "--rdzv-backend", "c10d"]
        flags += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "digits"]
        worker = [str(SCRIPT), "--checkpoint", str(directory / "elastic.npz"), "--pause", "0.02"]
        self._command = [sys.executable, "-m", "rallypoint", "run", *flags]
        self._worker = worker
        self._out = (directory / "output").open("ab")
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.began = True  # the job, in slot 0, whose agent is therefore the first member

    def start(self, slot: int) -> None:
        is_host = f"last_call_timeout=0.2,is_host={slot == 0}"
        self.agents[slot] = subprocess.Popen(
            [*self._command, "--rdzv-conf", is_host, *self._worker],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(self.directory)},
        )

    def end(self, slot: int, how: signal.Signals) -> None:
        """Of an agent: kill -9, or what preemption sends."""
        agent = self.agents.pop(slot)
        agent.send_signal(how)
        agent.wait(60)

    def await_progress(self) -> None:
        """Until there is another checkpoint, or the agent at the endpoint has ended."""
        before = self._written_at()
        self._await(lambda: self._written_at() != before)

    def await_members(self) -> None:
        """Until the agents that run, and no others, are the members, or agent 0 has ended."""
        # At most one checkpoint is of the round before, which may have had more members.
        self.await_progress()
        self.await_progress()
        self._await(lambda: self._last_members() == len(self.agents))

    def await_end(self, story: str) -> list[int]:
        """Exit statuses of the agents left, by slot; `story` is told where some do not end."""
        deadline = time.monotonic() + 90
        while any(agent.poll() is None for agent in self.agents.values()):
            agents = {slot: (agent.pid, agent.returncode) for slot, agent in self.agents.items()}
            assert time.monotonic() < deadline, f"{agents} {story}{self.told()}"
            time.sleep(0.01)
        return [self.agents[slot].returncode for slot in sorted(self.agents)]

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition() and self.agents[0].poll() is None:
            assert time.monotonic() < deadline, f"{sorted(self.agents)}\n{self.told()}"
            time.sleep(0.01)

    def _last_members(self) -> int:
        rounds = re.findall(r"(\d+) workers continue after step", self.told())
        return int(rounds[-1]) if rounds else 0

    def _written_at(self) -> int:
        path = self.directory / "elastic.npz"
        return path.stat().st_mtime_ns if path.exists() else 0

    def told(self) -> str:
        return (self.directory / "output").read_text()

    def close(self) -> None:
        for slot in list(self.agents):
            self.end(slot, signal.SIGKILL)
        self._out.close()


@pytest.fixture
def cluster(tmp_path: Path, free_port: int) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, free_port)
    yield cluster
    cluster.close()


def disturb(cluster: Cluster, chance: random.Random) -> str:
    """Do something to an agent; what."""
    slot = chance.randrange(SLOTS)
    if len(cluster.agents) < 3:
        slot = chance.randrange(1, SLOTS)
    if slot not in cluster.agents:
        cluster.start(slot)
        return f"start {slot}"
    cluster.await_members()  # one that has not joined yet does not count in a majority
    if slot == 0:  # the others look for it for a while
        cluster.end(0, signal.SIGKILL)
        cluster.start(0)
        cluster.began = False
        return "kill 0, start 0"
    how = chance.choice((signal.SIGKILL, signal.SIGTERM))
    if len(cluster.agents) < 3 and not cluster.began:
        how = signal.SIGTERM  # of two, only the first goes on without the other's farewell
    cluster.end(slot, how)
    return f"{how.name} {slot}"


@pytest.mark.seldom
def test_agents_come_and_go_at_random(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    plain = [sys.executable, "-m", "rallypoint", "run", "--standalone", str(SCRIPT)]
    subprocess.run([*plain, "--checkpoint", str(tmp_path / "plain.npz")], check=True, timeout=100)

    for slot in (0, 1):
        cluster.start(slot)
    done: list[str] = []
    while len(done) < EVENTS and cluster.agents[0].poll() is None:
        if chance.random() < 0.6:
            cluster.await_progress()
        time.sleep(chance.uniform(0.0, 0.5))  # also while others still start
        done.append(disturb(cluster, chance))
    story = f"{done}\n"
    statuses = cluster.await_end(story)
    told = cluster.told()
    # Where nodes come and go this often, the last one may have to wait until the job is over.
    late = statuses.count(3)
    assert late <= told.count("the job ended before this node could take part"), story + told
    assert statuses.count(0) == len(statuses) - late > 0, f"{statuses} {story}{told}"
    assert "test accuracy" in told, story + told
    assert told.count("workers continue after step") > 1, story + told
    with np.load(tmp_path / "plain.npz") as plain_end, np.load(tmp_path / "elastic.npz") as end:
        assert end["steps"] == plain_end["steps"]
        np.testing.assert_allclose(end["parameters"], plain_end["parameters"], rtol=1e-9, atol=1e-9)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("rallypoint_"))
    assert left == [], story + told
