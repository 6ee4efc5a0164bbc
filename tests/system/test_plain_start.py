"""Groups that form without a launcher: again at once, beside a replacement or a death."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.everyday import wait_until

from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer

pytestmark = pytest.mark.system

BEGIN = """
import os, sys, time, numpy as np, rallypoint as dist
from datetime import timedelta
WAIT = timedelta(seconds=300)
"""


class Ranks:
    """Processes that meet as env:// says; each may be started and killed on its own."""

    def __init__(self, directory: Path, port: int, *, store: str = "") -> None:
        self._directory = directory
        self._port = port
        self._environ = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": store,
        }
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int, ranks: int, script: str) -> subprocess.Popen[str]:
        path = self._directory / f"worker.{len(self._processes)}.py"
        path.write_text(BEGIN + script)
        process = subprocess.Popen(
            [sys.executable, str(path)],
            env={**self._environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def await_coming(self, *ranks: int, world: int = 1) -> None:
        """Until they have come to that world, and wait for the others."""
        with TCPStore("127.0.0.1", self._port, wait_for_workers=False) as store:
            store.wait([f"rallypoint/0//{world}/{rank}/came" for rank in ranks])

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def plain(tmp_path: Path, free_port: int) -> Iterator[Ranks]:
    """Rank 0 runs the store."""
    ranks = Ranks(tmp_path, free_port)
    yield ranks
    ranks.kill()


@pytest.fixture
def surviving(tmp_path: Path) -> Iterator[Ranks]:
    """The store outlives them all."""
    with StoreServer(log_fd=-1) as server:
        ranks = Ranks(tmp_path, server.port, store="True")
        yield ranks
        ranks.kill()


@pytest.fixture(params=["plain", "surviving"])
def either(request: pytest.FixtureRequest) -> Ranks:
    ranks = request.getfixturevalue(request.param)
    assert isinstance(ranks, Ranks)
    return ranks


def finish(process: subprocess.Popen[str]) -> str:
    """What it said, once it has ended well: long before it has waited for others in vain."""
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    return said


AGAIN = """
rank = int(os.environ["RANK"])
for step in range(50):
    dist.init_process_group({backend!r}, timeout=WAIT)
    values = np.ones(1)
    dist.all_reduce(values)
    assert values[0] == dist.get_world_size()
    if step % 3 == rank:
        time.sleep(0.003)
    dist.destroy_process_group()
    if step % 5 == rank:
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("either", "backend"), [("plain", "tcp"), ("surviving", "rallypoint")], indirect=["either"]
)
def test_groups_form_again_at_once(either: Ranks, backend: str) -> None:
    processes = [either.start(rank, 3, AGAIN.format(backend=backend)) for rank in range(3)]
    for process in processes:
        finish(process)


# Who loses another forms the group again, as long as there is work.
SURVIVE = """
done = 0
while done < 2:
    dist.init_process_group(timeout=WAIT)
    try:
        while True:
            values = np.ones(1)
            dist.all_reduce(values)
            if os.environ["RANK"] == "0" and not done:
                print("going", flush=True)
            done = max(done, 1)
            if {is_new}:
                done = 2
            votes = np.array([done - 1.0])
            dist.all_reduce(votes)
            if votes[0] > 0:
                done = 2
                break
            time.sleep(0.01)
    except dist.PeerError:
        pass
    dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize(
    ("either", "lost"),
    [
        ("plain", 2),
        ("surviving", 0),
        pytest.param("surviving", 1, marks=pytest.mark.everyday),
    ],
    indirect=["either"],
)
def test_a_process_takes_the_place_of_a_dead_one(either: Ranks, lost: int) -> None:
    old = SURVIVE.format(is_new=False)
    processes = [either.start(rank, 3, old) for rank in range(3)]
    assert processes[0].stdout is not None
    assert processes[0].stdout.readline() == "going\n"
    processes[lost].kill()
    processes[lost] = either.start(lost, 3, SURVIVE.format(is_new=True))
    for process in processes:
        assert "done" in finish(process)


AWAIT = """
began = time.monotonic()
print("here", flush=True)
try:
    dist.init_process_group(timeout=WAIT)
    dist.barrier()
except dist.PeerLostError as error:
    print(f"lost {error.rank} after {time.monotonic() - began:.1f} s: {error}", flush=True)
except dist.StoreConnectionError as error:
    print(f"lost the store after {time.monotonic() - began:.1f} s: {error}", flush=True)
"""


def test_who_dies_before_all_have_come_is_told(either: Ranks) -> None:
    waiting = [either.start(rank, 4, AWAIT) for rank in (0, 1)]
    dying = either.start(2, 4, AWAIT)
    either.await_coming(0, 1, 2)
    dying.kill()
    for process in waiting:
        said = finish(process)
        assert "lost 2" in said, said


def test_rank_0_dies_before_all_have_come(either: Ranks) -> None:
    waiting = either.start(1, 3, AWAIT)
    dying = either.start(0, 3, AWAIT)
    either.await_coming(0, 1)
    dying.kill()
    said = finish(waiting)
    assert "lost 0" in said or "lost the store" in said, said


@pytest.mark.parametrize("backend", ["rallypoint", "tcp"])
def test_deaths_at_any_time_of_forming(surviving: Ranks, backend: str, seed: int) -> None:
    draw = random.Random(seed)
    script = AWAIT.replace("init_process_group(", f"init_process_group('{backend}', ")
    for world in range(1, 4):
        processes = [surviving.start(rank, 3, script) for rank in range(3)]
        victim = draw.randrange(3)
        surviving.await_coming(0, 1, 2, world=world)  # at once: these keys go when all have formed
        time.sleep(draw.random() * 0.03)
        os.kill(processes[victim].pid, signal.SIGKILL)
        processes[victim].communicate()
        survivors = {0, 1, 2} - {victim}
        said = {rank: finish(processes[rank]).removeprefix("here\n") for rank in survivors}
        for text in said.values():
            assert not text or f"lost {victim} " in text, said  # empty: it was at its end already


# Beside AWAIT, in the worker of one rank. A file is how ranks here wait for one another.
FORMING = """
from pathlib import Path
from rallypoint.process_group.formation import mesh
HERE = Path(__file__).parent
def await_file(name):
    while not (HERE / name).exists():
        time.sleep(0.005)
"""

SAYS_FORMED = """
init_process_group = dist.init_process_group
def form(*args, **kwargs):
    init_process_group(*args, **kwargs)
    (HERE / f"formed.{os.environ['RANK']}").touch()
dist.init_process_group = form
"""

# Dies when rank 0 has formed and rank 2 has not. Of what the dying process holds, its connections
# with rank 2 are closed first: a child holds the others for half a second.
DIES_BIT_BY_BIT = """
def accept(self):
    if len(self.made) < self._purposes:  # the connections with rank 0
        return
    await_file("formed.0")
    if os.fork():
        os.kill(os.getpid(), 9)
    self._listener.close()
    time.sleep(0.5)
    os._exit(0)
mesh.Mesh._accept = accept
"""

# Forms so slowly that meanwhile one rank dies, and another one ends because of that.
IS_SLOW = """
connect_all = mesh.Mesh.connect_all
def connect_slowly(self, *args):
    peers = connect_all(self, *args)
    (HERE / "connected").touch()
    await_file("go on")
    self._check()
    return peers
mesh.Mesh.connect_all = connect_slowly
"""


def awaiting(*additions: str) -> str:
    script = FORMING + "".join(additions) + AWAIT
    return script.replace("init_process_group(timeout", "init_process_group('tcp', timeout")


def test_who_gives_up_is_not_taken_for_the_first_to_die(surviving: Ranks) -> None:
    scripts = [awaiting(SAYS_FORMED), awaiting(DIES_BIT_BY_BIT), awaiting()]
    processes = [surviving.start(rank, 3, script) for rank, script in enumerate(scripts)]
    for rank in (0, 2):
        said = finish(processes[rank])
        assert "lost 1 " in said, (rank, said)


@pytest.mark.parametrize("lost", [0, 1])
def test_who_ended_because_of_a_death_is_not_taken_for_the_first(
    surviving: Ranks, tmp_path: Path, lost: int
) -> None:
    """The other one had formed the group, and was in its first operation."""
    scripts = [awaiting(SAYS_FORMED), awaiting(SAYS_FORMED), awaiting(IS_SLOW)]
    processes = [surviving.start(rank, 3, script) for rank, script in enumerate(scripts)]
    for name in ("formed.0", "formed.1", "connected"):
        wait_until((tmp_path / name).exists)
    processes[lost].kill()
    for rank in (1 - lost, 2):
        said = finish(processes[rank])
        assert f"lost {lost} " in said, (rank, said)
        (tmp_path / "go on").touch()
