"""What goes to and fro between the starter and an actor, which here is in this process; and the
actor's end: its streams, its environment, its end.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.cli.ray.actors import Actor, ray

from rallypoint.cli.ray.cluster import Channel, Shell

MODULE = "a.program"


class Program:
    """In place of a Shell: returns its input as its output, and tells its end on stderr."""

    def __init__(self) -> None:
        self._copied: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()

    def start(self, module: str) -> None:
        if module != MODULE:
            raise ModuleNotFoundError(f"No module named {module!r}")

    def write(self, data: bytes) -> None:
        self._copied.put((data, b""))

    def end_input(self) -> None:
        self._copied.put((b"", b"done\n"))
        self.end()

    def end(self) -> None:
        self._copied.put((b"", b""))

    def read(self) -> tuple[bytes, bytes]:
        return self._copied.get()


@pytest.fixture
def actor() -> Iterator[Actor]:
    actor = Actor(Program())
    yield actor
    if not actor.is_killed:
        actor.kill("the test is over")


def read_all(fd: int) -> bytes:
    """Until its end; closes it, as the link does."""
    found = b""
    while data := os.read(fd, 1 << 16):
        found += data
    os.close(fd)
    return found


def has_ended(channel: Channel, within_s: float | None = None) -> bool:
    return bool(select.select([channel.ended], [], [], within_s)[0])


def join(channel: Channel) -> None:
    for thread in channel.threads:
        thread.join()


def test_what_is_written_comes_back_in_order(actor: Actor) -> None:
    channel = Channel(actor, ray(), MODULE)
    for piece in (b"one ", b"two ", b"three\n"):
        os.write(channel.stdin, piece)
    assert os.read(channel.stdout, 4) == b"one "
    assert not has_ended(channel, 0)
    os.write(channel.stdin, many := b"line\n" * 10_000)
    os.close(channel.stdin)
    assert read_all(channel.stdout) == b"two three\n" + many
    assert read_all(channel.stderr) == b"done\n"
    assert has_ended(channel)
    assert not channel.is_lost
    assert channel.why("") == "the program there exited before it answered"
    channel.close()
    join(channel)


def test_the_actor_is_lost(actor: Actor) -> None:
    channel = Channel(actor, ray(), MODULE)
    os.write(channel.stdin, b"up")
    assert os.read(channel.stdout, 2) == b"up"
    actor.kill("\nThe actor died.\n\tclass_name: Shell\n")
    assert has_ended(channel)
    assert channel.is_lost
    assert channel.why("") == "The actor died"
    os.close(channel.stdin)
    assert read_all(channel.stdout) + read_all(channel.stderr) == b""
    channel.close()
    join(channel)


def test_the_program_cannot_be_started(actor: Actor) -> None:
    channel = Channel(actor, ray(), "another.program")
    assert has_ended(channel)
    why = channel.why("python: No module named 'rallypoint'")
    assert why == "install Rallypoint there as well, for the Python that runs Ray"
    assert channel.why("") == "ModuleNotFoundError: No module named 'another.program'"
    os.close(channel.stdin)
    assert read_all(channel.stdout) + read_all(channel.stderr) == b""
    channel.close()
    join(channel)


def test_it_is_ended_from_here(actor: Actor) -> None:
    channel = Channel(actor, ray(), MODULE)
    channel.end()
    assert actor.is_killed
    assert has_ended(channel)
    os.close(channel.stdin)
    assert read_all(channel.stdout) + read_all(channel.stderr) == b""
    channel.close()
    join(channel)


def test_nobody_reads_any_more(actor: Actor) -> None:
    """The link is closed while the program still writes: both threads end, and nothing is told."""
    channel = Channel(actor, ray(), MODULE)
    os.close(channel.stdout)
    os.close(channel.stderr)
    os.write(channel.stdin, b"for nobody")
    assert has_ended(channel)
    assert not channel.is_lost
    os.close(channel.stdin)
    channel.close()
    join(channel)


# Begins with what it was started with, then copies its input, and tells the end of it.
COPY = """
import json, os, shutil, sys
told = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "HOME")}
print(json.dumps({**told, "pid": os.getpid(), "session": os.getsid(0)}), flush=True)
shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)
print("end of input", file=sys.stderr)
"""
# An actor that passes on what it reads, until it is ended.
ACTOR = """
import os
from rallypoint.cli.ray.cluster import Shell
shell = Shell()
shell.start("copy_input")
while True:
    os.write(1, shell.read()[0])
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy_input.py").write_text(COPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)


def read_shell(shell: Shell) -> tuple[bytes, bytes]:
    """Until it says that the program has ended."""
    out = err = b""
    while any(found := shell.read()):
        out, err = out + found[0], err + found[1]
    return out, err


def test_its_streams_are_carried_whole() -> None:
    shell = Shell()
    assert shell.look() == str(Path.cwd())
    shell.start("copy_input")
    sent = b"line\n" * 200_000  # more than pipes hold, so both directions are under way at once
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_shell, shell)
        shell.write(sent)
        shell.end_input()
        out, err = reading.result()
    assert out.partition(b"\n")[2] == sent
    assert err == b"end of input\n"
    assert shell.read() == (b"", b"")


def test_it_is_no_program_of_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/me")
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # as Ray does in an actor that has begun
    began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    is_rays = not any(word.startswith(b"OMP_NUM_THREADS=") for word in began_with)
    shell = Shell()
    shell.start("copy_input")
    shell.end_input()
    told = json.loads(read_shell(shell)[0])
    assert told["HOME"] == "/me"
    assert told["PYTHONBREAKPOINT"] is None
    assert told["OMP_NUM_THREADS"] == (None if is_rays else "8")
    assert told["session"] == told["pid"]  # what Ray signals is not signalled


def test_it_ends_with_the_raylet() -> None:
    raylet = subprocess.Popen(["sleep", "600"])
    environ = {**os.environ, "RAY_RAYLET_PID": str(raylet.pid)}
    actor = subprocess.Popen([sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, env=environ)
    try:
        assert actor.stdout is not None
        program = os.pidfd_open(json.loads(actor.stdout.readline())["pid"])
        assert select.select([program], [], [], 0)[0] == []
        raylet.send_signal(signal.SIGKILL)
        assert actor.wait() == 1
        assert select.select([program], [], [])[0] == [program]
        os.close(program)
        actor.stdout.close()
    finally:
        for process in (raylet, actor):
            process.kill()
            process.wait()
