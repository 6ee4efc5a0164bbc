"""Processes are killed or stopped, and the others go on with the groups that they have."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import SOON_S

from rallypoint.store.server import StoreServer

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("reforming.py")
# How many ranks are stopped; 100 in `make check-long`.
STOPS = int(os.environ.get("RALLYPOINT_TEST_STOPS", "2"))


class Rank:
    """A process of reforming.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def told(self, name: str = "") -> Any:
        """The next line, or what it must hold under this name."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait(60)} before it said {name!r}"
        told = json.loads(line)
        return told[name] if name else told


@contextmanager
def ranks(
    size: int, what: str, argument: int, *, backend: str = "rallypoint"
) -> Iterator[list[Rank]]:
    """Processes that meet at a store of this one, and are ready."""
    with StoreServer() as server:
        given = {
            **os.environ,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)},
            **{"WORLD_SIZE": str(size), "RALLYPOINT_BACKEND": backend},
            **{"TORCHELASTIC_USE_AGENT_STORE": "True"},
        }
        command = [sys.executable, str(SCRIPT), what, str(argument)]
        started = [
            subprocess.Popen(
                command,
                env={**given, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            found = [Rank(process) for process in started]
            for each in found:
                each.told("ready")
            yield found
        finally:
            for process in started:
                process.kill()
                process.communicate()


@pytest.mark.parametrize(
    ("victim", "backend"), [(0, "tcp"), pytest.param(2, "shm", marks=pytest.mark.everyday)]
)
def test_survivors_keep_process_group_and_memory(victim: int, backend: str, seed: int) -> None:
    with ranks(4, "killed", seed, backend=backend) as members:
        for each in members:
            each.told("works")
        members[victim].process.kill()
        left = [each for rank, each in enumerate(members) if rank != victim]
        for rank, each in enumerate(left):
            told = each.told()
            assert told["lost"] == [victim] and told["rank"] == rank
            assert told["pid"] == each.process.pid
            assert each.process.wait(60) == 0


@pytest.mark.timeout(300 + 10 * STOPS)
def test_what_a_stopped_rank_does_later_is_not_seen(seed: int) -> None:
    """It fills its memory with other numbers, and goes on with calls of the old round."""
    chance = random.Random(seed)
    for backend in itertools.islice(itertools.cycle(("shm", "tcp")), STOPS):
        stop_and_continue(chance.randrange(4), backend)


def stop_and_continue(victim: int, backend: str) -> None:
    print(f"victim {victim}, {backend}")
    with ranks(4, "stopped", victim, backend=backend) as members:
        stopped = members.pop(victim)
        stopped.process.send_signal(signal.SIGSTOP)
        for each in members:
            each.told("formed")
        stopped.process.send_signal(signal.SIGCONT)
        error = stopped.told("error")
        assert error in ("CollectiveTimeoutError", "PeerLostError", "RevokedError")
        for each in members:
            assert each.process.stdin is not None
            each.process.stdin.write("\n")  # it is enough
            each.process.stdin.flush()
        for each in members:
            each.told("good")
            assert each.process.wait(60) == 0


def test_a_thousand_rounds_in_one_process() -> None:
    with ranks(2, "rounds", 1000) as members:
        for each in members:
            told = each.told()
            *warm, memory = told["warm"]
            *last, memory_at_end = told["last"]
            assert last == warm
            assert memory_at_end - memory <= 1024, told
            assert each.process.wait(60) == 0


@pytest.mark.parametrize(("deaths", "backend"), [(1, "shm"), (2, "tcp")])
def test_survivors_agree_whoever_dies(deaths: int, backend: str, seed: int) -> None:
    chance = random.Random(seed)
    with ranks(4, "agreeing", deaths, backend=backend) as members:
        for _ in range(deaths):
            time.sleep(chance.uniform(0, 0.2))
            members.pop(chance.randrange(len(members))).process.kill()
        told = [each.told() for each in members]
        assert all(each["agreed"] == told[0]["agreed"] for each in told)
        assert all(each["sizes"] == told[0]["sizes"] for each in told)
        assert [each["rank"] for each in told] == list(range(4 - deaths))
        assert [each.process.wait(60) for each in members] == [0] * (4 - deaths)


@pytest.mark.parametrize(("victim", "backend"), [(0, "tcp"), (2, "shm")])
def test_a_rank_that_ends_after_the_vote_is_not_waited_for(victim: int, backend: str) -> None:
    with ranks(3, "voting", victim, backend=backend) as members:
        told = [each.told() for each in members if members.index(each) != victim]
        assert [each["size"] for each in told] == [2, 2]
        assert max(each["seconds"] for each in told) < SOON_S
        assert [each.process.wait(60) for each in members] == [0, 0, 0]
