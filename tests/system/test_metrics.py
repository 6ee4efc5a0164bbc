"""`rallypoint metrics` and `run --metrics` on real jobs: the numbers, and when an exporter ends."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.hosts import Hosts
from tests.pages import blocks_tested_by
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_jobs import rallypoint

pytestmark = pytest.mark.system

# Until there is the file "stop", which rank 0 tells the other ranks.
STEPS = """
import os, time, numpy as np, rallypoint as dist
dist.init_process_group()
rank, step, stop = dist.get_rank(), 0, np.zeros(1, np.float32)
while not stop[0]:
    time.sleep(0.01)
    stop[0] = os.path.exists("stop") if rank == 0 else 0
    dist.all_reduce(stop)
    step += 1
    dist.progress(step, 100_000)
    if step == 1:
        open(f"ready.{rank}", "w")
open(f"new.{rank}", "w").write(str(step))
os.rename(f"new.{rank}", f"done.{rank}")
while True:
    time.sleep(600)
"""
Series = dict[tuple[str, str, str], float]  # by name, job and rank


def start(launch: Launch, *flags: str) -> subprocess.Popen[bytes]:
    launch.directory.mkdir(exist_ok=True)
    process = launch.start("--nproc-per-node", "2", *flags, launch.script(STEPS))
    launch.wait_for("ready.*", 2)
    return process


def scraped(address: str) -> Series:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        (each.name, each.labels.get("run_id", ""), each.labels.get("rank", "")): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if family.type != "stateset"
    }


def serves(address: str) -> bool:
    try:
        socket.create_connection(address.rsplit(":", 1)).close()  # type: ignore[arg-type]
    except ConnectionRefusedError:
        return False
    return True


def jobs_at(address: str) -> set[str]:
    return {run_id for name, run_id, _ in scraped(address) if name == "rallypoint_job_info"}


def address_in(text: str) -> str:
    (address,) = re.findall(r"metrics are at http://(\S+)/metrics", text)
    return str(address)


@pytest.fixture
def address() -> str:
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def exporter(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "rallypoint", "metrics", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def test_counters_never_fall_and_are_those_of_the_program(launch: Launch) -> None:
    process = start(launch, "--rdzv-id", "try", "--metrics", "127.0.0.1:0")
    address = address_in(launch.err)
    wait_until(lambda: ("rallypoint_steps_total", "try", "") in scraped(address))
    before: Series = {}
    scrapes = []
    for _ in range(40):
        now = scraped(address)
        for key, value in before.items():
            assert not key[0].endswith("_total") or now[key] >= value, key
        before = now
        scrapes.append(now["rallypoint_steps_total", "try", ""])
        time.sleep(0.1)
    assert scrapes[-1] > scrapes[0]
    launch.script("", "stop")
    done = {int(path.read_text()) for path in launch.wait_for("done.*", 2)}
    assert len(done) == 1

    def are_those_of_the_program() -> bool:
        now = scraped(address)
        names = ("steps", ""), ("calls", "0"), ("calls", "1")
        return {now[f"rallypoint_{name}_total", "try", rank] for name, rank in names} == done

    wait_until(are_those_of_the_program)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    wait_until(lambda: not serves(address))


def test_the_guides_commands(launch: Launch) -> None:
    (block,) = blocks_tested_by("tests/system/test_metrics.py::test_the_guides_commands")
    ((program, command, *words),) = block.commands()
    assert (program, command) == ("rallypoint", "run")
    launch.script(STEPS, "train.py")
    assert "127.0.0.1:9431" in words  # another program may listen there
    launch.start(*(word.replace("9431", "0") for word in words))
    launch.wait_for("ready.*", 2)
    wait_until(lambda: len(jobs_at(address_in(launch.err))) == 1)


@pytest.mark.everyday
def test_a_second_job_joins_the_exporter_which_ends_with_the_last_one(
    launch: Launch, address: str, tmp_path: Path
) -> None:
    first = start(launch, "--rdzv-id", "first", "--metrics", address)
    other = Launch(tmp_path / "other")
    try:
        second = start(other, "--rdzv-id", "second", "--metrics", address)
        assert f"your exporter at {address} serves the metrics of this job, too" in other.err
        wait_until(lambda: jobs_at(address) == {"first", "second"})
        first.send_signal(signal.SIGINT)
        first.wait(60)
        wait_until(lambda: jobs_at(address) == {"second"})
        second.send_signal(signal.SIGTERM)
        second.wait(60)
        wait_until(lambda: not serves(address))
    finally:
        assert other.process is not None
        other.process.kill()
        other.process.wait(60)
        other.expect_nothing_left()


def test_each_node_serves_its_ranks_and_the_first_one_the_job(
    needs_hosts: None, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(STEPS)
    run = f"run --metrics 127.0.0.1:9431 --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \
        --rdzv-endpoint 10.77.0.1:29400 {script}"
    with Hosts(2) as hosts:
        nodes = []
        for number, host in enumerate(hosts.hosts):
            own = f"RALLYPOINT_RUN_DIR={tmp_path}/host{number}"  # each is a machine of its own
            command = ["env", own, sys.executable, "-m", "rallypoint", *run.split()]
            nodes.append(host.popen(command, cwd=tmp_path))
        url = "http://127.0.0.1:9431/metrics"
        program = f"import urllib.request as u; print(u.urlopen('{url}').read().decode())"

        def has_ranks(host: int, family: str, *ranks: int) -> bool:
            text = hosts[host].run(sys.executable, "-c", program)
            print(text)
            found = re.findall(rf'^rallypoint_{family}{{.*rank="(\d+)"', text, re.MULTILINE)
            return sorted(map(int, found)) == list(ranks)

        def node_ranks(host: int) -> list[int]:
            return [each for each in (0, 1) if has_ranks(host, "job_info", each)]

        try:
            wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 4)
            for number in (1, 2):
                wait_until(partial(node_ranks, number))
                (own_rank,) = node_ranks(number)
                ranks = (2 * own_rank, 2 * own_rank + 1)
                wait_until(partial(has_ranks, number, "calls_total", *ranks))
                of_job = (0, 1, 2, 3) if own_rank == 0 else ()
                wait_until(partial(has_ranks, number, "lateness_seconds", *of_job))
        finally:
            for node in nodes:
                node.kill()
                node.wait()


def test_a_killed_launcher_leaves_no_exporter(launch: Launch, address: str) -> None:
    process = start(launch, "--metrics", address)
    wait_until(lambda: len(jobs_at(address)) == 1)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not serves(address))


def test_an_exporter_by_hand(launch: Launch, address: str) -> None:
    with exporter("--listen", address) as process:
        assert process.stderr is not None
        assert address_in(process.stderr.readline()) == address
        assert jobs_at(address) == set()
        start(launch, "--rdzv-id", "try", "--metrics", address)
        assert f"your exporter at {address} serves" in launch.err
        wait_until(lambda: jobs_at(address) == {"try"})
        again = rallypoint("metrics", "--listen", address)
        assert again.returncode == 1
        assert "serves all your jobs already" in again.stderr
        assert process.poll() is None


def test_a_port_that_another_program_has(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert launch.run("--metrics", address, launch.script("open('ran', 'w')")) == 1
        assert f"{address}: another program listens there; choose another port" in launch.err
        assert not (launch.directory / "ran").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "127.0.0.1.example.com"])
def test_strangers_are_let_in_only_by_a_flag(host: str) -> None:
    address = f"{host}:9431"
    for words in (("metrics", "--listen", address), ("run", "--metrics", address, "/dev/null")):
        done = rallypoint(*words)
        assert done.returncode == 2
        assert f"everyone who reaches {address} can read" in done.stderr
        assert "add --metrics-public" in done.stderr


def test_what_strangers_can_read_is_said() -> None:
    with exporter("--listen", "0.0.0.0:0", "--metrics-public") as process:
        assert process.stderr is not None
        address = address_in(process.stderr.readline())
        assert f"everyone who reaches {address} can read" in process.stderr.readline()
        assert serves(address)


def test_a_file_for_node_exporter(launch: Launch, tmp_path: Path) -> None:
    start(launch, "--rdzv-id", "try")
    path = tmp_path / f"rallypoint-{os.geteuid()}.prom"
    with exporter("--textfile", str(tmp_path)) as process:
        wait_until(path.exists)
        text = path.read_text()
        assert '\nrallypoint_job_info{run_id="try",' in text
        assert "EOF" not in text
        assert process.poll() is None
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("*.prom*"))
    done = rallypoint("metrics", "--textfile", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr


def test_the_dashboard_is_printed() -> None:
    assert '"uid": "rallypoint-job"' in rallypoint("metrics", "--dashboard").stdout
