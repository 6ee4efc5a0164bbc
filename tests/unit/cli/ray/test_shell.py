"""A program on a node, as an actor runs it: its streams, its environment, its end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rallypoint.cli.ray.shell import Shell

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
from rallypoint.cli.ray.shell import Shell
shell = Shell()
shell.start("copy_input")
while True:
    os.write(1, shell.read()[0])
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy_input.py").write_text(COPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)


def read_all(shell: Shell) -> tuple[bytes, bytes]:
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
        reading = pool.submit(read_all, shell)
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
    told = json.loads(read_all(shell)[0])
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
