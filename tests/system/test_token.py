"""Agents alone know the job's token: no process that one starts has its bytes.

Not in its arguments, its environment, the files it holds and the pipes it can read, nor in its
memory: the guardian, workers, spares, replacements, what inspects for the agent, and the processes
that import and fork for --preload. However the token was given.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until

pytestmark = pytest.mark.system

TOKEN = b"the-token-of-this-test"
MOST_BYTES = 1 << 24
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
# What a shell puts before the launcher's command, and what the launcher then reads.
GIVEN_BY_SHELL = {
    "stdin": ('exec "$0" "$@" < token', "/dev/stdin"),
    "pipe": ('exec "$0" "$@" < <(cat token)', "/dev/stdin"),
    "descriptor": ('exec "$0" "$@" 9< token', "/dev/fd/9"),
}


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


def command_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def content_of(path: Path) -> bytes:
    """What a file has, or what waits in a pipe, and stays there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(kind):
            source, sink = os.pipe2(os.O_NONBLOCK)
            try:
                ctypes.CDLL(None).tee(descriptor, sink, ctypes.c_size_t(1 << 16), 2)  # no wait
                with suppress(BlockingIOError):
                    return os.read(source, 1 << 16)
            finally:
                os.close(source)
                os.close(sink)
        elif stat.S_ISREG(kind):
            return os.pread(descriptor, MOST_BYTES, 0)
    finally:
        os.close(descriptor)
    return b""


def memory_of(pid: int) -> Iterator[tuple[str, bytes]]:
    """A process's own memory, by mapping: what comes from files was seen there."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in lines:
            span, access, _, _, inode, *name = line.split(maxsplit=5)
            first, last = (int(each, 16) for each in span.split("-"))
            if access[:2] == "rw" and (access[3] == "p" or inode != "0"):
                with suppress(OSError, ValueError, OverflowError):
                    memory.seek(first)
                    yield f"memory {' '.join(name)}", memory.read(min(last - first, MOST_BYTES))


def knows(pid: int) -> list[str]:
    """Where a process has the token."""
    process, found = Path("/proc", str(pid)), []
    for name in ("cmdline", "environ"):
        with suppress(OSError):
            found += [name] * (TOKEN in (process / name).read_bytes())
    with suppress(OSError):
        for each in (process / "fd").iterdir():
            with suppress(OSError):
                found += [f"descriptor {each.name}"] * (TOKEN in content_of(each))
    with suppress(OSError):
        found += [name for name, content in memory_of(pid) if TOKEN in content]
    return [f"{pid} {command_of(pid)!r}: {each}" for each in found]


def test_what_this_test_finds(tmp_path: Path) -> None:
    """It finds the token of this process in each place, so it would find that of another."""
    file = tmp_path / "token"
    file.write_bytes(TOKEN)
    source, sink = os.pipe()
    with file.open("rb") as held:
        os.write(sink, TOKEN)
        found = " ".join(knows(os.getpid()))
        assert f"descriptor {held.fileno()}" in found
        assert f"descriptor {source}" in found
        assert "memory" in found
    assert os.read(source, 100) == TOKEN
    os.close(source)
    os.close(sink)


@pytest.mark.parametrize(
    ("way", "preload"),
    [*product(("variable", "file", *GIVEN_BY_SHELL), (False, True)), ("function", False)],
)
def test_no_process_of_a_job_has_its_token(launch: Launch, way: str, preload: bool) -> None:
    script = launch.script(WORKER)
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--spares", "1"]
    options += ["--hang-after", "1"]
    if preload:
        options += ["--preload", "decimal"]
    file = launch.directory / "token"
    file.write_bytes(TOKEN)
    is_function = way == "function"
    if way == "variable":
        agent = launch.start(*options, script, environ={"RALLYPOINT_TOKEN": TOKEN.decode()})
    elif way == "file":
        agent = launch.start(*options, "--token-file", str(file), script)
    elif is_function:
        launcher = launch.script(FUNCTION, "launcher.py")
        agent = launch.start(TOKEN.decode(), script, launcher=(launcher,))
    else:
        shell, name = GIVEN_BY_SHELL[way]
        agent = launch.start(*options, "--token-file", name, script, before=("bash", "-c", shell))
    wanted = {b"guardian", b"launch.inspection"}
    if is_function:
        wanted = {b"guardian"}  # it has no option to inspect so soon
    if preload:
        wanted.add(b"rallypoint-template")
    seen: set[bytes] = set()

    def look() -> bool:
        for pid in started_by(agent.pid):
            assert knows(pid) == []
            seen.update(each for each in wanted if each in command_of(pid))
        return seen == wanted

    launch.wait_for("here.*", 2 if is_function else 3)
    first = launch.wait_for("in.0.*", 2)
    wait_until(look)
    os.kill(int(first[0].name.rpartition(".")[2]), signal.SIGKILL)
    launch.wait_for("in.1.*", 2)
    wait_until(lambda: len(started_by(agent.pid)) >= (3 if is_function else 4))
    look()
    (launch.directory / "end").touch()
    assert agent.wait(100) == 0, launch.err
