"""Commands about a job of several nodes: each is seen from all, and a silent one is named."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chrome_trace import read
from tests.hosts import Host, Hosts
from tests.system.everyday import wait_until
from tests.system.nodes import launches
from tests.system.test_jobs import WAITING, rallypoint

pytestmark = pytest.mark.system

RALLYPOINT = (sys.executable, "-m", "rallypoint")
WAYS = {
    # A node that is stopped while the commands run is not lost.
    "elastic": "--nnodes 3 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 "
    "--rdzv-conf keep_alive_interval=5,keep_alive_max_attempt=6",
    "static": "--nnodes 3 --master-addr 10.77.0.1 --master-port 29500 --node-rank {}",
}


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


def told(host: Host, *words: str) -> subprocess.CompletedProcess[str]:
    command = host.enter(*RALLYPOINT, *words)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def rows(status: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """Each rank and its call."""
    row = r"(?m)^ *(\d) +(?:host\d|\S+) +\d+ +\w+ .* (all_reduce #\d)"
    return re.findall(row, status.stdout)


def assert_traced(host: Host, path: Path) -> None:
    """All nodes are in a trace, with who waits in the last call and who is not there."""
    told_of = told(host, "trace", "-s", "0.3", "-o", str(path))
    assert "6 ranks on 3 nodes" in told_of.stdout, told_of
    assert "note: " not in told_of.stdout
    trace = read(path)
    assert len(trace.flows) == 6
    assert [len(flow) for flow in trace.flows] == [6] * 5 + [5]
    for (process, track), slices in trace.tracks.items():
        assert track == "default group"
        last = slices[-1]
        is_stuck = not process.startswith("rank 1 ")
        assert (last.end is None, last.args["number"]) == (is_stuck, 5 if is_stuck else 4)


HANGS = """
import os, time, numpy as np, rallypoint as dist
dist.init_process_group()
for _ in range(5):
    dist.all_reduce(np.ones(8, np.float32))
if dist.get_rank() == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
dist.all_reduce(np.ones(8, np.float32))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("way", "on_hang"), [("elastic", "report"), ("elastic", "restart"), ("static", "stop")]
)
def test_one_node_says_that_the_job_hangs(
    hosts: Hosts, tmp_path: Path, way: str, on_hang: str
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(HANGS)
    words = f"run {WAYS[way]} --nproc-per-node 2 --hang-after 2 --on-hang {on_hang}"
    words += f" --max-restarts 1 {script}"
    files = [tmp_path / f"err.{host.number}" for host in hosts.hosts]
    nodes = []
    for host, path in zip(hosts.hosts, files, strict=True):
        with path.open("wb") as file:
            command = [*RALLYPOINT, *words.format(host.number - 1).split()]
            nodes.append(host.popen(command, cwd=tmp_path, stderr=file))
    line = "the job hangs: rank 3 never entered all_reduce #5"
    try:
        wait_until(lambda: any(line in path.read_text() for path in files))
        if on_hang == "report":
            time.sleep(3)  # all complain again
            assert told(hosts[2], "stop", "--only").returncode == 0
        statuses = [node.wait(60) for node in nodes]
        text = "".join(path.read_text() for path in files)
        assert text.count(line) == 1, text
        if on_hang == "restart":
            assert statuses == [0, 0, 0], text
            # Workers may see that others are gone before they are stopped themselves.
            why = r"round 0 (?:ended|failed): .*the job hung: rank 3 "
            assert len(re.findall(why, text)) == text.count("restart 1 of 1") == 3, text
        elif on_hang == "stop":
            assert statuses == [1, 1, 1], text
            why = r"(?m)^rallypoint: stopped, because the job hung: rank 3 never .*, after "
            assert len(re.findall(why, text)) == 3, text
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@pytest.mark.everyday
def test_a_job_of_two_nodes_is_seen_and_stopped_from_either(tmp_path: Path, free_port: int) -> None:
    """Both are on this machine."""
    with launches(tmp_path, 2) as nodes:
        pids = []
        for rank, node in enumerate(nodes):
            flags = ["--nnodes", "2", "--node-rank", str(rank), "--master-port", str(free_port)]
            pids.append(str(node.start(*flags, node.script(WAITING)).pid))
        calls = [("0", "all_reduce #5"), ("1", "all_reduce #4")]
        why = "rank 1 never entered all_reduce #5 of default group: it is in time.sleep at"

        # An answer may lack what did not come in time.
        wait_until(lambda: rows(rallypoint("status", pids[0])) == calls)
        wait_until(lambda: rallypoint("explain", pids[1]).stdout.startswith(why))
        assert rallypoint("stop", pids[1]).returncode == 0
        statuses = {node.process.wait(100) for node in nodes if node.process is not None}
        assert statuses <= {1, 128 + signal.SIGTERM}  # one may hear of the other first


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.seldom] * (way == "static")) for way in WAYS]
)
def test_a_job_is_seen_from_each_of_its_nodes(hosts: Hosts, tmp_path: Path, way: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WAITING)
    words = f"run {WAYS[way]} --nproc-per-node 2 {script}"
    nodes = [
        host.popen([*RALLYPOINT, *words.format(host.number - 1).split()], cwd=tmp_path)
        for host in hosts.hosts
    ]
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 6)
        expected = [
            (str(rank), "all_reduce #4" if rank == 1 else "all_reduce #5") for rank in range(6)
        ]
        wait_until(lambda: rows(told(hosts[1], "status")) == expected)
        for host in hosts.hosts:
            seen = told(host, "status")
            assert rows(seen) == expected, seen
        explained = told(hosts[3], "explain")
        assert re.match(
            r"rank 1 never entered all_reduce #5 of default group: it is in time\.sleep at"
            r" worker\.py:10; ranks 0, 2-5 wait for it at worker\.py:11 \(\d+\.\d s\)\.$",
            explained.stdout,
        ), explained
        assert explained.returncode == 3
        assert_traced(hosts[2], tmp_path / "trace.json")

        (agent,) = re.findall(r"(?m)^\S+ +(\d+) ", told(hosts[3], "ps").stdout)
        hosts[3].run("kill", "-STOP", agent)
        try:
            status = told(hosts[1], "status").stdout
            assert re.search(r"node \d \(\S+\) has not answered for \d+\.\d s: ranks ", status)
            why = told(hosts[1], "explain", "--why").stdout
            assert re.search(r"node \d \(\S+\) has not answered", why), why
        finally:
            hosts[3].run("kill", "-CONT", agent)
            nodes[2].send_signal(signal.SIGCONT)  # nsenter stops with its child

        assert told(hosts[2], "stop", "--only").returncode == 0
        statuses = [node.wait(60) for node in nodes]
        assert statuses == [1, 128 + signal.SIGTERM, 1]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


GOES_ON = """
import time, numpy as np, rallypoint as dist
dist.init_process_group()
while True:
    dist.all_reduce(np.ones(8, np.float32))
    time.sleep(0.01)
"""


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")
def test_a_network_that_drops_what_workers_send(needs_hosts: None, tmp_path: Path) -> None:
    """The agents reach each other: it is the connections of the workers that are silent."""
    script = tmp_path / "worker.py"
    script.write_text(GOES_ON)
    words = f"run {WAYS['elastic'].replace('3', '2', 1)} --hang-after 3 {script}"
    with Hosts(2) as hosts:
        nodes = []
        for host in hosts.hosts:
            with (tmp_path / f"err.{host.number}").open("wb") as file:
                command = [*RALLYPOINT, *words.split()]
                nodes.append(host.popen(command, cwd=tmp_path, stderr=file))
        try:
            deadline = time.monotonic() + 60
            while not told(hosts[1], "explain").stdout.startswith("no hang: calls continue"):
                assert time.monotonic() < deadline, told(hosts[1], "explain")
            # All but what agents and the store listen at.
            hosts.switch.run(
                "nft",
                "add table bridge faults\n"
                "add chain bridge faults drops { type filter hook forward priority 0; }\n"
                "add rule bridge faults drops tcp sport != 29400 tcp dport != 29400 "
                "tcp sport > 32767 tcp dport > 32767 drop",
            )
            deadline = time.monotonic() + 60
            while "nothing arrives from host" not in (done := told(hosts[1], "explain")).stdout:
                assert time.monotonic() < deadline, done
            assert done.returncode == 3
            found = re.match(
                r"all entered #\d+ \(all_reduce of default group\); nothing arrives from host "
                r"10\.77\.0\.[12] for (\d+\.\d) s \((\d+) retransmits\)",
                done.stdout,
            )
            assert found, done
            assert float(found[1]) >= 2
            assert int(found[2]) >= 1
        finally:
            for node in nodes:
                node.kill()
                node.wait()
