"""No false deaths: three hosts on a machine that is busy, with agents that are paused now and then.

RALLYPOINT_TEST_LOAD_S says for how long.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.nodes import Agents

pytestmark = [pytest.mark.system, pytest.mark.alone]  # it makes its own load

LOAD_S = float(os.environ.get("RALLYPOINT_TEST_LOAD_S", "0"))
HOSTS = (1, 2, 3)
PAUSE_S, PAUSE_EVERY_S = 4.0, 15.0
# Where stress-ng is absent: two cores, memory, and a disk.
STAND_IN = (
    "while True: sum(range(1000))",
    "while True: sum(range(1000))",
    "while True: bytearray(256 << 20)",
    "import os, tempfile\n"
    "with tempfile.TemporaryFile(dir='.') as file:\n"
    "    while True:\n"
    "        os.pwrite(file.fileno(), bytes(64 << 20), 0)\n"
    "        os.fsync(file.fileno())\n",
)


@contextmanager
def load(directory: Path) -> Iterator[None]:
    """Two cores, memory and the disk are busy within the block."""
    commands = [[sys.executable, "-c", text] for text in STAND_IN]
    if shutil.which("stress-ng"):
        words = "stress-ng --cpu 2 --vm 1 --vm-bytes 256m --hdd 1 --hdd-bytes 256m --temp-path"
        commands = [[*words.split(), str(directory)]]
    processes = [
        subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL) for command in commands
    ]
    try:
        yield
        assert all(process.poll() is None for process in processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


@pytest.mark.skipif(LOAD_S == 0, reason="only in make check-long")
@pytest.mark.timeout(120 + LOAD_S)
def test_nobody_is_told_dead(needs_hosts: None, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Hosts(3) as hosts:
        agents = Agents(hosts, tmp_path)
        for number in HOSTS:
            agents.start(number, "--nnodes", "2:3", "--max-restarts", "0", "--verbose")
        expected = {f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in HOSTS}
        agents.wait_for(expected)
        time.sleep(1)  # they may still have something to say
        story = agents.story()
        pauses: list[int] = []
        with load(tmp_path):
            began = time.monotonic()
            while time.monotonic() < began + LOAD_S:
                time.sleep(PAUSE_EVERY_S * (0.5 + chance.random()))
                pauses.append(chance.choice(HOSTS))
                agents.send(pauses[-1], signal.SIGSTOP)
                time.sleep(PAUSE_S)
                agents.send(pauses[-1], signal.SIGCONT)
                time.sleep(PAUSE_S)  # for what follows from it
                after = f"{time.monotonic() - began:.0f} s and pauses of hosts {pauses}"
                assert agents.up() == expected, f"after {after}: {agents.story()}"
                assert agents.story() == story, f"after {after}: {agents.story()}"
        agents.finish(HOSTS)
    print(f"no death within {LOAD_S:.0f} s of load, with {len(pauses)} pauses of {PAUSE_S:.0f} s")
