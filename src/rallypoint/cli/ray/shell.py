"""The actor that runs on a node: it starts node.py, and carries its input and outputs.

Ray calls its methods; `read` blocks, so it and the orders each need a thread of their own. When the
actor ends, however it ends, node.py reaches the end of its input and ends its launcher. Ray does
not end an actor whose raylet was killed, so this one ends itself then.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from rallypoint.base.process_end import ProcessEnd

_READ_BYTES = 64 << 10  # small enough that Ray sends it within a reply
_THREADS = "OMP_NUM_THREADS"
_RAYLET = "RAY_RAYLET_PID"
_DEBUGGER = "PYTHONBREAKPOINT"


class Shell:
    """A program on this node, and its three streams."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._poll = select.poll()
        self._raylet: ProcessEnd | None = None
        # By descriptor, what is read: 0 is stdout, 1 is stderr.
        self._open: dict[int, tuple[int, IO[bytes]]] = {}

    def look(self) -> str:
        """The working directory that Ray gave this actor."""
        return os.getcwd()

    def start(self, module: str) -> None:
        """Start that module of ours as a program."""
        with open("/proc/self/environ", "rb") as file:
            given = {os.fsdecode(word.partition(b"=")[0]) for word in file.read().split(b"\0")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=without_ray(os.environ, given),
            bufsize=0,
            start_new_session=True,
        )
        for number, stream in enumerate((self._process.stdout, self._process.stderr)):
            assert stream is not None
            self._open[stream.fileno()] = (number, stream)
            self._poll.register(stream.fileno(), select.POLLIN)
        with contextlib.suppress(OSError, ValueError):  # the raylet is not visible from a container
            self._raylet = ProcessEnd(int(os.environ.get(_RAYLET, "")))
            self._poll.register(self._raylet, select.POLLIN)

    def write(self, data: bytes) -> None:
        """Write all of this to the program's input."""
        while data:
            data = data[os.write(self._stdin.fileno(), data) :]

    def end_input(self) -> None:
        """Close the program's input; it then ends by itself."""
        self._stdin.close()

    def read(self) -> tuple[bytes, bytes]:
        """The program's output on stdout and stderr; waits for some. Both empty: it has ended."""
        found = [b"", b""]
        while self._open and not any(found):
            for fd, _ in self._poll.poll():
                if self._raylet is not None and fd == self._raylet.fileno():
                    os._exit(1)
                data = os.read(fd, _READ_BYTES)
                number, stream = self._open[fd]
                found[number] = data
                if not data:
                    self._poll.unregister(fd)
                    del self._open[fd]
                    stream.close()
        if not any(found) and self._process is not None:
            self._process.wait()
        return found[0], found[1]

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin


def without_ray(environ: Mapping[str, str], given: set[str]) -> dict[str, str]:
    """The environment without the variables that Ray sets for its own programs.

    Args:
        environ: the environment of an actor's process.
        given: the variables with which it was started.
    """
    kept = dict(environ)
    if _THREADS not in given:  # Ray derives it from the actor's CPUs, which all workers share
        kept.pop(_THREADS, None)
    if kept.get(_DEBUGGER, "").startswith("ray."):
        del kept[_DEBUGGER]
    return kept
