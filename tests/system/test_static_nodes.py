"""Two agents with node ranks, as on two machines: one verdict for both, whoever fails or goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.nodes import launches

pytestmark = pytest.mark.system

RUN = (sys.executable, "-m", "rallypoint", "run")

SCRIPT = """
import os, pathlib, sys, time
e = os.environ
rank, number = e["RANK"], e["TORCHELASTIC_RESTART_COUNT"]
names = ("WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT",
         "TORCHELASTIC_RUN_ID")
sys.stdout.write(" ".join(["up", number, rank, *(e[name] for name in names)]) + "\\n")
sys.stdout.flush()
from rallypoint.store.client import TCPStore
store = TCPStore(e["MASTER_ADDR"], int(e["MASTER_PORT"]))
assert all(key.startswith(number + "/") for key in store.list_keys())
store.set(f"{number}/{rank}", "here")
store.wait([f"{number}/{other}" for other in range(3)])
pathlib.Path(f"up.{number}.{rank}").touch()
"""
FAIL_ONCE = SCRIPT + (
    "if rank == sys.argv[1] and number < sys.argv[2]: os.abort()\n"
    "if number < sys.argv[2]: time.sleep(600)\n"
)
SLEEP = SCRIPT + "time.sleep(600)\n"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Launch, Launch]]:
    """A launch for each node."""
    with launches(tmp_path, 2) as (first, second):
        yield first, second
    assert first.left_files() == second.left_files() == []


def start(
    nodes: tuple[Launch, Launch], port: int, text: str, *arguments: str, restarts: int = 0
) -> list[subprocess.Popen[bytes]]:
    """Two workers on node 0, one on node 1."""
    return [
        start_one(launch, rank, port, text, *arguments, restarts=restarts)
        for rank, launch in enumerate(nodes)
    ]


def start_one(
    launch: Launch, rank: int, port: int, text: str, *arguments: str, restarts: int = 0
) -> subprocess.Popen[bytes]:
    words = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", str(2 - rank)]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    words += ["--max-restarts", str(restarts)]
    return launch.start(*words, launch.script(text), *arguments)


@pytest.mark.everyday
def test_ranks_count_through_both(nodes: tuple[Launch, Launch], free_port: int) -> None:
    processes = start(nodes, free_port, SCRIPT)
    assert [process.wait(100) for process in processes] == [0, 0]
    first, second = [set(launch.out.splitlines()) for launch in nodes]
    assert {f"up 0 {rank} 3 {rank} 0 2 {free_port} none" for rank in (0, 1)} <= first
    assert f"up 0 2 3 0 1 2 {free_port} none" in second


@pytest.mark.parametrize("rank", ["0", pytest.param("2", marks=pytest.mark.everyday)])
def test_a_failure_on_either_restarts_both(
    nodes: tuple[Launch, Launch], free_port: int, rank: str
) -> None:
    processes = start(nodes, free_port, FAIL_ONCE, rank, "1", restarts=1)
    assert [process.wait(100) for process in processes] == [0, 0]
    failing, other = nodes if rank == "0" else nodes[::-1]
    assert f"round 0 failed: rank {rank} was killed by SIGABRT" in failing.err
    node = 0 if rank == "0" else 1
    assert f"round 0 ended: node {node}: rank {rank} was killed by SIGABRT" in other.err
    for launch in nodes:
        assert launch.err.count("restart 1 of 1") == 1


@pytest.mark.everyday
def test_without_restarts_a_failure_ends_both(nodes: tuple[Launch, Launch], free_port: int) -> None:
    processes = start(nodes, free_port, FAIL_ONCE, "2", "1")
    assert [process.wait(100) for process in processes] == [1, 1]
    assert "job failed: rank 2 was killed by SIGABRT" in nodes[1].err
    assert ": rank 2 was killed by SIGABRT" in nodes[0].err


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.everyday)])
def test_an_agent_killed_ends_the_other(
    nodes: tuple[Launch, Launch], free_port: int, lost: int
) -> None:
    processes = start(nodes, free_port, SLEEP, restarts=3)
    nodes[0].wait_for("up.*", 2)
    nodes[1].wait_for("up.*", 1)
    processes[lost].kill()
    assert processes[1 - lost].wait(100) == 1
    told = (
        "was lost: its launcher exited, or the network" if lost == 0 else "lost, 1 left, 2 needed"
    )
    assert told in nodes[1 - lost].err


@pytest.mark.everyday
def test_a_signal_to_one_stops_both(nodes: tuple[Launch, Launch], free_port: int) -> None:
    processes = start(nodes, free_port, SLEEP, restarts=3)
    nodes[0].wait_for("up.*", 2)
    nodes[1].wait_for("up.*", 1)
    processes[1].send_signal(signal.SIGTERM)
    assert [process.wait(100) for process in processes] == [1, 143]
    assert "rallypoint: SIGTERM stopped node 1, after " in nodes[0].err


def test_who_is_missing_is_named(nodes: tuple[Launch, Launch], free_port: int) -> None:
    for rank, missing in ((0, "1/2 nodes joined; missing node-rank 1"), (1, "missing node-rank 0")):
        process = start_one_impatient(nodes[rank], rank, free_port)
        assert process.wait(100) == 1
        assert missing in nodes[rank].err
        assert "s; start it there" in nodes[rank].err or "s (no store answered" in nodes[rank].err


def start_one_impatient(launch: Launch, rank: int, port: int) -> subprocess.Popen[bytes]:
    program = (
        "import os, sys\n"
        "from rallypoint.launch.agent.loop import run\n"
        "from rallypoint.launch.job import Job, Nodes\n"
        f"nodes = Nodes(count=2, node_rank={rank}, master_port={port}, join_timeout_s=1.0)\n"
        "job = Job(command=('true',), local_world_size=1, run_id='none', host='h',"
        " environ=os.environ, nodes=nodes)\n"
        "sys.exit(run(job))\n"
    )
    return launch.start(launcher=("-c", program))


def test_a_node_rank_twice(nodes: tuple[Launch, Launch], free_port: int) -> None:
    script = nodes[0].script("")
    words = ["--nnodes", "3", "--node-rank", "1", "--master-port", str(free_port), script]
    host = subprocess.Popen([*RUN, "--nnodes", "3", "--master-port", str(free_port), script])
    try:
        for launch in nodes:
            launch.start(*words)
        wait_until(lambda: any(each.process and each.process.poll() is not None for each in nodes))
        (loser,) = [each for each in nodes if each.process and each.process.poll() is not None]
        assert "node rank 1 is taken by host" in loser.err
    finally:
        host.terminate()
        assert host.wait(100) == 143
    for launch in nodes:
        assert launch.process is not None
        assert launch.process.wait(100) == 1


@pytest.mark.everyday
def test_who_was_started_for_another_job_is_refused(
    nodes: tuple[Launch, Launch], free_port: int
) -> None:
    script = nodes[0].script("")
    port = ("--master-port", str(free_port))
    host = nodes[0].start("--nnodes", "3", *port, script)
    other = nodes[1].start("--nnodes", "4", "--node-rank", "1", *port, script)
    assert other.wait(100) == 1
    assert "--nnodes is 4 here and 3 on node 0; pass the same value" in nodes[1].err
    host.terminate()
    assert host.wait(100) == 143


def test_a_node_that_waits_for_node_0_can_be_stopped(launch: Launch, free_port: int) -> None:
    script = launch.script("")
    words = ["--nnodes", "2", "--node-rank", "1", "--master-port", str(free_port), script]
    process = launch.start(*words)
    # The guardian is there, and so are the launcher's handlers of signals.
    wait_until(lambda: len(launch.running()) == 2)
    process.terminate()
    assert process.wait(100) == 143


def test_a_latecomer_is_told(nodes: tuple[Launch, Launch], free_port: int) -> None:
    host = start_one(nodes[0], 0, free_port, SLEEP)
    first = start_one(nodes[1], 1, free_port, SLEEP)
    nodes[0].wait_for("up.*", 2)
    process = start_one_impatient(nodes[1], 1, free_port)
    assert process.wait(100) == 1
    assert "a job that has already begun" in nodes[1].err
    host.terminate()
    assert [host.wait(100), first.wait(100)] == [143, 1]


@pytest.mark.everyday
def test_a_port_in_use_is_named_with_its_holder(launch: Launch, free_port: int) -> None:
    holder = launch.script(
        f"import socket, time\ns = socket.create_server(('127.0.0.1', {free_port}))\n"
        "open('listening', 'w').close()\ntime.sleep(600)\n",
        "holder.py",
    )
    other = subprocess.Popen(["python3", holder], cwd=launch.directory)
    try:
        launch.wait_for_file("listening")
        assert launch.run("--master-port", str(free_port), launch.script("")) == 1
    finally:
        other.kill()
        other.wait()
    assert f"cannot listen on 127.0.0.1, port {free_port}: it is in use by process {other.pid}" in (
        launch.err
    )


@pytest.mark.everyday
def test_a_wrong_token_ends_the_node_at_once(nodes: tuple[Launch, Launch], free_port: int) -> None:
    flags = ["--nnodes", "2", "--master-port", str(free_port)]
    script = nodes[0].script("")
    host = nodes[0].start(*flags, script, environ={"RALLYPOINT_TOKEN": "right"})
    wrong = {"RALLYPOINT_TOKEN": "wrong"}
    guest = nodes[1].start(*flags, "--node-rank", "1", script, environ=wrong)
    assert guest.wait(100) == 1  # the time-out is 600 s
    assert f"node 0 at 127.0.0.1:{free_port} refused this node: " in nodes[1].err
    assert "it has a different token; set the same RALLYPOINT_TOKEN" in nodes[1].err
    host.terminate()
    assert host.wait(100) == 143


OTHER_VERSION = """
from rallypoint.rendezvous.transport import codec
codec.VERSION += 1
"""


@pytest.mark.everyday
def test_an_agent_of_another_version_is_refused(
    nodes: tuple[Launch, Launch], free_port: int, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    at = ["--master-addr", "127.0.0.1", "--master-port", str(free_port)]
    flags = ["--nnodes", "2", *at]
    script = nodes[0].script("")
    host = nodes[0].start(*flags, script)
    other = {"PYTHONPATH": os.pathsep.join(paths)}
    guest = nodes[1].start(*flags, "--node-rank", "1", script, environ=other)
    assert guest.wait(100) == 1  # the time-out is 600 s
    cure = "runs another version of rallypoint; install the same version on all nodes"
    assert nodes[1].err.count(cure) == 1
    host.terminate()
    assert host.wait(100) == 143
    assert nodes[0].err.count(cure) == 1
