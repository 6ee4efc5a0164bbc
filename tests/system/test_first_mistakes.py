"""What everybody types wrongly at first: told soon, by one sentence, with a cure that works."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_jobs import rallypoint

from rallypoint.store.port_holder import holder_of

pytestmark = pytest.mark.system

SCRIPT = (
    "import os\n"
    "rank, ranks = (os.environ[name] for name in ('RANK', 'WORLD_SIZE'))\n"
    "os.write(1, f'rank {rank} of {ranks}\\n'.encode())\n"
)
NOWHERE = "no-such-host.invalid"
ELSEWHERE = "198.51.100.7"  # nobody's
TOLD_S = 2.0


class Mistake(NamedTuple):
    """What is typed, what is said of it, and what to type instead, one line for each launcher."""

    typed: str
    told: str
    instead: Sequence[str] = ()
    environ: Mapping[str, str] = {}


DOCTOR = r"; to find out more, end this and run `rallypoint doctor --nnodes 2 [^`]*`"
MISTAKES = {
    "mpirun's flag": Mistake(
        "-np 2 train.py",
        r"run: unknown flag -np; did you mean --nproc-per-node\?",
        ["--nproc-per-node 2 train.py"],
    ),
    "flags behind the script": Mistake(
        "train.py --nproc_per_node 2",
        r"run: --nproc_per_node is after train\.py and passed to it; write launcher flags "
        r"before it, as in: rallypoint run --nproc_per_node \.\.\. train\.py",
        ["--nproc_per_node 2 train.py"],
    ),
    "python before the script": Mistake(
        "python train.py",
        r"run: script 'python' does not exist; the launcher starts Python itself: leave that word "
        r"out, as in: rallypoint run train\.py",
        ["train.py"],
    ),
    "a script that is not there": Mistake(
        "trian.py",
        r"run: script 'trian\.py' does not exist; did you mean train\.py\?",
        ["train.py"],
    ),
    "no address of the first node": Mistake(
        "--nnodes 2 --node-rank 1 --master-port PORT train.py",
        r"not all nodes have connected yet: 127\.0\.0\.1:PORT, the endpoint, can only be "
        rf"reached from this machine; .*\(--master-addr or --rdzv-endpoint\){DOCTOR}",
        [
            "--nnodes 2 --node-rank 0 --master-addr HERE --master-port PORT train.py",
            "--nnodes 2 --node-rank 1 --master-addr HERE --master-port PORT train.py",
        ],
    ),
    "a name that does not resolve": Mistake(
        f"--nnodes 2 --node-rank 1 --master-addr {NOWHERE} train.py",
        rf"not all nodes have connected yet: the name {NOWHERE} cannot be resolved .*; add .* to "
        rf"/etc/hosts or to the name service, or give addresses instead of names{DOCTOR}",
        [
            "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port PORT train.py",
            "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port PORT train.py",
        ],
    ),
    "such a name of the meeting point": Mistake(
        f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint {NOWHERE}:PORT train.py",
        rf"cannot find the host '{NOWHERE}' .*; give its address .*; waiting for up to 600 s, as .*"
        rf"{DOCTOR}",
        ["--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HERE:PORT train.py"] * 2,
    ),
    "a port that is held": Mistake(
        "--master-port HELD train.py",
        r"run: cannot listen on 127\.0\.0\.1, port HELD: it is in use by process PID .*; end that "
        r"process, or choose another port \(--master-port, or that of --rdzv-endpoint\)\.",
        ["--master-port PORT train.py"],
    ),
    "a meeting point that is held": Mistake(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:HELD train.py",
        r"not all nodes have connected yet: localhost:HELD is held by process PID .*, which is not "
        rf"a launcher of this job; end that process, or choose another port .*{DOCTOR}",
        ["--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:PORT train.py"] * 2,
    ),
    "an interface that is not there": Mistake(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT train.py",
        r"run: RALLYPOINT_SOCKET_IFNAME=wlan9: no interface of this machine that is up and has an "
        r"address matches: it has .*; set RALLYPOINT_SOCKET_IFNAME=\S+, or unset it$",
        ["--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT train.py"] * 2,
        environ={"RALLYPOINT_SOCKET_IFNAME": "wlan9"},
    ),
    "two first nodes": Mistake(
        "--nnodes 2 --master-port LED train.py",
        r"run: cannot listen on 127\.0\.0\.1, port LED: it is in use by process .* if that is "
        r"another node of this job, give each node its own --node-rank\.",
        ["--nnodes 2 --node-rank 1 --master-port LED train.py"],
    ),
    "two first nodes on two machines": Mistake(
        f"--nnodes 2 --master-addr {ELSEWHERE} --master-port PORT train.py",
        rf"not all nodes have connected yet: this node waits for the others at "
        rf"{ELSEWHERE}, which is not an address of this machine; give each node its own "
        rf"--node-rank .*{DOCTOR}",
    ),
}


class Places:
    """Ports and names to put into what is typed."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._held = socket.create_server(("127.0.0.1", 0))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.first: Launch | None = None
        self._values = {
            "PORT": str(port),
            "HELD": str(self._held.getsockname()[1]),
            "PID": str(os.getpid()),
            "HERE": "localhost",
            "HOST": os.uname().nodename,
        }

    def fill(self, text: str) -> str:
        """With the ports and names of this test; LED: another launcher of a job is there."""
        if "LED" in text:
            self._begin_first()
        for name, value in self._values.items():
            text = text.replace(name, value)
        return text

    def _begin_first(self) -> None:
        if self.first is not None:
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._values["LED"] = str(port)
        self.first = self.another("first")
        self.first.start(*f"--nnodes 2 --master-port {port} train.py".split())
        wait_until(lambda: "rallypoint" in holder_of(port))

    def another(self, name: str) -> Launch:
        """Another launch, with the same script."""
        directory = self.launch.directory / name
        directory.mkdir()
        launch = Launch(directory)
        launch.script(SCRIPT, "train.py")
        return launch

    def close(self) -> None:
        """End what was begun here."""
        self._held.close()
        if self.first is None or self.first.process is None:
            return
        if self.first.process.poll() is None:
            self.first.process.terminate()
        self.first.process.wait(60)


@pytest.fixture
def places(launch: Launch) -> Iterator[Places]:
    launch.script(SCRIPT, "train.py")
    places = Places(launch)
    yield places
    places.close()


def type_it(mistake: Mistake, places: Places, *, within_s: float = 60.0) -> float:
    """Type it, and wait until it is told; returns how long that took."""
    words, told = places.fill(mistake.typed).split(), places.fill(mistake.told)
    pattern = re.compile(rf"^rallypoint:? {told}", re.MULTILINE)
    began = time.monotonic()
    process = places.launch.start(*words, environ=dict(mistake.environ))
    wait_until(
        lambda: pattern.search(places.launch.err) or process.poll() is not None, within_s=within_s
    )
    took_s = time.monotonic() - began
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert len(pattern.findall(places.launch.err)) == 1, (told, places.launch.err)
    return took_s


@pytest.mark.everyday
@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_told_and_the_cure_works(name: str, places: Places) -> None:
    mistake = MISTAKES[name]
    type_it(mistake, places)
    nodes = [places.another(f"node{number}") for number in range(len(mistake.instead))]
    for node, words in zip(nodes, mistake.instead, strict=True):
        node.start(*places.fill(words).split())
    if places.first is not None:
        nodes.append(places.first)
    for node in nodes:
        assert node.process is not None
        assert node.process.wait(120) == 0, node.err
        assert node.out.startswith("rank ")


@pytest.mark.alone  # two seconds are meant for a machine that does nothing else
@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_told_soon(name: str, places: Places) -> None:
    places.fill(MISTAKES[name].typed)  # what runs before
    assert type_it(MISTAKES[name], places) < TOLD_S


@pytest.mark.everyday
def test_doctor_names_who_holds_the_port_of_a_single_node(places: Places) -> None:
    words = places.fill("--rdzv-backend c10d --nnodes 1 --rdzv-endpoint 127.0.0.1:HELD").split()
    assert places.launch.run(*words, "train.py") == 1
    doctor = rallypoint("doctor", *words)
    assert doctor.returncode == 1
    for told in (places.launch.err, doctor.stdout):
        assert f"by process {os.getpid()} (" in told


@pytest.mark.everyday
def test_several_hosts_can_be_tried_on_this_machine(launch: Launch) -> None:
    script = launch.script(
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "array = np.ones(4)\n"
        "dist.all_reduce(array)\n"
        "import os; os.write(1, b'sum %d\\n' % array[0])\n"
    )
    assert launch.run("--hosts", "localhost:2,127.0.0.1:2", script) == 0, launch.err
    assert launch.out.count("sum 4") == 4
    assert "starting on 2 hosts" in launch.err
    assert "not all nodes have connected" not in launch.err


@pytest.mark.seldom
def test_notices_come_less_and_less_often(launch: Launch, free_port: int) -> None:
    """In all, what waits for 12 s is told twice: at the start, and after 10 s."""
    flags = ("--nnodes", "2", "--master-port", str(free_port), "--rdzv-conf", "timeout=12")
    assert launch.run(*flags, launch.script(SCRIPT)) == 1
    lines = [
        line for line in launch.err.splitlines() if "joined" in line or "connected yet" in line
    ]
    assert ["not all nodes have connected yet" in line for line in lines] == [True, False, False]
    assert lines[1].endswith("1/2 nodes joined; missing node-rank 1")
    assert "job failed: 1/2 nodes joined; missing node-rank 1, after 12 s" in lines[2]
    assert Path(launch.directory).exists()
