"""Agents alone know the job's token: no process that one starts has its bytes."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until

pytestmark = pytest.mark.system

TOKEN = b"the-token-of-this-test"
WORKER = """
import os, pathlib, time
pathlib.Path(f"here.{os.getpid()}").touch()
import rallypoint as dist
dist.init_process_group()
dist.barrier()
pathlib.Path(f"in.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.getpid()}").touch()
while dist.get_rank() == 0 and not os.path.exists("end"): time.sleep(0.01)
dist.barrier()  # a hang, which the agent has inspected
"""
FUNCTION = """
import sys
from rallypoint.launch import LaunchConfig, elastic_launch
config = LaunchConfig(nproc_per_node=2, max_restarts=1, token=sys.argv[1].encode())
elastic_launch(config, sys.executable)(sys.argv[2])
"""


def started_by(agent: int) -> list[int]:
    """All processes below that one."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children[parent].append(int(entry.name))
    found = [agent]
    for pid in found:
        found += children[pid]
    return found[1:]


def knows(pid: int) -> list[str]:
    """Where a process has the token: in its arguments, its environment, or a file it holds."""
    process = Path("/proc", str(pid))
    places = [process / "cmdline", process / "environ"]
    with suppress(OSError):
        places += [fd for fd in (process / "fd").iterdir() if fd.is_file()]
    found = []
    for place in places:
        with suppress(OSError), place.open("rb") as file:
            if TOKEN in file.read(1 << 24):
                found.append(f"{place}: {(process / 'cmdline').read_bytes()!r}")
    return found


@pytest.mark.parametrize("way", ["variable", "file", "function"])
def test_no_process_of_a_job_has_its_token(launch: Launch, way: str) -> None:
    """Neither guardian, worker, spare, replacement, nor what inspects for the agent."""
    script = launch.script(WORKER)
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--spares", "1"]
    options += ["--hang-after", "1"]
    if way == "variable":
        agent = launch.start(*options, script, environ={"RALLYPOINT_TOKEN": TOKEN.decode()})
    elif way == "file":
        file = launch.directory / "token"
        file.write_bytes(TOKEN)
        agent = launch.start(*options, "--token-file", str(file), script)
    else:
        launcher = launch.script(FUNCTION, "launcher.py")
        agent = launch.start(TOKEN.decode(), script, launcher=(launcher,))
    is_function = way == "function"
    inspected = is_function  # it has no option to look so soon

    def look() -> bool:
        nonlocal inspected
        for pid in started_by(agent.pid):
            assert knows(pid) == []
            with suppress(OSError):
                inspected |= b"launch.inspection" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return inspected

    launch.wait_for("here.*", 2 if is_function else 3)
    first = launch.wait_for("in.0.*", 2)
    wait_until(look)
    os.kill(int(first[0].name.rpartition(".")[2]), signal.SIGKILL)
    launch.wait_for("in.1.*", 2)
    wait_until(lambda: len(started_by(agent.pid)) >= (3 if is_function else 4))
    look()
    (launch.directory / "end").touch()
    assert agent.wait(100) == 0, launch.err
