"""Process groups over several hosts: what works, and what happens when hosts and ranks fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.hosts import Hosts

from rallypoint.base.worker_env import SILENCE_S

pytestmark = pytest.mark.system

PORT = "29517"
BEGIN = """
import os, sys, time, numpy as np, rallypoint as dist
from datetime import timedelta
def tell(text):
    with open(f"told.{os.environ['RANK']}.part", "w") as file: file.write(str(text))
    os.rename(f"told.{os.environ['RANK']}.part", f"told.{os.environ['RANK']}")
dist.init_process_group(os.environ.get("BACKEND"), timeout=timedelta(seconds=60))
rank, ranks = dist.get_rank(), dist.get_world_size()
"""
LOSE = """
values = np.ones({count})
try:
    dist.barrier()
    for _ in range(10):
        {operation}
    tell("ready")
    while True:
        {operation}
except dist.PeerLostError as error:
    tell(f"{{error.rank}} {{time.time()}}")
"""


@pytest.fixture
def two(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture
def three(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


class Job:
    """Workers on hosts, started without a launcher, so that a test knows each process."""

    def __init__(
        self, hosts: Hosts, layout: Sequence[int], script: str, directory: Path, **environ: str
    ) -> None:
        self.directory = directory
        self.ranks = len(layout)
        # Not rank 0's, so that each rank's own error can be seen when rank 0 has ended.
        self.store = hosts[1].popen(
            [sys.executable, "-m", "rallypoint", "store", "--host", "::", "--port", PORT],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.store.stdout is not None
        self.store.stdout.readline()
        self.processes: list[subprocess.Popen[bytes]] = []
        (directory / "worker.py").write_text(script)
        for rank, number in enumerate(layout):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(layout)),
                "MASTER_ADDR": hosts[1].address,
                "MASTER_PORT": PORT,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                **environ,
            }
            with (directory / f"output.{rank}").open("wb") as output:
                process = hosts[number].popen(
                    [sys.executable, "worker.py"],
                    stdout=output,
                    stderr=output,
                    env=env,
                    cwd=directory,
                )
            self.processes.append(process)

    def pid(self, rank: int) -> int:
        """Of the worker itself, below nsenter, and not of what it has started."""
        pid = self.processes[rank].pid
        while not Path(f"/proc/{pid}/cmdline").read_text().startswith(sys.executable):
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return pid

    def told(self, rank: int) -> str:
        path = self.directory / f"told.{rank}"
        until = time.monotonic() + 120
        while not path.exists():
            assert time.monotonic() < until, self.output()
            time.sleep(0.01)
        text = path.read_text()
        path.unlink()
        return text

    def end(self) -> None:
        """Wait until all workers have ended, each well."""
        for process in self.processes:
            assert process.wait(60) == 0, self.output()
        self.close()

    def close(self) -> None:
        """End the store."""
        self.store.terminate()
        self.store.wait()
        assert self.store.stdout is not None
        self.store.stdout.close()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.close()

    def output(self) -> str:
        return "\n".join((self.directory / f"output.{r}").read_text() for r in range(self.ranks))


EVERYTHING = """
for count in (1, 1000, 100_000, 3_000_000):
    a = np.full(count, float(rank + 1))
    dist.all_reduce(a)
    assert (a == ranks * (ranks + 1) / 2).all()
    dist.broadcast(a, 1)
    parts = [np.zeros(count) for _ in range(ranks)]
    dist.all_gather(parts, np.full(count, float(rank)))
    assert all((part == peer).all() for peer, part in enumerate(parts))
    out = np.zeros(count)
    dist.reduce_scatter(out, [np.full(count, float(peer)) for peer in range(ranks)])
    assert (out == rank * ranks).all()
    dist.all_to_all(parts, [np.full(count, float(rank * 10 + peer)) for peer in range(ranks)])
    assert all((part == peer * 10 + rank).all() for peer, part in enumerate(parts))
    work = dist.isend(np.full(count, float(rank)), (rank + 1) % ranks, tag=count)
    dist.recv(out, (rank - 1) % ranks, tag=count)
    assert (out == (rank - 1) % ranks).all()
    work.wait()
works = [dist.all_reduce(np.ones(200_000), async_op=True) for _ in range(10)]
for work in works: work.wait()
odd = dist.new_group([0, ranks - 1])
if rank in (0, ranks - 1):
    a = np.ones(10)
    dist.all_reduce(a, group=odd)
    assert (a == 2).all()
gathered = [None] * ranks
dist.all_gather_object(gathered, {"rank": rank})
assert gathered == [{"rank": r} for r in range(ranks)]
dist.barrier()
dist.destroy_process_group()
tell("done")
"""


@pytest.mark.exact
@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        pytest.param((1, 1, 2), "rallypoint", marks=pytest.mark.everyday),
        ((1, 1, 2, 2), "rallypoint"),
        ((1, 2, 1, 2), "rallypoint"),
        ((1, 1, 2), "tcp"),
        ((1, 2), "tcp"),
    ],
)
def test_everything_on_two_hosts(
    two: Hosts, tmp_path: Path, layout: tuple[int, ...], backend: str
) -> None:
    job = Job(two, layout, BEGIN + EVERYTHING, tmp_path, BACKEND=backend)
    assert [job.told(rank) for rank in range(len(layout))] == ["done"] * len(layout)
    job.end()


STREAMED = """
import socket, struct
def acknowledged():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as each:
                told = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        found.append(struct.unpack_from("Q", told, 120)[0])
    return found
for _ in range(3): dist.all_reduce(np.ones(2_000_000))
dist.barrier()
time.sleep(0.5)
tell([each for each in acknowledged() if each > 2_000_000])
dist.barrier()
"""


def test_one_lane_uses_all_streams(two: Hosts, tmp_path: Path) -> None:
    """Between hosts of two ranks, two_level has one lane for the pieces that cross."""
    job = Job(two, (1, 1, 2, 2), BEGIN + STREAMED, tmp_path, RALLYPOINT_STREAMS="2")
    for rank in range(4):
        counts = [int(count) for count in job.told(rank).strip("[]").split(",")]
        print(rank, counts)
        assert len(counts) == 2
        assert max(counts) < 2 * min(counts)
    job.end()


@pytest.mark.exact
def test_everything_with_two_streams(two: Hosts, tmp_path: Path) -> None:
    job = Job(two, (1, 1, 2, 2), BEGIN + EVERYTHING, tmp_path, RALLYPOINT_STREAMS="2")
    assert [job.told(rank) for rank in range(4)] == ["done"] * 4
    job.end()


@pytest.mark.exact
def test_over_ipv6(two: Hosts, tmp_path: Path) -> None:
    job = Job(two, (1, 2), BEGIN + EVERYTHING, tmp_path, MASTER_ADDR="fd77::1")
    assert [job.told(rank) for rank in (0, 1)] == ["done"] * 2
    job.end()


@pytest.mark.everyday
def test_shared_memory_alone_does_not_reach_another_host(two: Hosts, tmp_path: Path) -> None:
    script = BEGIN.replace("dist.init_process_group", "try: dist.init_process_group", 1).replace(
        "rank, ranks = dist.get_rank(), dist.get_world_size()\n",
        "except dist.HostError as error: tell(error)\n",
    )
    job = Job(two, (1, 2), script.replace("try: ", "try:\n  "), tmp_path, BACKEND="shm")
    for rank in (0, 1):
        assert "rank 1 and rank 0 are on different ones; use backend='rallypoint'" in job.told(rank)
    job.end()


def test_the_interface_is_chosen_by_name(two: Hosts, tmp_path: Path) -> None:
    """A second address on another interface, which only the variable leads to."""
    for host in two.hosts:
        host.run("ip", "link", "add", "link", "eth0", "name", "mac0", "type", "macvlan")
        host.run("ip", "addr", "add", f"10.78.0.{host.number}/24", "dev", "mac0")
        host.run("ip", "link", "set", "mac0", "up")
    script = BEGIN + (
        "import subprocess\n"
        "dist.barrier()\n"
        "used = subprocess.run(['ss', '-tn'], capture_output=True, text=True).stdout\n"
        "tell(used.count('10.78.0.'))\n"
        "dist.barrier()\n"
    )
    job = Job(two, (1, 2), script, tmp_path, GLOO_SOCKET_IFNAME="^eth,lo")
    assert all(int(job.told(rank)) >= 6 for rank in (0, 1))  # both ends of three connections
    job.end()
    job = Job(
        two,
        (1, 2),
        "try:\n  " + BEGIN.replace("\n", "\n  ") + "\nexcept Exception as e:\n  tell(e)\n",
        tmp_path,
        RALLYPOINT_SOCKET_IFNAME="nope",
    )
    assert "RALLYPOINT_SOCKET_IFNAME=nope: no interface" in job.told(0)
    assert "mac0" in job.told(1)
    job.end()


OPERATIONS = {
    "all_reduce": "dist.all_reduce(values)",
    "messages": (
        "dist.send(values, (rank + 1) % ranks) if rank % 2 == 0 else None; "
        "dist.recv(values, (rank - 1) % ranks); "
        "dist.send(values, (rank + 1) % ranks) if rank % 2 else None"
    ),
}


def lose(hosts: Hosts, directory: Path, operation: str, count: int, layout: Sequence[int]) -> float:
    """Kill the last rank; the most seconds until another rank names it."""
    script = BEGIN + LOSE.format(count=count, operation=OPERATIONS[operation])
    job = Job(hosts, layout, script, directory)
    *others, last = range(len(layout))
    assert [job.told(rank) for rank in range(len(layout))] == ["ready"] * len(layout)
    os.kill(job.pid(last), signal.SIGKILL)
    killed = time.time()
    told = [job.told(rank).split() for rank in others]
    assert {lost for lost, _ in told} == {str(last)}, job.output()
    job.processes[last].wait()
    for rank in others:
        assert job.processes[rank].wait(60) == 0, job.output()
    job.close()
    return max(float(when) for _, when in told) - killed


@pytest.mark.everyday
def test_a_killed_rank_is_named(two: Hosts, tmp_path: Path) -> None:
    lose(two, tmp_path, "all_reduce", 10, (1, 2, 1))


@pytest.mark.parametrize(
    ("operation", "count", "layout"),
    [
        ("all_reduce", 1_000_000, (1, 1, 2, 2)),
        ("all_reduce", 1_000_000, (1, 2, 1, 2)),
        ("messages", 10, (1, 1, 2, 2)),
        ("messages", 1_000_000, (1, 2, 1, 2)),
    ],
)
def test_a_killed_rank_is_named_within_a_second(
    two: Hosts, tmp_path: Path, operation: str, count: int, layout: tuple[int, ...]
) -> None:
    assert lose(two, tmp_path, operation, count, layout) < SOON_S


def silence(
    hosts: Hosts, directory: Path, *, count: int, host: int, is_killed: bool, silence_s: int
) -> float:
    """Silence a host of three; the most seconds until a rank on another one names its rank."""
    script = BEGIN + LOSE.format(count=count, operation=OPERATIONS["all_reduce"])
    job = Job(hosts, (1, 2, 3), script, directory, RALLYPOINT_SILENCE=str(silence_s))
    assert [job.told(rank) for rank in range(3)] == ["ready"] * 3
    if is_killed:
        hosts[host].kill()
    else:
        hosts.pull_cable(host)
    silent = time.time()
    told = [job.told(rank).split() for rank in sorted({0, 1, 2} - {host - 1})]
    assert {lost for lost, _ in told} == {str(host - 1)}, job.output()
    job.kill()
    return max(float(when) for _, when in told) - silent


@pytest.mark.everyday
def test_a_host_without_a_cable_is_noticed(three: Hosts, tmp_path: Path) -> None:
    """The kernels of the others miss its answers, so it does not matter which process runs when."""
    silence(three, tmp_path, count=10, host=3, is_killed=False, silence_s=2)


@pytest.mark.parametrize("is_killed", [False, True], ids=["pulled cable", "killed host"])
@pytest.mark.parametrize(
    ("count", "host"), [(1_000_000, 3), pytest.param(10, 1, id="that of the store")]
)
def test_a_silent_host_is_noticed_in_time(
    three: Hosts, tmp_path: Path, count: int, host: int, is_killed: bool
) -> None:
    took_s = silence(
        three, tmp_path, count=count, host=host, is_killed=is_killed, silence_s=SILENCE_S
    )
    assert took_s < SILENCE_S + SOON_S


@pytest.mark.exact
def test_a_stopped_rank_spoils_nothing(two: Hosts, tmp_path: Path) -> None:
    """Stopped for longer than silence may last: its host still answers for it."""
    script = BEGIN + (
        "dist.barrier()\n"
        "tell('ready')\n"
        "for number in range(60):\n"
        "    a = np.full(1_000_000, float(number + rank))\n"
        "    dist.all_reduce(a)\n"
        "    assert (a == 2 * number + 1).all()\n"
        "    if rank == 0: dist.send(np.full(700_000, float(number)), 1)\n"
        "    else:\n"
        "        dist.recv(a[:700_000], 0)\n"
        "        assert (a[:700_000] == number).all()\n"
        "tell('done')\n"
    )
    job = Job(two, (1, 2), script, tmp_path)
    assert [job.told(rank) for rank in (0, 1)] == ["ready"] * 2
    pid = job.pid(1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(7)
    os.kill(pid, signal.SIGCONT)
    job.processes[1].send_signal(signal.SIGCONT)  # nsenter stops along with its child
    assert [job.told(rank) for rank in (0, 1)] == ["done"] * 2
    job.end()


@pytest.mark.parametrize("what", ["all_reduce", "messages"])
def test_a_timeout_counts_time_without_progress(two: Hosts, tmp_path: Path, what: str) -> None:
    """Over a link of 40 Mbit/s: each call takes longer than its timeout, and bytes always move."""
    for host in two.hosts:
        shape = ("tbf", "rate", "40mbit", "burst", "64kbit", "latency", "100ms")
        host.run("tc", "qdisc", "add", "dev", "eth0", "root", *shape)
    call = {
        "all_reduce": "dist.all_reduce(a)",
        "messages": (
            "works = [dist.isend(a, 1) if rank == 0 else dist.irecv(a, 0) for _ in range(4)]; "
            "[work.wait() for work in works]"
        ),
    }[what]
    script = BEGIN.replace("seconds=60", "seconds=3") + (
        f"a = np.ones({10_000_000 if what == 'all_reduce' else 1_250_000}, np.float32)\n"
        "begin = time.monotonic()\n"
        f"{call}\n"
        f"assert (a == {'2' if what == 'all_reduce' else '1'}).all()\n"
        "tell(time.monotonic() - begin)\n"
    )
    job = Job(two, (1, 2), script, tmp_path)
    assert min(float(job.told(rank)) for rank in (0, 1)) > 3
    job.end()


@pytest.mark.everyday
def test_different_calls_on_different_hosts_are_explained(two: Hosts, tmp_path: Path) -> None:
    script = BEGIN + (
        "a = np.ones(1000)\n"
        "dist.barrier()\n"
        "try:\n"
        "    dist.broadcast(a, 1 - rank)\n"  # both wait
        "except dist.MismatchError as error:\n"
        "    tell(error)\n"
    )
    job = Job(two, (1, 2), script, tmp_path)
    for rank in (0, 1):
        text = job.told(rank)
        assert "src=0" in text, text
        assert "src=1" in text, text
    job.end()


@pytest.mark.everyday
def test_a_rank_that_ends_early_is_no_dead_one(two: Hosts, tmp_path: Path) -> None:
    """What it has sent before arrives all the same, if that fits into the sockets' buffers."""
    script = BEGIN + (
        "dist.barrier()\n"
        "if rank == 0:\n"
        "    for number in range(20): dist.send(np.full(100, float(number)), 1)\n"
        "else:\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "    for number in range(20):\n"
        "        a = np.zeros(100)\n"
        "        dist.recv(a, 0)\n"
        "        assert (a == number).all()\n"
        "    try:\n"
        "        dist.recv(a, 0)\n"
        "    except dist.PeerLostError as error:\n"
        "        tell(error)\n"
    )
    job = Job(two, (1, 2), script, tmp_path)
    assert job.processes[0].wait(60) == 0, job.output()
    (tmp_path / "go").touch()
    assert "exited or left the group before" in job.told(1)
    job.end()


def test_what_others_call_meanwhile_costs_a_busy_rank_nothing(two: Hosts, tmp_path: Path) -> None:
    """It has a receive under way, and the message of a barrier that it does not call yet."""
    script = BEGIN + (
        "dist.barrier()\n"
        "if rank == 0:\n"
        "    a = np.zeros(1)\n"
        "    work = dist.irecv(a, 1)\n"
        "    begin = time.process_time()\n"
        "    time.sleep(2)\n"
        "    tell(time.process_time() - begin)\n"
        "dist.barrier()\n"
        "if rank == 1: dist.send(np.ones(1), 0)\n"
        "else: work.wait()\n"
    )
    job = Job(two, (1, 2), script, tmp_path)
    assert float(job.told(0)) < 0.5  # seconds of a core, of two
    job.end()
